"""Devices that a plan may name and a config's mesh on them; bytes of the formulas without an array beside."""

import json

import pytest
from plan_rig import SHAPE, small

from calibadv_jax.contrib.planning.hardware import FRACTION, find_target, placed_on
from calibadv_jax.contrib.planning.memory import (
    estimate_memory,
    memory_beside,
    memory_line,
    peak_memory,
    program_memory,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf


def test_limit_and_links_of_devices(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    tpu, gpu = find_target(tpu="v5p:4x4x8"), find_target(gpu="h100", topology="2x2x8")
    assert (tpu.devices, tpu.hosts, str(tpu)) == (128, 32, "128 v5p (4x4x8)")
    assert (gpu.devices, gpu.hosts, str(gpu)) == (32, 4, "32 H100 (2x2x8)")
    assert gpu.links == gpu.chip.network < find_target(gpu="h100", topology="1x1x8").links  # of another host
    assert tpu.links == tpu.chip.links == tpu.chip.network
    assert str(gpu.host) == "8 H100 (1x1x8)" and gpu.host.host == gpu.host
    assert tpu.limit == 95e9 and gpu.limit == 0.75 * 84_942_979_072
    monkeypatch.setenv(FRACTION, "1.0")
    assert tpu.limit == 95e9 and gpu.limit == 84_942_979_072
    for value in ("45%", "0", "1.5"):
        monkeypatch.setenv(FRACTION, value)
        with pytest.raises(UserError, match=f"{FRACTION} is '{value}'"):
            _ = gpu.limit


def test_share_of_gpu_memory_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(FRACTION, ".45")
    assert find_target(gpu="h100", topology="2x2x8").limit == 0.45 * 84_942_979_072
    assert find_target(tpu="v5p:4x4x8").limit == 95e9


def test_variable_of_the_share_is_that_of_jax():
    assert FRACTION == "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ({"tpu": "v9"}, "--tpu v9: must be one of v5e, v5p, v6e"),
        ({"tpu": "v5e:4x0"}, "with the slice's shape, such as v5e:4x4"),
        ({"gpu": "h100", "topology": "8"}, "must be slices x hosts x GPUs of a host"),
    ],
)
def test_refused_devices_come_with_advice_in_one_line(names, advice):
    with pytest.raises(UserError) as refused:
        find_target(**names)
    assert advice in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tpu", "gpu", "topology", "message"),
    [
        ("", "", "", "name the devices: --tpu v5e:4x4, or --gpu h100"),
        ("v5e:4x4", "h100", "1x1x8", "name the devices"),
        ("v5e:4x4", "", "4x4", "name the devices"),
        ("", "h100", "", "name the devices"),
        *((name, "", "", f"--tpu {name}: must be one") for name in ("v9", "v5p-4", "v3-8", "v5e:4x0")),
        ("", "a100", "1x1x8", "--gpu a100: must be one of h100, h200, h20"),
        ("", "h100", "8", "--topology 8: must be"),
    ],
)
def test_invalid_devices_are_refused(tpu, gpu, topology, message):
    with pytest.raises(UserError, match=message):
        find_target(tpu, gpu, topology)


@pytest.mark.parametrize(
    ("name", "topology", "devices", "hosts", "host"),
    [
        ("v5litepod-16", "v5e:4x4", 16, 4, "v5e:2x2"),
        ("v6e-8", "v6e:2x4", 8, 1, "v6e:2x4"),
        ("v5p-16", "v5p:2x2x2", 8, 2, "v5p:2x2x1"),
    ],
)
def test_names_of_cloud_tpu_are_understood(name, topology, devices, hosts, host):
    target = find_target(tpu=name)
    assert (target.topology, target.devices, target.hosts) == (topology, devices, hosts)
    assert target.host.topology == host


V5E, GPU = find_target(tpu="v5e:2x4"), find_target(gpu="h100", topology="1x1x1")


def test_placed_config_has_mesh_and_kernel_of_the_devices(tmp_path):
    placed = placed_on(small(tmp_path, learner__microbatch_rows=8), V5E)
    assert (placed.mesh.fsdp, placed.policy.attention) == (8, "splash")
    assert placed_on(small(tmp_path), GPU).policy.attention == "triton"


@pytest.mark.parametrize(
    ("target", "changes", "advice"),
    [
        (V5E, {"mesh__data": 2}, "multiple of mesh.data x mesh.fsdp = 8: set learner.microbatch_rows=8"),
        (V5E, {"mesh__fsdp": 3, "mesh__tensor": 2}, "set mesh.data=1 mesh.fsdp=8 mesh.tensor=1"),
    ],
)
def test_keys_that_fit_the_devices_are_proposed(tmp_path, target, changes, advice):
    with pytest.raises(UserError, match=advice) as error:
        placed_on(small(tmp_path, **changes), target)
    keys = dict(word.split("=") for word in str(error.value).partition(": set ")[2].split())
    proposed = {key.replace(".", "__"): value for key, value in keys.items()}
    assert placed_on(small(tmp_path, **changes | proposed), target).mesh.fsdp


@pytest.mark.parametrize("mesh", [{"mesh__fsdp": 3, "mesh__tensor": 2}, {"mesh__data": 16}], ids=str)
def test_mesh_of_other_devices_is_refused_with_one_that_fits(tmp_path, mesh):
    with pytest.raises(UserError, match=r"does not fit 8 v5e .*: set (.*)$") as refused:
        placed_on(small(tmp_path, **mesh), V5E)
    overrides = str(refused.value).partition(": set ")[2].split()
    keys = dict(override.split("=") for override in overrides)
    proposed = {key.replace(".", "__"): value for key, value in keys.items()}
    assert placed_on(small(tmp_path, **proposed), V5E).mesh.fsdp


def test_rows_that_devices_cannot_share_are_refused_with_a_multiple(tmp_path):
    advice = r"multiple of mesh.data x mesh.fsdp = 8: set learner.microbatch_rows=8$"
    with pytest.raises(UserError, match=advice):
        placed_on(small(tmp_path), V5E)


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


def test_teacher_counts_by_its_own_size_in_the_precision_of_the_forward_pass(tmp_path):
    """bfloat16 parameters of another architecture, divided over the devices."""
    shape = SHAPE | {"num_hidden_layers": 1}
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(shape))
    plain = estimate(tmp_path, (1, 2, 1))
    counted = estimate(tmp_path, (1, 2, 1), teacher__policy=str(tmp_path / "teacher"))
    own = estimate_memory(small(tmp_path), architecture_from_hf(shape), {"data": 1, "fsdp": 2, "tensor": 1})
    assert counted["teacher"] == own["parameters"] / 2  # those are kept in float32
    assert peak_memory(counted) == peak_memory(plain) + counted["teacher"]
    assert "teacher" in memory_line(counted) and "teacher" not in plain


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
            beside = memory_beside(counted, name, shares)
            base = counted["base"] if name.endswith("apply") else 0  # counted with it, and no argument
            assert size - added[name] + beside - base == pytest.approx(held), name
    assert "critic's optimizer 0.00" in memory_line(counted)
