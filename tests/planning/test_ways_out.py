"""Which keys a plan proposes where a run does not fit."""

import pytest
from plan_rig import SHAPE, small

from calibadv_jax.planning.hardware import find_target, placed_on
from calibadv_jax.planning.ways_out import changed, memory_of, ways_out
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.run.memory import peak_memory

pytestmark = pytest.mark.medium

ARCHITECTURE = architecture_from_hf(SHAPE)


def needed(config, target):
    return peak_memory(memory_of(config, ARCHITECTURE, target))


def test_each_line_is_a_change_that_fits(tmp_path):
    target = find_target(gpu="h100", topology="1x1x4")
    config = placed_on(small(tmp_path, policy__remat="none"), target)
    limit = needed(config, target) - 1
    lines = ways_out(config, ARCHITECTURE, target, limit)
    assert lines[0].startswith("would fit: policy.remat=full (")
    for line in lines:
        keys = [word.partition("=") for word in line.split() if "=" in word]
        changes = {key: int(value) if value.isdigit() else value for key, _, value in keys}
        assert needed(changed(config, changes), target) <= limit
    assert any("sampler.slots=4" in line for line in lines)
    assert any("mesh.fsdp=2 mesh.tensor=2 learner.microbatch_rows=2" in line for line in lines)


def test_gaps_are_counted_and_nothing_that_helps_is_said(tmp_path):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path), target)
    limit = needed(config, target)
    (line,) = ways_out(config, ARCHITECTURE, target, limit / 100)
    assert "take more devices" in line
    lines = ways_out(config, ARCHITECTURE, target, limit * 1.5)
    assert all("with 1.6 times for gaps" in one for one in lines)


def test_each_host_has_a_sampler_of_its_own(tmp_path):
    """Its weights lie on the devices of the host, and it has a share of the slots."""
    two, one = find_target(gpu="h100", topology="1x2x4"), find_target(gpu="h100", topology="1x1x8")
    config = small(tmp_path, learner__microbatch_rows=8)
    apart, together = (memory_of(placed_on(config, at), ARCHITECTURE, at) for at in (two, one))
    assert apart["sampler weights"] == pytest.approx(2 * together["sampler weights"], rel=0.01)  # but norms
    assert apart["kv cache"] == together["kv cache"]
    assert apart["parameters"] == together["parameters"]
