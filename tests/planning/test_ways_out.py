"""Which keys a plan proposes where a run does not fit."""

from plan_rig import SHAPE, small

from calibadv_jax.planning.hardware import find_target, placed_on
from calibadv_jax.planning.ways_out import changed, memory_of, ways_out
from calibadv_jax.policy.architecture import architecture_from_hf

ARCHITECTURE = architecture_from_hf(SHAPE)


def test_each_line_is_a_change_that_fits(tmp_path):
    config = placed_on(small(tmp_path, policy__remat="none"), find_target(gpu="h100", topology="1x1x4"))
    limit = memory_of(config, ARCHITECTURE) - 1
    lines = ways_out(config, ARCHITECTURE, limit, 1.0)
    assert lines[0].startswith("would fit: policy.remat=full (")
    for line in lines:
        keys = [word.partition("=") for word in line.split() if "=" in word]
        changes = {key: int(value) if value.isdigit() else value for key, _, value in keys}
        assert memory_of(changed(config, changes), ARCHITECTURE) <= limit
    assert any("sampler.slots=4" in line for line in lines)
    assert any("mesh.fsdp=2 mesh.tensor=2 learner.microbatch_rows=2" in line for line in lines)


def test_gaps_are_counted_and_nothing_that_helps_is_said(tmp_path):
    config = placed_on(small(tmp_path), find_target(tpu="v5e:2x2"))
    limit = memory_of(config, ARCHITECTURE)
    (line,) = ways_out(config, ARCHITECTURE, limit / 100, 1.6)
    assert "take more devices" in line
    assert all("with 1.6 times for gaps" in one for one in ways_out(config, ARCHITECTURE, limit * 1.5, 1.6))
