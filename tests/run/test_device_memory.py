"""The doctor's estimate of memory: against real arrays on simulated devices, and by hand."""

import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from config_rig import changed
from tiny_policy import WIDER

from calibadv_jax.config import LoraConfig, MeshConfig
from calibadv_jax.contrib.planning import memory
from calibadv_jax.contrib.planning.memory import estimate_memory, memory_line, peak_memory, policy_line
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.recomputation import REMATS
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.engine import CacheEngine

SHAPE = WIDER | {"intermediate_size": 64, "num_attention_heads": 8, "head_dim": 16}
SHAPE |= {"num_hidden_layers": 5, "vocab_size": 402, "tie_word_embeddings": False}  # in one stack; not by 4
ARCHITECTURE = architecture_from_hf(SHAPE)
ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESHES = [MeshConfig(2, 4, 1), MeshConfig(1, 4, 2), MeshConfig(1, 2, 4), MeshConfig(1, 1, 8)]
ONE_FAST = [pytest.param(mesh, marks=() if mesh.tensor == 2 else pytest.mark.medium) for mesh in MESHES]


SMALL = changed(
    learner={"microbatch_rows": 8, "pack_length": 128},
    rollout={"max_length": 100, "max_prompt_length": 50},
    sampler={"slots": 6, "prefill_chunk": 16},
    policy={"param_dtype": "float32", "compute_dtype": "bfloat16", "logprob_chunk": 32},
)


def estimate(mesh=ONE, **sections):
    return estimate_memory(changed(SMALL, **sections), ARCHITECTURE, mesh)


def bytes_on_a_device(tree):
    """The most that one device holds of real arrays."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def placed(tree):
    """Bytes of abstract arrays on each device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("mesh", ONE_FAST, ids=str)
@pytest.mark.parametrize("slots", [6, 16])
def test_kv_cache_estimate_equals_allocation(mesh, slots):
    """Slots in groups over data and fsdp, rounded up; over tensor heads, or slots where these do not fit."""
    config = changed(SMALL, sampler={"slots": slots}, rollout={"max_length": 64, "max_prompt_length": 32})
    policy, devices = Policy(ARCHITECTURE, Numerics.from_config(config.policy)), make_mesh(mesh)
    engine = CacheEngine(policy, devices, config.sampler, config.rollout.max_length)
    cache = jax.jit(engine._empty_cache, out_shardings=engine._cache_sharding())()
    expected = bytes_on_a_device(cache)
    assert estimate_memory(config, ARCHITECTURE, devices.shape)["kv cache"] == expected
    groups, heads = (8, 2) if mesh.tensor != 2 else (4, 1)
    rows = -(-slots // groups)
    assert expected == 2 * 5 * rows * heads * 64 * 16 * 2  # K and V, layers, …, columns, head_dim, bytes


LORA = LoraConfig(rank=4, targets=["q", "down"])


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", ONE_FAST, ids=str)
def test_trainer_state_estimate_equals_placement(mesh, optimizer, lora):
    rule = replace(SMALL.learner.optimizer, name=optimizer)
    config = changed(SMALL, learner={"optimizer": rule}, policy={"lora": lora})
    numerics, devices = Numerics.from_config(config.policy), make_mesh(mesh)
    policy = Policy(ARCHITECTURE, numerics, Adapters.from_config(lora))
    learner = Learner(policy, make_optimizer(rule, make_schedule(rule, 10)), devices, LearnerOptions(8))
    state, counted = learner.abstract_state, estimate_memory(config, ARCHITECTURE, devices.shape)
    params = placed(state["params"])
    assert counted["parameters"] == params and counted["gradients"] == 2 * params
    assert counted["sampler weights"] == params / 2
    if lora.rank:
        assert counted["base"] == placed(learner._abstract_base)
    counters = 64  # bytes at most: numbers of steps, coefficients of Muon
    assert 0 <= placed(state["opt_state"]) - counted["optimizer"] <= counters


def test_base_of_adapters_counts_once():
    plain = estimate(policy={"lora": LORA})
    beside = sum(plain[name] for name in ("optimizer", "sampler weights", "kv cache"))
    assert memory.memory_beside(plain, "log-probabilities") == beside  # the base is an argument
    assert "reference policy" not in estimate(policy={"lora": LORA}, loss={"kl_coef": 0.1})  # the base itself
    begun = {"lora": replace(LORA, init_from="folder", base_dtype="float32")}
    other = estimate(policy=begun, loss={"kl_coef": 0.1})
    assert other["reference policy"] == other["parameters"]
    assert other["sampler weights"] == (other["parameters"] + other["base"]) / 2  # a copy in bfloat16
    line = policy_line(changed(SMALL, policy=begun), ARCHITECTURE)
    assert f"M parameters, and {other['parameters'] / 4e6:.2f}M trained ones of adapters" in line
    assert policy_line(SMALL, ARCHITECTURE).endswith("M parameters")


def test_memory_depends_on_reference_critic_and_sampler():
    count, plain = ARCHITECTURE.num_parameters, estimate()
    assert plain["parameters"] == 4 * count and "reference policy" not in plain
    assert estimate(loss={"kl_coef": 0.1})["reference policy"] == 4 * count
    assert estimate(policy={"param_dtype": "bfloat16"})["parameters"] == 2 * count
    without = estimate(sampler={"name": "vllm"})
    assert not {"kv cache", "sampler weights", *memory.SAMPLING} & without.keys()
    assert "sampling" in memory_line(plain) and "sampling" not in memory_line(without)
    critic, valued = estimate(advantage={"name": "gae"}), count - 402 * 32 + 32  # a head of one value
    assert critic == plain | {"critic": 4 * valued, "critic's optimizer": 2 * 4 * valued}
    assert estimate(advantage={"base": "gae"}) == critic


def test_critic_offloads_its_moments(tmp_path):
    rule = replace(SMALL.critic.optimizer, offload="host")
    moved = estimate(advantage={"name": "gae"}, critic={"optimizer": rule})
    assert "critic's optimizer" not in moved
    assert moved["moments"] > 0


def test_activations_follow_remat():
    none, dots, attention, full = (estimate(policy={"remat": name})["activations"] for name in REMATS)
    assert full == 8 * 128 * 32 * 2 * 5  # tokens, width, bytes, layers
    assert attention == full * (32 + 8 * 16 + 4 * 8) / 32  # queries, and two numbers of float32 for each head
    assert full < attention < dots < none


def test_tensor_axis_shares_what_it_divides():
    """8 heads and 64 MLP columns; what goes from layer to layer is whole on each device."""
    one, two, four = (estimate(ONE | {"tensor": size}) for size in (1, 2, 4))
    assert one["activations"] == two["activations"]
    assert one["kv cache"] == 2 * two["kv cache"] == 3 * four["kv cache"]  # 6 rows, or 2 of 6
    assert two["workspace"] < one["workspace"]


def test_sampler_of_undivided_heads_shares_slots():
    """Two key-value heads on four devices: as if the devices were those of the fsdp axis."""
    tensor, fsdp = estimate(ONE | {"tensor": 4}), estimate(ONE | {"fsdp": 4})
    for name in ("kv cache", *memory.SAMPLING):
        assert tensor[name] == fsdp[name]


@pytest.mark.parametrize(("tensor", "logits"), [(2, 50_000), (3, 100_000)])
def test_logits_are_shared_by_devices_that_divide_the_vocabulary(tensor, logits):
    """Adapters have no gradients of the head, so that logits are nearly all of the workspace."""
    wide = replace(ARCHITECTURE, vocab_size=100_000)
    counted = estimate_memory(changed(SMALL, policy={"lora": LORA}), wide, ONE | {"tensor": tensor})
    hidden = 3 * 8 * 128 * 32 * 2  # rows, tokens, width, bytes
    trained = counted["parameters"]
    assert counted["workspace"] == 1.5 * 8 * 16 * logits * 4 + hidden - trained  # rows, a chunk, float32


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_rows_and_slots_are_shared_by_data_and_fsdp(axis):
    shared = estimate(ONE | {axis: 2})
    for name in ("activations", "kv cache"):
        assert estimate()[name] == 2 * shared[name]


def test_offloaded_moments_are_those_of_a_quarter_or_of_the_largest_parameter():
    """Old and new moments lie on the device at once."""
    rule = replace(SMALL.learner.optimizer, offload="host")
    plain, moved = estimate(), estimate(learner={"optimizer": rule})
    assert moved["optimizer"] == 0
    assert moved["moments"] == plain["optimizer"] / 2
    wide = replace(ARCHITECTURE, vocab_size=100_000, tie_word_embeddings=True)
    largest = estimate_memory(changed(SMALL, learner={"optimizer": rule}), wide, ONE)["moments"]
    assert largest == 2 * 2 * 4 * 100_000 * 32  # old and new, two moments, bytes, vocabulary, width


def test_memory_line_lists_what_is_permanent_and_each_phase():
    sizes = {"parameters": 4.0, "optimizer": 8.0, "gradients": 2.0, "activations": 1.0, "workspace": 0.5}
    sizes |= {"sampler weights": 2.0, "kv cache": 6.0, "prefill": 0.25, "decode": 0.75}
    assert memory_line({name: size * memory.GIB for name, size in sizes.items()}) == (
        "estimated memory a device: 23.50 GiB (parameters 4.00, optimizer 8.00, sampler weights 2.00,"
        " kv cache 6.00; update: gradients 2.00, activations 1.00, workspace 0.50;"
        " sampling: prefill 0.25, decode 0.75)"
    )


def test_trainer_with_vllm_needs_the_sum_of_its_arrays():
    trainer = estimate(sampler={"name": "vllm"})
    assert peak_memory(trainer) == sum(trainer.values())


HELD = {"parameters": 8, "optimizer": 16, "sampler weights": 4, "kv cache": 3}
PHASES = {"gradients": 4, "activations": 2, "workspace": 1, "prefill": 5, "decode": 6}


@pytest.mark.parametrize(
    ("change", "largest"),
    [
        ({}, 7),  # the update
        ({"decode": 9}, 9),
        ({"prefill": 10}, 10),
        ({"moments": 7}, 9),  # the optimizer's step, beside the sum of the gradients
        ({"moments": 7, "activations": 20}, 25),
    ],
)
def test_peak_is_that_of_the_largest_phase(change, largest):
    assert peak_memory(HELD | PHASES | change) == sum(HELD.values()) + largest
    assert ("optimizer's step: moments" in memory_line(HELD | PHASES | change)) == ("moments" in change)


@pytest.mark.parametrize(("tensor", "warnings"), [(2, 0), (4, 1), (3, 1)])
def test_undivided_key_value_heads_are_warned_of(tensor, warnings):
    lines = memory.heads_warnings(ARCHITECTURE, {"data": 1, "fsdp": 2, "tensor": tensor})
    assert len(lines) == warnings and all(f"mesh.tensor is {tensor}, which" in line for line in lines)


def test_warning_of_key_value_heads_names_the_divisors():
    wide = replace(ARCHITECTURE, num_heads=24, num_kv_heads=8)
    (line,) = memory.heads_warnings(wide, {"data": 1, "fsdp": 1, "tensor": 3})
    assert line == (
        "warning: mesh.tensor is 3, which does not divide the policy's 8 key-value heads: each device of the"
        " axis computes all of them; set it to a divisor of 8, and mesh.fsdp to the rest"
    )
    assert memory.heads_warnings(replace(wide, num_kv_heads=3), {"data": 1, "fsdp": 1, "tensor": 3}) == []


@pytest.mark.parametrize(
    ("platform", "share", "words"),
    [
        ("gpu", 1.0, ""),
        ("gpu", 0.999, r"failed: 0\.0 GiB .*: the device has 0\.0 GiB; lower sampler\.slots"),
        ("gpu", None, "not checked: "),
        ("tpu", 1.7, ""),
        ("tpu", 1.5, "warning: .*programs can need 1.6 times the estimate"),
        ("tpu", 0.999, "failed: "),
        ("cpu", 1.0, ""),
        ("cpu", 0.999, r"failed: .*: this host has 0\.0 GiB for 8 device\(s\); lower "),
    ],
)
def test_too_small_device_is_reported(monkeypatch, platform, share, words):
    peak = 1e6
    limit = share and share * peak
    device = SimpleNamespace(platform=platform, memory_stats=lambda: {"bytes_limit": limit})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(memory, "host_memory", lambda: 8 * limit)  # which eight devices share
    lines = memory.memory_lines(peak, 8)
    assert re.match(words, "\n".join(lines)) and len(lines) == bool(words)
    assert "failed" not in words or "times the estimate" not in lines[0]


@pytest.mark.parametrize(("text", "limit"), [("max\n", math.inf), ("1048576\n", 2.0**20), ("0\n", math.inf)])
def test_host_memory_respects_container_limit(monkeypatch, tmp_path, text, limit):
    (tmp_path / "memory.max").write_text(text)
    files = str(tmp_path / "none"), str(tmp_path / "memory.max")
    monkeypatch.setattr(memory, "CGROUP_LIMITS", files)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.host_memory() == min(physical, limit) > 2**19
