"""Devices that a plan may name and a config's mesh on them; bytes of the formulas without an array beside."""

import json

import jax
import pytest
from plan_rig import SHAPE, small

from benchmarks.compiled.memory_table import kept_figures
from calibadv_jax.contrib.planning.hardware import FRACTION, find_target, placed_on
from calibadv_jax.contrib.planning.memory import (
    estimate_memory,
    memory_beside,
    memory_line,
    peak_memory,
    program_memory,
    with_fitting_remat,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.recomputation import REMATS


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
        ("", "", "", "name the devices: --tpu v5e:4x4, --gpu h100, or"),
        ("v5e:4x4", "h100", "1x1x8", "name the devices"),
        ("v5e:4x4", "", "4x4", "name the devices"),
        *((name, "", "", f"--tpu {name}: must be one") for name in ("v9", "v5p-4", "v3-8", "v5e:4x0")),
        (
            "",
            "v100",
            "1x1x8",
            "--gpu v100: must be one of b200, h100, h200, h20, a100, a100-40gb, l40s",
        ),
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
    # JAX 0.11 deprecates Triton.
    kernels = ("triton", "triton") if jax.__version_info__ < (0, 11) else ("tokamax", "xla")
    assert placed_on(small(tmp_path), GPU).policy.attention == kernels[0]
    float32 = small(tmp_path, policy__compute_dtype="float32")
    assert placed_on(float32, GPU).policy.attention == kernels[1]


def test_gpu_without_a_topology_is_a_single_device():
    assert find_target(gpu="rtx4090") == find_target(gpu="rtx4090", topology="1x1x1")


@pytest.mark.parametrize(("gpu", "gib"), [("rtx4090", 24), ("a10", 24), ("a100-40gb", 40), ("l40s", 48)])
def test_common_cards_have_about_the_memory_that_their_name_says(gpu, gib):
    assert 0.9 * gib < find_target(gpu=gpu).chip.memory / 2**30 <= gib


def test_target_of_the_compiler_has_the_figures_of_the_card():
    hopper = find_target(gpu="h100").chip.target_config()
    ampere = find_target(gpu="a10").chip.target_config()
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in hopper
    assert "Capability 9.0a" in hopper and "shared_memory_per_block_optin: 232448" in hopper
    assert "major: 8 minor: 6 feature_extension: NONE" in ampere and "core_count: 72" in ampere
    assert "$" not in hopper + ampere and "e+" not in hopper + ampere  # whole numbers


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
    # 4 layers × 2048 tokens × 512; a layer and twice the weights of four, less the head
    ((1, 4, 1), {}, {}, (8388608, 113303142.4, 138689536, 17301504)),
    ((2, 2, 2), {"policy__remat": "dots"}, {}, (50593792, 66927616, 71441920, 8912896)),
    ((1, 1, 2), FLOAT32, {}, (698351616, 350224384, 279969792, 2097152)),
    ((1, 2, 1), {"policy__remat": "none"}, UNTIED, (265289728, 181486796.8, 254819328, 17825792)),
    ((1, 1, 4), KEYS, {}, (33554432, 133693440, 103332864, 17432576)),  # two key-value heads: 5 of 17 slots
    # 8192 tokens × (5 × 1408 + 12 × 512 + 6 × 512) × 2, less the head's gradient, which is done before
    ((1, 1, 1), {"sampler__slots": 2}, {}, (33554432, 232783872, 58064896, 262144)),
    ((1, 4, 1), FEW_LOGITS, {}, (16777216, 189875404.8, 138689536, 17301504)),
]


def estimate(folder, mesh, shape=(), **changed):
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    return estimate_memory(small(folder, **changed), architecture_from_hf(SHAPE | dict(shape)), sizes)


@pytest.mark.parametrize(("mesh", "changed", "shape", "expected"), EXPECTED, ids=range(len(EXPECTED)))
def test_bytes_of_each_phase(tmp_path, mesh, changed, shape, expected):
    counted = estimate(tmp_path, mesh, shape, **changed)
    assert tuple(counted[name] for name in PHASES) == pytest.approx(expected)


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


def test_teacher_of_unknown_shape_is_refused_instead_of_left_out(tmp_path):
    with pytest.raises(UserError, match="teacher.policy is runs/none/hf, where no config.json is"):
        estimate(tmp_path, (1, 2, 1), teacher__policy="runs/none/hf")


def test_teacher_that_is_not_on_this_machine_has_the_size_of_its_name(tmp_path):
    counted = estimate(tmp_path, (1, 2, 1), teacher__policy="meta-llama/Llama-3.1-8B")
    assert counted["teacher"] == pytest.approx(8.03e9 * 2 / 2, rel=0.01)  # bfloat16, on two devices


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


def test_formula_is_within_15_percent_of_every_compiled_program():
    """Figures of XLA for GPUs that benchmarks.compiled.memory_table keeps: 0.5B to 8B, 1 to 8 cards."""
    figures = kept_figures()
    updates = [figure for figure in figures if figure.program == "update"]
    assert len(updates) >= 24
    for remat in REMATS:
        assert sum(f"--remat {remat}" in figure.arguments for figure in updates) >= 6
    for figure in figures:
        assert 1 / 1.15 < figure.expected / figure.needed < 1.15, figure


def test_auto_takes_the_least_recomputation_that_fits(tmp_path):
    config = small(tmp_path, policy__remat="auto", mesh__fsdp=1, sampler__name="vllm")
    architecture = architecture_from_hf(SHAPE)
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    needed = {}
    for remat in REMATS:
        explicit = small(tmp_path, policy__remat=remat, mesh__fsdp=1, sampler__name="vllm")
        needed[remat] = peak_memory(estimate_memory(explicit, architecture, mesh))
    assert needed["none"] > needed["dots"] > needed["attention"] > needed["full"]
    for remat, limit in needed.items():
        assert with_fitting_remat(config, architecture, mesh, limit).policy.remat == remat
    assert with_fitting_remat(config, architecture, mesh, 1.0).policy.remat == "full"
    assert with_fitting_remat(explicit, architecture, mesh, 1e15) == explicit  # only auto is changed
