"""The state of a run between its steps: what a stop, a rollback or a full disk leaves to the next start."""

import errno
import shutil

import jax
import numpy as np
import pytest
from trainer_rig import (
    GUARDED,
    Collapsing,
    ScriptedRollouts,
    checkpoints,
    make_config,
    make_state,
    rows,
    run,
)

from calibadv_jax.core.errors import UserError

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

ROLLBACK = GUARDED | {"action": "rollback"}


def test_stop_between_the_groups_of_a_step_begins_all_of_them_again(tmp_path):
    """One of the two is complete; the next start trains both, and draws no other in their place."""
    config = make_config(tmp_path, learner={"steps": 1})
    first = ScriptedRollouts(fails_at=1)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run(config, first, tmp_path)
    assert run(config, ScriptedRollouts(), tmp_path).begun == first.begun


def test_rollback_takes_the_checkpoint_of_the_last_good_step(tmp_path):
    config = make_config(tmp_path, checkpoint={"every": 1, "keep": 9}, guards=ROLLBACK)
    rollouts = run(config, Collapsing(), tmp_path)
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 3, 4]
    assert [number for number, _ in rollouts.begun] == [*range(8), 6, 7]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_rollback_replaces_the_checkpoint_of_a_bad_step(tmp_path):
    """Two bad steps trip the guard; the first of them is saved by then."""
    config = make_config(
        tmp_path,
        learner={"steps": 6},
        checkpoint={"every": 1, "keep": 9},
        guards=ROLLBACK | {"patience_steps": 2},
    )
    rollouts = run(config, Collapsing(), tmp_path)
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    state = make_state(config, tmp_path)
    assert state.checkpoints.steps() == [1, 2, 3, 4, 5, 6]
    restored, _ = state.checkpoints.restore(4, state.trainer.learner.abstract_state)
    trained_again = rollouts.loaded[7][1]
    np.testing.assert_equal(jax.device_get(restored["params"]), trained_again)


def test_resumed_run_knows_its_rollback(tmp_path):
    """It draws with the seed of the attempt after the collapse, and counts its rollbacks on."""
    config = make_config(tmp_path, guards=ROLLBACK)
    before = run(config, Collapsing(), tmp_path)
    after = ScriptedRollouts()
    state = make_state(config, tmp_path, after)
    assert state.guards.rollbacks == 1
    assert state.guards.last_good_step == state.step == 4
    assert after.seed == state.seed == before.seed != config.run.seed


@pytest.mark.parametrize("extra", [[], {}], ids=str)
def test_checkpoint_with_empty_counters_is_refused(tmp_path, extra):
    state = make_state(make_config(tmp_path), tmp_path)
    state.checkpoints.save(1, state.learner_state, extra)
    state.checkpoints.wait()
    advice = "damaged checkpoint; delete it to use an older checkpoint"
    with pytest.raises(UserError, match=rf"checkpoints/1: {advice} \(in extra"):
        make_state(make_config(tmp_path), tmp_path)


def test_full_disk_is_one_line_and_the_next_start_goes_on(small_disk):
    folder = small_disk / "run"
    sections = {"checkpoint": {"every": 1}, "log": {"backends": [], "progress": False, "rollouts": "none"}}
    run(make_config(folder, learner={"steps": 3}, **sections), ScriptedRollouts(), folder)
    config = make_config(folder, learner={"steps": 6}, **sections)
    free = shutil.disk_usage(small_disk).free
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * max(0, free - 8192))  # room for a row of metrics, not for a checkpoint
    with pytest.raises((UserError, OSError)) as caught:
        run(config, ScriptedRollouts(), folder)
    if isinstance(caught.value, UserError):
        message = str(caught.value)
        assert "cannot be saved; the older checkpoints are complete" in message
        assert "\n" not in message
    else:
        assert caught.value.errno == errno.ENOSPC
    assert checkpoints(folder)[-1] >= 3
    ballast.unlink()
    run(config, ScriptedRollouts(), folder)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
