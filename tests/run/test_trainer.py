"""The training loop on scripted trajectories: what a resumed run draws, what the config reaches, guards."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

import jax
import numpy as np
import pytest
from tiny_policy import row_logits
from trainer_rig import (
    GUARDED,
    HF_CONFIG,
    MODEL,
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
from calibadv_jax.commands import train
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, replay
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.signals import Stop
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.learner.step import StepResult
from calibadv_jax.metrics.console import Console
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.reader import find_step, read_metadata, read_step
from calibadv_jax.rollout_store.schema import kept_steps

pytestmark = pytest.mark.usefixtures("shared_programs")


def scored(config, numbers):
    groups = [write_group(number, QUESTIONS[number % len(QUESTIONS)]) for number in numbers]
    groups = score_groups(groups, config.reward, np.random.default_rng(0))
    return groups, compute_advantages(groups, config.advantage)


def rated(folder, **keys):
    """The section of a learner whose rates are high enough to see updates."""
    return {"optimizer": replace(make_config(folder).learner.optimizer, **keys)}


def test_start_from_a_checkpoint_loads_no_weights(tmp_path):
    learner = {"steps": 2} | rated(tmp_path, lr=0.05)
    rollouts = run(make_config(tmp_path, learner=learner), ScriptedRollouts(), tmp_path)
    config = make_config(tmp_path, learner=learner, policy={"path": str(tmp_path / "lost")})
    state = make_state(config, tmp_path)
    assert int(state.learner_state["updates"]) == state.step == 2
    first, last = rollouts.loaded[0][1], rollouts.loaded[-1][1]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.learner_state["params"]), last)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)) > 0.01
    with pytest.raises(UserError, match="lost"):
        make_state(config, tmp_path / "new")


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    """Stopped while step 4 of 6 is drawn; without the checkpoint of the stop, as if it had been killed."""
    learner = {"steps": 6} | rated(tmp_path, lr=0.01, warmup_updates=2)
    whole = make_config(tmp_path / "whole", learner=learner, checkpoint={"every": 0})
    expected = run(whole, ScriptedRollouts(), tmp_path / "whole")
    parts = make_config(tmp_path / "parts", learner=learner)
    first = ScriptedRollouts(fails_at=3 * 2 + 1)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run(parts, first, tmp_path / "parts")
    assert [version for version, _ in first.loaded] == [0, 1, 2, 3]
    assert len(rows(tmp_path / "parts")) == 3
    shutil.rmtree(tmp_path / "parts/checkpoints/3")
    second = run(parts, ScriptedRollouts(), tmp_path / "parts")
    assert first.begun[:4] + second.begun == expected.begun
    assert len({name for _, name in expected.begun[:7]}) == 7  # an epoch: no question twice
    assert [version for version, _ in second.loaded] == [2, 3, 4, 5, 6]
    np.testing.assert_equal(second.loaded[-1][1], expected.loaded[-1][1])
    np.testing.assert_equal(second.loaded[0][1], expected.loaded[2][1])
    written = rows(tmp_path / "parts")
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]  # none lost, none twice
    assert written == rows(tmp_path / "whole")
    assert all(row["reward/mean"] == pytest.approx(1 / 3) for row in written)  # one of three is right
    assert all(row["actor/grad_norm"] > 0 for row in written)
    assert [row["actor/lr"] for row in written[:2]] == pytest.approx([0, 0.005])
    assert checkpoints(tmp_path / "parts") == [4, 6]
    assert list(kept_steps(tmp_path / "parts")) == [1, 2, 3, 4, 5, 6]


def test_kept_step_replays_to_same_advantages_and_loss(tmp_path):
    """In mini-batches, so that the learner's log-probabilities are computed apart and kept."""
    learner = {"steps": 2, "minibatch_size": 4, "pack_length": 16, "microbatch_rows": 8}
    for name, change in (("apart", learner), ("at once", learner | {"minibatch_size": 0})):
        folder = tmp_path / name
        run(make_config(folder, learner=change), ScriptedRollouts(), folder)
        kept = read_step(find_step(folder, 2))
        computed = [values is not None for group in kept.learner_logprobs for values in group]
        assert all(computed) if name == "apart" else not any(computed)
        result = replay(kept, kept_config(kept, Path("step")))
        equal, total = equal_turns(kept.credits, result.advantages.credits)
        assert equal == total == 12
        row = rows(folder)[1]
        for metric in ("actor/pg_loss", "advantage/answer/negative_after", "reward/mean"):
            # The ratio of the second mini-batch is no longer 1, but the learning rate is tiny.
            assert result.metrics[metric] == pytest.approx(row[metric], abs=1e-5), metric
        for other in ("kl_cov", "lld", "balance_detached"):
            changed = replay(kept, kept_config(kept, Path("step"), [f"loss.name={other}"]))
            assert np.isfinite(changed.metrics["actor/pg_loss"])
        if name == "apart":  # between the learner's log-probabilities that were kept and the sampler's
            assert result.metrics["actor/sampler_mismatch"] == pytest.approx(row["actor/sampler_mismatch"])
            assert row["actor/sampler_mismatch"] > 0.1


@pytest.mark.medium
def test_kl_term_compares_with_initial_policy(tmp_path):
    config = make_config(tmp_path, loss={"kl_coef": 0.1}, learner=rated(tmp_path, lr=0.05))
    state = make_state(config, tmp_path)
    initial = jax.device_get(state.learner_state["params"])
    updates = [state.train_on(*scored(config, [number, number + 3])) for number in range(3)]
    kl = [update.metrics["actor/kl_loss"] for update in updates]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-4 and kl[2] > 1e-4
    np.testing.assert_equal(jax.device_get(state.trainer.reference), initial)
    assert updates[-1].tokens == 6 * (4 + 3 + 2 + 3)  # prompts and observations included
    first = updates[0].metrics
    assert first["actor/updates"] == 1 and first["actor/untrained_trajectories"] == 0


@pytest.mark.parametrize(("temperature", "used"), [(0.7, 0.7), (0.0, 1.0)])
def test_learner_uses_the_sampling_temperature(tmp_path, temperature, used):
    """Six trajectories in mini-batches of four, three times over, for five steps: thirty updates."""
    learner = {"steps": 5, "minibatch_size": 4, "epochs": 3} | rated(tmp_path, lr=1.0, schedule="linear")
    sections = {"rollout": {"temperature": temperature}, "policy": {"logprob_chunk": 5}, "learner": learner}
    config = make_config(tmp_path, **sections)
    trainer = make_state(config, tmp_path).trainer
    options = trainer.learner.options
    assert (options.temperature, options.logprob_chunk, options.offload) == (used, 5, False)
    assert (options.rows, options.pack_length) == (config.learner.microbatch_rows, config.learner.pack_length)
    assert trainer.reference is None  # without a KL term nothing is kept for it
    assert [float(trainer.schedule(count)) for count in (0, 15, 30)] == pytest.approx([1, 0.5, 0])


class Twice(ProcessGroup):
    """Another process has the same of everything."""

    def all_gather(self, what, value):
        return [value, value]


def test_published_weights_are_compared_with_workers(tmp_path):
    config, rollouts = make_config(tmp_path), ScriptedRollouts()
    state = make_state(config, tmp_path, rollouts)
    assert state.publish() == {}
    tokens = np.random.default_rng(0).integers(0, HF_CONFIG["vocab_size"], 15).astype(np.int32)[None]
    table = np.asarray(jax.nn.log_softmax(row_logits(MODEL.policy, rollouts.loaded[0][1], tokens)[0]))
    other = table[np.arange(14), tokens[0, 1:]]
    rollouts.logprobs = {"a": other, "b": other + np.float32([0.25] + [0] * 13)}
    result = state.publish()
    assert result["rollout/workers"] == 2
    state.process_group, rollouts.metrics = Twice(), lambda: {"rollout/workers_lost": 3.0}
    assert state.publish()["rollout/workers"] == 4
    assert state.sampler_metrics() == {"rollout/workers_lost": 6.0}
    assert result["rollout/probe_logprob_diff_max"] == pytest.approx(0.25, abs=1e-5)
    assert result["rollout/probe_logprob_diff_mean"] == pytest.approx(0.25 / 28, abs=1e-5)
    warm = make_state(make_config(tmp_path, rollout={"temperature": 0.5}), tmp_path, rollouts)
    assert warm.publish() == {"rollout/workers": 2}  # whose log-probabilities are those of temperature 1


def test_step_without_sampled_tokens_changes_nothing(tmp_path):
    config = make_config(tmp_path)
    state = make_state(config, tmp_path)
    groups, _ = scored(config, [0])
    for trajectory in groups[0].trajectories:
        trajectory.turns = []
    before = jax.device_get(state.learner_state)
    updated = state.train_on(groups, compute_advantages(groups, config.advantage))
    assert (state.step, updated.tokens, updated.metrics["actor/untrained_trajectories"]) == (1, 0, 3)
    np.testing.assert_equal(jax.device_get(state.learner_state), before)


def test_minibatches_depend_on_step_and_seed(tmp_path, monkeypatch):
    orders = []

    def note(learner, state, samples, config, loss, rng, reference):
        orders.append(tuple(rng.permutation(20).tolist()))
        return StepResult(state, {}, samples)

    monkeypatch.setattr("calibadv_jax.run.trainer.learn", note)
    for seed in (0, 0, 1):
        config = make_config(tmp_path, run={"dir": str(tmp_path), "seed": seed})
        state = make_state(config, tmp_path)
        for number in range(2):
            state.train_on(*scored(config, [number]))
    assert orders[:2] == orders[2:4] and len(set(orders)) == 4


@pytest.mark.parametrize(
    "extra", [None, {"step": 1}, {"step": 1, "questions": {}, "stream": {}, "guards": {}}], ids=str
)
def test_checkpoint_without_counters_is_refused(tmp_path, extra):
    state = make_state(make_config(tmp_path), tmp_path)
    state.checkpoints.save(1, state.learner_state, extra)
    state.checkpoints.wait()
    with pytest.raises(UserError, match=r"checkpoints/1: damaged .*\(in extra"):
        make_state(make_config(tmp_path), tmp_path)


ROLLBACK = GUARDED | {"action": "rollback"}


def test_taken_over_mirror_ends_all_processes(tmp_path):
    """Only the process that copies can find that out; a save is a program of all."""
    state = make_state(make_config(tmp_path), tmp_path)
    state.process_group, state.mirror, state.step = MagicMock(), Mock(), 2
    state.mirror.check.side_effect = UserError("run.mirror was taken over")
    with pytest.raises(UserError, match="taken over"):
        state.save_if_due()
    barrier = state.process_group.barrier
    barrier.assert_called_once_with("checkpoint")
    assert barrier.return_value.__exit__.call_args.args[0] is UserError and checkpoints(tmp_path) == []


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
        state.mirror = mirror = Mock()
        train.train(state, stop)
    # Step 4 (groups 6 and 7) collapses; the newest checkpoint before it is that of step 2.
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert [number for number, _ in rollouts.begun] == [*range(8), *range(4, 12)]
    assert rollouts.seed != 0
    seeds = [(0, step) for step in range(4)] + [(rollouts.seed, step) for step in range(2, 6)]
    assert drawn == [(seed, step, "reward") for seed, step in seeds]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not any(row["guard/sampled_perplexity"] for row in rows(tmp_path))
    kept = {step: read_metadata(path)["seed"] for step, path in kept_steps(tmp_path).items()}
    assert kept == {step: "0" if step < 3 else str(rollouts.seed) for step in range(1, 7)}
    jax.tree.map(np.testing.assert_array_equal, rollouts.loaded[2][1], rollouts.loaded[5][1])
    assert checkpoints(tmp_path) == [4, 6]
    copied = [made for made in mirror.mock_calls if made != call.check()]
    assert copied == [call.put(2), call.drop_after(2), call.put(2), call.put(4), call.put(6)]


def test_restart_after_rollback_keeps_the_new_seed(tmp_path):
    config = make_config(tmp_path, learner={"steps": 6}, guards=ROLLBACK)
    with pytest.raises(SystemExit):
        run(config, Ended(), tmp_path)
    assert checkpoints(tmp_path) == [2] and list(kept_steps(tmp_path)) == [1, 2]
    state = make_state(config, tmp_path, after := Collapsing())
    assert state.guards.rollbacks == 1 and after.seed == state.seed != config.run.seed
    assert versions(config, Collapsing(), tmp_path) == [2, 3, 4, 5, 6]
    (tmp_path / "rollback.json").write_text('{"step": 8, "rollbacks": 3}')  # and checkpoint 8 was deleted
    assert make_state(config, tmp_path).guards.rollbacks == 3
    shutil.rmtree(tmp_path / "checkpoints")
    run(make_config(tmp_path, learner={"steps": 2}, guards=ROLLBACK), Collapsing(), tmp_path)
    assert make_state(config, tmp_path).guards.rollbacks == 0


def test_signal_among_bad_steps_keeps_rollback_checkpoint(tmp_path):
    """Steps 4 to 6 are bad, and 4 is saved; a checkpoint of 5 would take the place of that of step 2."""
    config = make_config(tmp_path, learner={"steps": 7}, guards=ROLLBACK | {"patience_steps": 3})
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

    def alter(self, number, trajectory):
        if number in self.broken and self.seed == 0:
            for turn in trajectory.turns:
                turn.logprobs = turn.logprobs * np.nan


@pytest.mark.medium
@pytest.mark.parametrize("action", ["log", "stop"])
def test_diverged_parameters_end_the_run_unsaved(tmp_path, action):
    rule = replace(make_config(tmp_path).learner.optimizer, lr=1e38, warmup_updates=1)
    sections = {"learner": {"optimizer": rule}, "guards": {"action": action}, "checkpoint": {"every": 1}}
    rollouts = ScriptedRollouts()
    with pytest.raises(UserError, match="step 2 diverged .* not saved: .* step 1"):
        run(make_config(tmp_path, **sections), rollouts, tmp_path)
    assert checkpoints(tmp_path) == [1]
    assert [version for version, _ in rollouts.loaded] == [0, 1]  # no worker gets what is not finite
    assert [(row["actor/finite"], row["guard/numbers"]) for row in rows(tmp_path)] == [(1, 0), (0, 1)]


BREAKING = {"loss": {"importance_cap": 2.0}, "learner": {"steps": 7, "pack_length": 16, "microbatch_rows": 8}}


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

    def alter(self, number, trajectory):
        if number >= 2:
            trajectory.turns[-1].answer = "no"


@pytest.mark.medium
def test_tied_steps_are_no_collapse(tmp_path):
    config = make_config(tmp_path, guards={"action": "stop", "patience_steps": 1})
    run(config, Tying(), tmp_path, Console(stream=(stream := io.StringIO())))
    first, *tied = rows(tmp_path)
    assert first["actor/entropy"] > 1 and first["guard/entropy"] == 0
    assert [row["step"] for row in tied] == [2, 3, 4]
    for row in tied:
        assert (row["group/tied"], row["actor/computed_share"], row["actor/grad_norm"]) == (1, 0, 0)
        absent = {"actor/entropy", "actor/ppo_kl", "actor/sampler_mismatch", "actor/loss", "guard/entropy"}
        assert absent <= first.keys() and not absent & row.keys()
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("  ")[0] for line in steps] == [f"step {step}/4" for step in (1, 2, 3, 4)]
    assert ["entropy" in line for line in steps] == [True, False, False, False]
    assert lines[-1] == "checkpoint saved at step 4"
