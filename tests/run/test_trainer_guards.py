"""The guards at work in the training loop: a collapse, numbers that are none, steps that teach nothing."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace

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
    shared_programs,  # noqa: F401
)

from calibadv_jax.commands import train
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.record.reader import read_metadata
from calibadv_jax.record.schema import kept_steps

ROLLBACK = GUARDED | {"action": "rollback"}


class Mirror:
    """Notes the calls; what it has of later steps goes before they go here."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *step: self.calls.append((name, *step))


class Ended(Collapsing):
    """A signal ends the run where a group begins: at a number, or at the first one after a rollback."""

    def __init__(self, number=None):
        super().__init__()
        self.number = number

    def begin(self, number, question):
        if number == self.number or (self.number is None and self.seed):
            raise SystemExit(143)
        return super().begin(number, question)


def versions(config, rollouts, folder):
    """The versions of the policy that a run hands to its sampler."""
    return [version for version, _ in run(config, rollouts, folder).loaded]


def test_rollback_restores_last_good_checkpoint_with_new_seed(tmp_path, monkeypatch):
    drawn, random_state = [], train.random_state
    monkeypatch.setattr(train, "random_state", lambda *of: drawn.append(of) or random_state(*of))
    config = make_config(tmp_path, learner={"steps": 6}, guards=ROLLBACK)
    with Stop() as stop, make_state(config, tmp_path, rollouts := Collapsing()) as state:
        state.mirror = mirror = Mirror()
        train.train(state, stop)
    # Step 4 (groups 6 and 7) collapses; the newest checkpoint before it is that of step 2.
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert [number for number, _ in rollouts.begun] == [*range(8), *range(4, 12)]
    assert rollouts.seed != 0
    seeds = [(0, step) for step in range(4)] + [(rollouts.seed, step) for step in range(2, 6)]
    assert drawn == [(seed, step, "reward") for seed, step in seeds]
    assert [(row["step"], row["guard/sampled_perplexity"]) for row in rows(tmp_path)] == [
        (step, 0) for step in range(1, 7)
    ]
    kept = {step: read_metadata(path)["seed"] for step, path in kept_steps(tmp_path).items()}
    assert kept == {step: "0" if step < 3 else str(rollouts.seed) for step in range(1, 7)}
    jax.tree.map(np.testing.assert_array_equal, rollouts.loaded[2][1], rollouts.loaded[5][1])
    assert checkpoints(tmp_path) == [4, 6]
    copied = [call for call in mirror.calls if call != ("check",)]
    assert copied == [("put", 2), ("drop_after", 2), ("put", 2), ("put", 4), ("put", 6)]


def test_rollback_deletes_checkpoints_of_bad_steps(tmp_path):
    """Two bad steps trip the guard; the first of them is saved by then."""
    guards, checkpoint = ROLLBACK | {"patience": 2}, {"every": 1, "keep": 9}
    config = make_config(tmp_path, learner={"steps": 6}, checkpoint=checkpoint, guards=guards)
    rollouts = run(config, Collapsing(), tmp_path)
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    state = make_state(config, tmp_path)
    assert state.checkpoints.steps() == [1, 2, 3, 4, 5, 6]
    fourth = state.checkpoints.restore(4, state.trainer.learner.abstract_state())[0]["params"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(fourth), rollouts.loaded[7][1])


def test_restart_after_rollback_keeps_the_new_seed(tmp_path):
    config = make_config(tmp_path, learner={"steps": 6}, guards=ROLLBACK)
    with pytest.raises(SystemExit):
        run(config, Ended(), tmp_path)
    assert checkpoints(tmp_path) == [2] and list(kept_steps(tmp_path)) == [1, 2]
    state = make_state(config, tmp_path, after := Collapsing())
    assert state.guards.rollbacks == 1 and after.seed == state.seed != config.run.seed
    assert versions(config, Collapsing(), tmp_path) == [2, 3, 4, 5, 6]
    shutil.rmtree(tmp_path / "checkpoints")
    run(replace(config, learner=replace(config.learner, steps=2)), Collapsing(), tmp_path)
    assert make_state(config, tmp_path).guards.rollbacks == 0


def test_signal_among_bad_steps_keeps_rollback_checkpoint(tmp_path):
    """Steps 4 to 6 are bad, and 4 is saved; a checkpoint of 5 would take the place of that of step 2."""
    config = make_config(tmp_path, learner={"steps": 7}, guards=ROLLBACK | {"patience": 3})
    with pytest.raises(SystemExit):
        run(config, Ended(10), tmp_path)
    assert checkpoints(tmp_path) == [2, 4]
    assert versions(config, Collapsing(), tmp_path) == [4, 5, 6, 2, 3, 4, 5, 6, 7]


def test_guard_stops_the_run_with_state_saved(tmp_path, capsys):
    config = make_config(tmp_path, learner={"steps": 6}, guards=GUARDED | {"action": "stop"})
    with pytest.raises(UserError, match="stopped by guards.action"):
        run(config, Collapsing(), tmp_path)
    assert [row["guard/sampled_perplexity"] for row in rows(tmp_path)] == [0, 0, 0, 1]
    assert "warning: step 4: the policy samples improbable tokens" in capsys.readouterr().err
    assert checkpoints(tmp_path) == [2, 4]


class Breaking(ScriptedRollouts):
    """The log-probabilities of some groups are NaN, unless another seed is drawn."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken

    def begin(self, number, question):
        future = super().begin(number, question)
        if number in self.broken and self.seed == 0:
            for trajectory in future.result().trajectories:
                for turn in trajectory.turns:
                    turn.logprobs = turn.logprobs * np.nan
        return future


@pytest.mark.medium
@pytest.mark.parametrize("action", ["log", "stop"])
def test_diverged_parameters_end_the_run_unsaved(tmp_path, action):
    rule = replace(make_config(tmp_path).learner.optimizer, lr=1e38, warmup_steps=1)
    sections = {"learner": {"optimizer": rule}, "guards": {"action": action}, "checkpoint": {"every": 1}}
    rollouts = ScriptedRollouts()
    with pytest.raises(UserError, match="step 2 diverged .* not saved: .* step 1"):
        run(make_config(tmp_path, **sections), rollouts, tmp_path)
    assert checkpoints(tmp_path) == [1]
    assert [version for version, _ in rollouts.loaded] == [0, 1]  # no worker gets what is not finite
    assert [(row["actor/finite"], row["guard/numbers"]) for row in rows(tmp_path)] == [(1, 0), (0, 1)]


BREAKING = {"loss": {"importance_cap": 2.0}, "learner": {"steps": 7, "row_length": 16, "microbatch_rows": 8}}


def test_run_without_finite_updates_ends(tmp_path, capsys):
    config = make_config(tmp_path / "a", checkpoint={"every": 1, "keep": 9}, **BREAKING)
    with pytest.raises(UserError, match="step 5 diverged .* the newest checkpoint is of step 2"):
        run(config, Breaking(range(4, 14)), tmp_path / "a")
    assert checkpoints(tmp_path / "a") == [1, 2]
    assert [row["guard/numbers"] for row in rows(tmp_path / "a")] == [0, 0, 1, 1, 1]
    assert "no update was finite for 3 steps" in capsys.readouterr().err
    run(make_config(tmp_path / "b", **BREAKING), Breaking((4, 5)), tmp_path / "b")  # a single step is skipped
    assert [row["actor/skipped"] for row in rows(tmp_path / "b")] == [0, 0, 1, 0, 0, 0, 0]
    assert checkpoints(tmp_path / "b")[-1] == 7


@pytest.mark.medium
def test_nonfinite_updates_trigger_rollback(tmp_path):
    guards = {"action": "rollback", "max_sampled_perplexity": None}  # which the scripted tokens exceed
    config = make_config(tmp_path / "a", guards=guards, **BREAKING)
    assert versions(config, Breaking(range(4, 14)), tmp_path / "a") == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]
    assert [row["guard/numbers"] for row in rows(tmp_path / "a")] == [0] * 7
    config = make_config(tmp_path / "b", checkpoint={"every": 5}, guards=ROLLBACK)
    with pytest.raises(UserError, match="no checkpoint is as old as the last good step 3"):
        run(config, Collapsing(), tmp_path / "b")


class Tying(ScriptedRollouts):
    """From group 2 on nobody is right."""

    def begin(self, number, question):
        future = super().begin(number, question)
        if number >= 2:
            for trajectory in future.result().trajectories:
                trajectory.turns[-1].answer = "no"
        return future


@pytest.mark.medium
def test_tied_steps_are_no_collapse(tmp_path):
    config = make_config(tmp_path, guards={"action": "stop", "patience": 1})
    run(config, Tying(), tmp_path, Console(stream=(stream := io.StringIO())))
    first, *tied = rows(tmp_path)
    assert first["actor/entropy"] > 1 and first["guard/entropy"] == 0
    assert [row["step"] for row in tied] == [2, 3, 4]
    for row in tied:
        assert (row["group/tied"], row["actor/computed_share"], row["actor/grad_norm"]) == (1, 0, 0)
        absent = {"actor/entropy", "actor/ppo_kl", "actor/sampler_mismatch", "actor/loss", "guard/entropy"}
        assert absent <= first.keys() and not absent & row.keys()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert ["entropy" in line for line in lines] == [True, False, False, False]
