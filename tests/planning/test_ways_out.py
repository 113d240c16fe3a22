"""Which keys a plan proposes where a run does not fit."""

import pytest
from plan_rig import SHAPE, small

from calibadv_jax.contrib.commands.plan import changed, memory_of, ways_out
from calibadv_jax.contrib.planning.hardware import find_target, placed_on
from calibadv_jax.contrib.planning.memory import GIB, peak_memory
from calibadv_jax.policy.architecture import architecture_from_hf

pytestmark = pytest.mark.medium

ARCHITECTURE = architecture_from_hf(SHAPE)


def needed(config, target):
    return peak_memory(memory_of(config, ARCHITECTURE, target))


def changes_of(line):
    """The overrides that a line proposes."""
    keys = [word.partition("=") for word in line.split() if "=" in word]
    return {key: int(value) if value.isdigit() else value for key, _, value in keys}


def test_each_line_is_a_change_that_fits(tmp_path):
    target = find_target(gpu="h100", topology="1x1x4")
    config = placed_on(small(tmp_path, policy__remat="none"), target)
    limit = needed(config, target) - 1
    lines = ways_out(config, ARCHITECTURE, target, limit)
    assert lines[0].startswith("would fit: policy.remat=full (")
    for line in lines:
        assert needed(changed(config, changes_of(line)), target) <= limit
    assert any("mesh.fsdp=2 mesh.tensor=2 learner.microbatch_rows=2" in line for line in lines)
    assert any(line.startswith("would fit: sampler.slots=12 (") for line in lines)  # the most that fit


def test_combination_is_found_with_its_mildest_values(tmp_path):
    target = find_target(gpu="h100", topology="1x1x1")
    config = placed_on(small(tmp_path, learner__microbatch_rows=4), target)
    expected = {"learner.microbatch_rows": 1, "learner.optimizer.offload": "host", "sampler.slots": 5}
    limit = needed(changed(config, expected), target)
    line, *others = ways_out(config, ARCHITECTURE, target, limit)
    assert changes_of(line) == expected and f"({limit / GIB:.1f} GiB by the formula)" in line
    for key in expected:  # no part of it fits, and no milder value
        part = {name: value for name, value in expected.items() if name != key}
        assert needed(changed(config, part), target) > limit
    for milder in ({"learner.microbatch_rows": 2}, {"sampler.slots": 6}):
        assert needed(changed(config, expected | milder), target) > limit
    assert all("sampler.name=vllm" in other for other in others)


def test_dearest_lever_is_relaxed_first(tmp_path):
    target = find_target(gpu="h100", topology="1x1x1")
    config = placed_on(small(tmp_path, learner__microbatch_rows=4), target)
    limit = needed(changed(config, {"learner.microbatch_rows": 2, "sampler.slots": 8}), target)
    lines = ways_out(config, ARCHITECTURE, target, limit)
    assert {"learner.microbatch_rows": 1, "sampler.slots": 12} in map(changes_of, lines)


def test_least_memory_is_named_where_nothing_fits(tmp_path):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path), target)
    limit = needed(config, target)
    (line,) = ways_out(config, ARCHITECTURE, target, limit / 100)
    assert "take more devices or larger ones" in line and "adapters" not in line
    assert line.startswith("no combination of ") and "(the least: 0.1 GiB)" in line
    strongest = {
        "learner.optimizer.offload": "host",
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "sampler.name": "vllm",
    }
    least = needed(changed(config, strongest | {"learner.microbatch_rows": 2}), target)
    (line,) = ways_out(config, ARCHITECTURE, target, least * 0.9)
    assert ", or train adapters: policy.lora.rank=16" in line
    assert needed(changed(config, changes_of(line.partition("adapters:")[2])), target) <= least * 0.9


def test_compilers_count_and_gaps_are_in_the_lines(tmp_path):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path), target)
    limit = needed(config, target) - 1
    for line in ways_out(config, ARCHITECTURE, target, limit * 1.25, 1.25):
        assert "by the formula, times 1.25 as the compiler counts; programs may need up to 1.6 times" in line
        assert needed(changed(config, changes_of(line)), target) <= limit


def test_each_host_has_a_sampler_of_its_own(tmp_path):
    """Its weights lie on the devices of the host, and it has a share of the slots."""
    two, each = find_target(gpu="h100", topology="1x2x4"), find_target(gpu="h100", topology="1x1x8")
    config = small(tmp_path, learner__microbatch_rows=8)
    apart, together = (memory_of(placed_on(config, at), ARCHITECTURE, at) for at in (two, each))
    assert apart["sampler weights"] == pytest.approx(2 * together["sampler weights"], rel=0.01)  # but norms
    assert apart["kv cache"] == together["kv cache"]
    assert apart["parameters"] == together["parameters"]
