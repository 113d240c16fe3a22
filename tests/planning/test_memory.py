"""Devices that a plan may name and a config's mesh on them; bytes of the formulas without an array beside."""

import pytest
from plan_rig import SHAPE, small

from calibadv_jax.contrib.planning.hardware import FRACTION, find_target, placed_on
from calibadv_jax.contrib.planning.memory import (
    estimate_memory,
    held_beside,
    memory_line,
    peak_memory,
    program_memory,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf


def test_devices_are_counted_from_the_topology(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    tpu, gpu = find_target(tpu="v5p:4x4x8"), find_target(gpu="h100", topology="2x2x8")
    assert (tpu.devices, str(tpu)) == (128, "128 v5p (4x4x8)")
    assert (gpu.devices, gpu.hosts, str(gpu)) == (32, 4, "32 H100 (2x2x8)")
    assert tpu.limit == 95e9 and gpu.limit == 0.75 * 84_942_979_072
    assert gpu.links == gpu.chip.network < find_target(gpu="h100", topology="1x1x8").links  # of another host
    assert tpu.hosts == 32 and tpu.links == tpu.chip.links == tpu.chip.network
    assert str(gpu.host) == "8 H100 (1x1x8)" and gpu.host.host == gpu.host
    monkeypatch.setenv(FRACTION, ".45")
    assert gpu.limit == 0.45 * 84_942_979_072 and tpu.limit == 95e9
    monkeypatch.setenv(FRACTION, "1.0")
    assert gpu.limit == 84_942_979_072
    monkeypatch.setenv(FRACTION, "45%")
    with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION is '45%'"):
        _ = gpu.limit


@pytest.mark.parametrize(
    ("named", "output"),
    [
        ({}, "name the devices: --tpu v5e:4x4, or --gpu h100"),
        ({"tpu": "v5e:4x4", "gpu": "h100"}, "name the devices"),
        *(({"tpu": name}, f"--tpu {name}: must be one") for name in ("v9", "v5p-4", "v3-8", "v5e:4x0")),
        ({"tpu": "v5e:4x4", "topology": "4x4"}, "--topology 4x4 is for --gpu"),
        ({"gpu": "a100", "topology": "1x1x8"}, "--gpu a100: must be one of h100, h200, h20"),
        ({"gpu": "h100"}, "--topology is missing: must be slices x hosts x GPUs"),
        ({"gpu": "h100", "topology": "8"}, "--topology 8: must be"),
    ],
)
def test_invalid_devices_are_refused(named, output):
    with pytest.raises(UserError) as error:
        find_target(**named)
    assert output in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "slice", "devices", "hosts", "host"),
    [
        ("v5e-1", "v5e:1x1", 1, 1, "v5e:1x1"),
        ("v5litepod-16", "v5e:4x4", 16, 4, "v5e:2x2"),
        ("v6e-8", "v6e:2x4", 8, 1, "v6e:2x4"),
        ("v6e-256", "v6e:16x16", 256, 64, "v6e:2x2"),
        ("v5p-8", "v5p:2x2x1", 4, 1, "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2", 8, 2, "v5p:2x2x1"),
        ("v4-32", "v4:2x2x4", 16, 4, "v4:2x2x1"),
    ],
)
def test_names_of_cloud_tpu_are_understood(name, slice, devices, hosts, host):
    target = find_target(tpu=name)
    assert (target.topology, target.devices, target.hosts) == (slice, devices, hosts)
    assert target.host.topology == host


def test_placed_config_or_proposed_keys_fit(tmp_path):
    target = find_target(tpu="v5e:2x4")
    placed = placed_on(small(tmp_path, learner__microbatch_rows=8), target)
    assert (placed.mesh.fsdp, placed.policy.attention) == (8, "splash")
    gpus = find_target(gpu="h100", topology="1x1x8")
    assert placed_on(small(tmp_path, learner__microbatch_rows=8), gpus).policy.attention == "triton"
    for mesh, single, advice in (
        ({"mesh__data": 2}, target, "multiple of mesh.data x mesh.fsdp = 8: set learner.microbatch_rows=8$"),
        (
            {"mesh__fsdp": 8, "learner__microbatch_rows": 16},  # the rows of a device stay
            find_target(gpu="h100", topology="1x1x1"),
            "mesh.fsdp=1 mesh.tensor=1 learner.microbatch_rows=2$",
        ),
    ):
        with pytest.raises(UserError, match=advice):
            placed_on(small(tmp_path, **mesh), single)
    for mesh in ({"mesh__fsdp": 3, "mesh__tensor": 2}, {"mesh__data": 16}):
        with pytest.raises(UserError, match="does not fit 8 v5e .*: set (.*)$") as error:
            placed_on(small(tmp_path, **mesh), target)
        keys = str(error.value).partition(": set ")[2].split()
        proposed = {key.replace(".", "__"): value for key, _, value in (each.partition("=") for each in keys)}
        assert placed_on(small(tmp_path, **proposed), target).mesh.fsdp  # what it proposes is taken


PHASES = ("activations", "workspace", "prefill", "decode")
OFFLOADED = {"learner__optimizer__offload": "host", "critic__optimizer__offload": "host"}
UNTIED, KEYS = {"tie_word_embeddings": False}, {"sampler__slots": 17, "rollout__max_length": 1000}
FLOAT32 = {"policy__remat": "none", "policy__compute_dtype": "float32"}
FEW_LOGITS = {"policy__logprob_chunk": 8, "learner__microbatch_rows": 8}
EXPECTED = [
    # 4 layers × 2048 tokens × 512; 3 × 512 × 16384 logits in float32 and the gathered head
    ((1, 4, 1), {}, {}, (8388608, 117440512, 127409664, 17301504)),
    ((2, 2, 2), {"policy__remat": "dots"}, {}, (54525952, 58720256, 65801984, 8912896)),
    ((1, 1, 2), FLOAT32, {}, (1557675008, 314572800, 279969792, 2097152)),
    ((1, 2, 1), {"policy__remat": "none"}, UNTIED, (572013568, 218103808, 243539456, 17825792)),
    ((1, 1, 4), KEYS, {}, (33554432, 118489088, 92052992, 17432576)),  # two key-value heads: 5 of 17 slots
    ((1, 1, 1), {"sampler__slots": 2}, {}, (33554432, 402653184, 58064896, 262144)),
    ((1, 4, 1), FEW_LOGITS, {}, (16777216, 135011840, 127409664, 17301504)),  # most are a layer's results
]


def estimate(folder, mesh, shape=(), **changed):
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    return estimate_memory(small(folder, **changed), architecture_from_hf(SHAPE | dict(shape)), sizes)


@pytest.mark.parametrize(("mesh", "changed", "shape", "expected"), EXPECTED, ids=range(len(EXPECTED)))
def test_bytes_of_each_phase(tmp_path, mesh, changed, shape, expected):
    counted = estimate(tmp_path, mesh, shape, **changed)
    assert tuple(counted[name] for name in PHASES) == expected


def test_moments_from_the_host_are_the_larger(tmp_path):
    """Old and new ones of the largest stack: AdamW has two of an element, Muon one."""
    stack = 2 * 4 * 4 * 512 * 1408 / 2  # old and new, bytes, layers, on two devices
    for learner, critic, moments in (("adamw", "muon", 2), ("muon", "adamw", 2), ("muon", "muon", 1)):
        rules = {"learner__optimizer__name": learner, "critic__optimizer__name": critic}
        both = estimate(tmp_path, (1, 2, 1), {"vocab_size": 512}, advantage__name="gae", **OFFLOADED, **rules)
        assert both["moments"] == pytest.approx(moments * stack, rel=0.05), rules
        assert both["optimizer"] == 0 and "critic's optimizer" not in both


def test_program_and_memory_beside_it_are_everything(tmp_path):
    """Together with its own arguments it is all that is permanent; the base may serve the sampler too."""
    counted = estimate(tmp_path, (1, 4, 1), policy__lora__rank=4, advantage__name="gae", loss__kl_coef=0.1)
    gradients = counted["gradients"]
    update = gradients + counted["activations"] + counted["workspace"]
    held = peak_memory(counted) - max(update, counted["prefill"], counted["decode"])
    added = {"update": update, "apply": gradients / 2, "prefill": counted["prefill"]}
    added |= {"critic's update": update, "critic's apply": gradients / 2, "decode": counted["decode"]}
    for shares in (True, False):
        programs = program_memory(counted, shares)
        assert programs.keys() == added.keys()
        for name, size in programs.items():
            beside = held_beside(counted, name, shares)
            base = counted["base"] if name.endswith("apply") else 0  # counted with it, and no argument
            assert size - added[name] + beside - base == pytest.approx(held), name
    assert "critic's optimizer 0.00" in memory_line(counted)
