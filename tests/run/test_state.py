"""The state of a run between its steps: start, step, save and end, and what these leave to the next start."""

import errno
import shutil
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from trainer_rig import (
    GUARDED,
    QUESTIONS,
    Collapsing,
    ScriptedRollouts,
    checkpoints,
    make_config,
    make_state,
    rows,
    run,
    write_group,
)

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.core.errors import UserError
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.snapshots.checkpoint import note_rollback, read_rollback

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

ROLLBACK = GUARDED | {"action": "rollback"}


def trained(state, *numbers):
    """Train on groups of these numbers, a step for each, and return the results."""
    results = []
    for number in numbers:
        groups, advantages = scored(state.config, [number])
        results.append(state.train_on(groups, advantages))
    return results


def scored(config, numbers):
    groups = [write_group(number, QUESTIONS[number % len(QUESTIONS)]) for number in numbers]
    groups = score_groups(groups, config.reward, np.random.default_rng(0))
    return groups, compute_advantages(groups, config.advantage)


def test_fresh_state_forgets_the_rollback_of_an_earlier_run(tmp_path):
    """Its checkpoints are gone, and so is what they would be compared with."""
    note_rollback(tmp_path, 3, 2)
    state = make_state(make_config(tmp_path, run={"seed": 5}), tmp_path)
    assert (state.step, state.guards.rollbacks, state.seed) == (0, 0, 5)
    assert read_rollback(tmp_path) == {}


def test_step_counts_once_its_groups_are_trained(tmp_path):
    rollouts = ScriptedRollouts()
    state = make_state(make_config(tmp_path), tmp_path, rollouts)
    before = jax.device_get(state.learner_state["params"])
    (result,) = trained(state, 0)
    assert state.step == 1
    assert state.learner_state is result.state
    assert int(state.learner_state["updates"]) == 1
    assert state.publish() == {}
    (version, params) = rollouts.loaded[-1]
    assert version == 1
    np.testing.assert_equal(params, jax.device_get(state.learner_state["params"]))
    assert any(np.any(old != new) for old, new in zip(*map(jax.tree.leaves, (before, params)), strict=True))


@pytest.mark.parametrize(
    ("every", "bad_steps", "saved"),
    [
        (1, (), [1, 2, 3, 4, 5]),
        (2, (), [2, 4, 5]),
        (0, (), [5]),
        (2, (4,), [2, 5]),  # a guard doubts step 4
        (2, (5,), [2, 4, 5]),  # the last step is saved nevertheless
    ],
)
def test_steps_are_saved_when_due(tmp_path, every, bad_steps, saved):
    config = make_config(tmp_path, learner={"steps": 5}, checkpoint={"every": every, "keep": 9})
    state = make_state(config, tmp_path)
    for step in range(1, 6):
        trained(state, step)
        state.guards._streaks["numbers"] = int(step in bad_steps)
        state.save_if_due()
    state.checkpoints.wait()
    assert state.checkpoints.steps() == saved
    state.checkpoints.close()


def test_restored_state_is_the_saved_one(tmp_path):
    config = make_config(tmp_path)
    with make_state(config, tmp_path) as state:
        trained(state, 0, 1, 2)
        state.guards.last_good_step = 2
        expected = jax.device_get(state.learner_state)
    again = make_state(config, tmp_path)
    assert (again.step, again.guards.last_good_step) == (3, 2)
    np.testing.assert_equal(jax.device_get(again.learner_state), expected)
    assert again.questions.get_state() == state.questions.get_state()


@pytest.mark.parametrize("failure", [None, ValueError("a fault")])
def test_end_saves_the_last_complete_step_once(tmp_path, failure):
    ending = pytest.raises(ValueError, match="a fault") if failure else nullcontext()
    with ending, make_state(make_config(tmp_path, checkpoint={"every": 2, "keep": 9}), tmp_path) as state:
        trained(state, 0, 1)
        state.save_if_due()
        trained(state, 2)
        if failure:
            raise failure
    assert checkpoints(tmp_path) == [2, 3]
    with make_state(make_config(tmp_path), tmp_path) as state:
        pass
    assert checkpoints(tmp_path) == [2, 3]


def test_end_after_a_failed_or_diverged_update_saves_nothing(tmp_path):
    with make_state(make_config(tmp_path / "a"), tmp_path / "a") as state:
        trained(state, 0)
        state.learner_state = {}  # as in the middle of an update, which has taken the old state
    assert checkpoints(tmp_path / "a") == []
    with make_state(make_config(tmp_path / "b"), tmp_path / "b") as state:
        trained(state, 0)
        state.guards.is_broken = True
    assert checkpoints(tmp_path / "b") == []


def test_reason_of_a_stop_names_what_is_saved(tmp_path):
    state = make_state(make_config(tmp_path), tmp_path)
    assert state.why_stopped() == "stopped by guards.action; the state is saved: see the warnings above"
    state.guards.is_broken = True
    diverged = "diverged (see the warning above) and is not saved"
    assert state.why_stopped() == f"step 0 {diverged}: no checkpoint was saved"
    trained(state, 0)
    state.save()
    state.checkpoints.wait()
    trained(state, 1)
    assert state.why_stopped() == f"step 2 {diverged}: the newest checkpoint is of step 1"
    state.checkpoints.close()


def test_rollback_without_a_good_checkpoint_is_refused(tmp_path):
    state = make_state(make_config(tmp_path, checkpoint={"every": 1, "keep": 1}), tmp_path)
    trained(state, 0, 1, 2)
    state.save()
    state.guards.last_good_step = 2
    with pytest.raises(UserError, match="collapsed at step 3, and no checkpoint .* last good step 2; raise"):
        state.roll_back()
    assert read_rollback(tmp_path) == {}
    assert checkpoints(tmp_path) == [3]
    state.checkpoints.close()


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
