"""Runs with a critic, probes, replaced groups or a curriculum: resumed, replayed, and their checkpoints."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import jax
import numpy as np
import pytest
from config_rig import changed
from trainer_rig import (
    GUARDED,
    QUESTIONS,
    Collapsing,
    ScriptedRollouts,
    checkpoints,
    make_config,
    make_state,
    resumed,
    rows,
    run,
)

from calibadv_jax import cli
from calibadv_jax.advantages.gae import critic_values, gae_and_returns
from calibadv_jax.config import OptimizerConfig, RewardConfig
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, replay
from calibadv_jax.core.errors import UserError
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.learner import critic as critic_learning
from calibadv_jax.learner import optimizer
from calibadv_jax.metrics.catalogue import find_metric
from calibadv_jax.rollout_store.reader import find_step, read_step
from calibadv_jax.run import critic_training
from calibadv_jax.snapshots.checkpoint import restore_params

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

RATE = OptimizerConfig(lr=0.05, schedule="constant")
LEARNER = {"steps": 4, "pack_length": 16, "microbatch_rows": 8, "row_widths": 1, "optimizer": RATE}
RESTS = {"rest_after": 2, "rest_for": 2, "rest_share": 0.5}
CURRICULUM = {"shuffle": False, "rest_below": 0.2, "rest_above": 0.9}


@pytest.fixture(scope="module", autouse=True)
def shared_critics():
    """Critics of equal settings have one learner, whose programs are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critic_training, "ValueLoss", functools.cache(critic_training.ValueLoss))
        patch.setattr(optimizer, "make_schedule", functools.cache(optimizer.make_schedule))
        for name in ("make_optimizer", "make_critic", "CriticLearner"):
            patch.setattr(critic_learning, name, functools.cache(getattr(critic_learning, name)))
        yield


def critic_config(folder, advantage=None, **keys):
    keys = {"optimizer": RATE, "warmup_steps": 1} | keys
    return make_config(folder, learner=LEARNER, advantage=advantage or {"name": "gae"}, critic=keys)


def probed_config(folder, advantage, shares=True):
    rule = replace(make_config(folder).learner.optimizer, lr=0.05)
    learner = LEARNER | {"pack_length": 64, "optimizer": rule, "share_prefixes": shares}
    return make_config(folder, learner=learner, advantage=advantage)


def tied_config(folder, **data):
    return make_config(folder, rollout={"dynamic_sampling": 2}, data=data)


class SomeTied(ScriptedRollouts):
    """Groups 0, 3, 4 and 9 are wrong throughout; group 2 is right throughout."""

    answers = dict.fromkeys((0, 3, 4, 9), "no") | {2: "yes"}

    def alter(self, number, trajectory):
        if number in self.answers:
            turn = trajectory.turns[-1]
            turn.answer = self.answers[number]
            turn.text = f"<think>t</think><answer>{turn.answer}</answer>"


CALIBRATED = {"name": "calibadv", "base": "gae", "target_ratio": 2.0}
FALLING = OptimizerConfig(lr=0.05, schedule="cosine", warmup_updates=1)
RUNS = {  # of four steps: config, rollouts, and the group at which a start of the run is killed
    "critic": (critic_config, ScriptedRollouts, 5),
    "calibrated": (partial(critic_config, advantage=CALIBRATED, optimizer=FALLING), ScriptedRollouts, 5),
    "igpo": (partial(probed_config, advantage={"name": "igpo"}), ScriptedRollouts, 5),
    "tips": (partial(probed_config, advantage={"name": "tips"}, shares=False), ScriptedRollouts, 5),
    "tied": (tied_config, SomeTied, 10),
    "curriculum": (partial(tied_config, **CURRICULUM), SomeTied, 8),
    "long rests": (partial(tied_config, **CURRICULUM, **RESTS), SomeTied, 8),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder and the rollouts of a run that nothing has stopped."""

    @functools.cache
    def run_whole(name):
        make, rollouts, _ = RUNS[name]
        folder = tmp_path_factory.mktemp(name)
        return folder, run(make(folder), rollouts(), folder)

    return run_whole


def kept(folder, step):
    return read_step(find_step(folder, step))


def valued(folder, step):
    """Questions, values of the critic and log-probabilities of the probes that a step has kept."""
    groups = kept(folder, step).groups
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return [group.question.id for group in groups], [(turn.values, turn.golden_logprobs) for turn in turns]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "tips" else ()) for name in RUNS]
)
def test_resumed_run_is_equal_and_replayed(whole, tmp_path, name):
    folder, rollouts = whole(name)
    make, kind, fails_at = RUNS[name]
    second = resumed(make(tmp_path), tmp_path, fails_at, kind)
    np.testing.assert_equal(second.loaded[-1][1], rollouts.loaded[-1][1])
    assert rows(tmp_path) == rows(folder)
    assert second.begun == rollouts.begun[-len(second.begun) :]
    for number in range(1, 5):
        np.testing.assert_equal(valued(folder, number), valued(tmp_path, number))
        step = kept(folder, number)
        credits = replay(step, kept_config(step, Path("step"))).advantages.credits
        assert equal_turns(step.credits, credits, rounding=0) == (12, 12)


def test_step_with_failed_critic_is_not_saved(tmp_path, monkeypatch):
    """The policy is updated by then: the next start would train it once more on the same trajectories."""
    learn_values = Mock(wraps=critic_training.learn_values)
    learn_values.side_effect = [DEFAULT, DEFAULT, DEFAULT, RuntimeError("the device is full")]
    monkeypatch.setattr(critic_training, "learn_values", learn_values)
    with pytest.raises(RuntimeError, match="the device is full"):
        run(critic_config(tmp_path), ScriptedRollouts(), tmp_path)
    assert checkpoints(tmp_path) == [2]


def test_critic_warmup_leaves_the_policy_unchanged(whole):
    folder, rollouts = whole("critic")
    before, after, later = (params for _, params in rollouts.loaded[:3])
    np.testing.assert_equal(before, after)
    assert not np.array_equal(after["embed"]["embedding"], later["embed"]["embedding"])
    first, second = rows(folder)[:2]
    assert first["critic/updates"] == 1 and "actor/updates" not in first and "actor/loss" not in first
    assert second["actor/updates"] == second["critic/updates"] == 1
    # A critic that has learned nothing expects nothing.
    assert first["critic/values/max"] == first["critic/values/min"] == first["critic/explained_variance"] == 0
    assert second["critic/values/max"] != 0
    assert not [name for name in second if name.startswith("critic") and not find_metric(name)]


def test_critic_metrics_follow_from_the_record(whole):
    folder, _ = whole("critic")
    step = kept(folder, 3)
    config = kept_config(step, Path("step"))
    trajectories = [trajectory for group in step.groups for trajectory in group.trajectories]
    returns = [gae_and_returns(trajectory, config.advantage)[1] for trajectory in trajectories]
    values, returns = np.concatenate([critic_values(each) for each in trajectories]), np.concatenate(returns)
    values, row = values.astype(np.float64), rows(folder)[2]
    assert row["critic/explained_variance"] == 1 - np.var(returns - values) / np.var(returns)
    assert row["critic/returns/mean"] == pytest.approx(1 / 3)  # lambda 1: the score, at every token
    error = 0.5 * np.mean((values - returns) ** 2)  # before the only update nothing is clipped
    assert row["critic/loss"] == pytest.approx(error, rel=1e-5)


def test_calibrated_critic_falls_in_its_rate(whole, tmp_path):
    calibrated = rows(whole("calibrated")[0])
    assert calibrated[-1]["advantage/answer/ratio_before"] != pytest.approx(2)
    assert calibrated[-1]["advantage/answer/ratio_after"] == pytest.approx(2)  # by turn
    schedule = make_state(RUNS["calibrated"][0](tmp_path), tmp_path).trainer.critic.schedule
    rates = [float(schedule(update)) for update in range(4)]  # before each update
    assert [row["critic/lr"] for row in calibrated] == rates and len(set(rates)) == 4


def test_checkpoint_holds_critic_and_separable_policy(whole):
    folder, rollouts = whole("critic")
    state = make_state(critic_config(folder), folder)
    params, step = restore_params(folder / "checkpoints", state.trainer.learner.abstract_state["params"])
    np.testing.assert_equal((step, jax.device_get(params)), (4, rollouts.loaded[-1][1]))
    names = set(state.trainer.critic.state["params"])
    assert names == set(state.model.policy.abstract_params) | {"value_head"} and "lm_head" not in names
    with pytest.raises(UserError, match="does not fit this policy and optimizer.*critic"):
        make_state(critic_config(folder, {"name": "grpo"}), folder)


def test_diverged_critic_ends_the_run(tmp_path):
    rate = OptimizerConfig(lr=1e38, schedule="constant")
    with pytest.raises(UserError, match="step 1 diverged"):
        run(critic_config(tmp_path, optimizer=rate), ScriptedRollouts(), tmp_path)


@pytest.mark.parametrize(
    ("name", "policy"), [("igpo", "current"), pytest.param("tips", "initial", marks=pytest.mark.slow)]
)
def test_probed_run_rewards_turns(whole, name, policy):
    folder, _ = whole(name)
    assert 0 < rows(folder)[-1][f"advantage/golden/{policy}/first"] < 1
    assert '"timing_s/probe"' in (folder / "metrics.jsonl").read_text()
    for step in (1, 4):
        assert any(turns[0] != turns[1] for credit in kept(folder, step).credits for turns in credit.turns)


def test_probe_time_is_measured(whole):
    folder, _ = whole("igpo")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["timing_s/probe"] > 0


def test_probed_run_rolls_back(tmp_path):
    config = changed(
        probed_config(tmp_path, {"name": "igpo"}),
        guards=GUARDED | {"action": "rollback"},
    )
    rollouts = run(config, Collapsing(), tmp_path)
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    probed = [golden["current"] for _, golden in valued(tmp_path, 4)[1]]
    assert len(probed) == 12


def test_probes_use_the_named_policies(tmp_path, capsys):
    class Again(ScriptedRollouts):
        def begin(self, number, question):
            return super().begin(number % 2, QUESTIONS[number % 2])

    def values(step, policy):
        return [golden[policy] for _, golden in valued(tmp_path / "b", step)[1]]

    probes = {"name": "grpo", "probes": ["initial", "current"]}
    plain = run(probed_config(tmp_path / "a", {"name": "grpo"}), Again(), tmp_path / "a")
    probed = run(probed_config(tmp_path / "b", probes), Again(), tmp_path / "b")
    np.testing.assert_equal(plain.loaded[-1][1], probed.loaded[-1][1])
    assert values(1, "initial") == values(1, "current") == values(4, "initial") != values(4, "current")
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["replay", str(tmp_path / "a"), "advantage.name=igpo"])
    assert stop.value.code == 2
    output = capsys.readouterr().err
    assert "train with advantage.probes='[current]'" in output and output.count("\n") == 1


def test_tied_groups_are_replaced(whole):
    folder, rollouts = whole("tied")
    assert [number for number, _ in rollouts.begun] == list(range(12))
    # Step 1: 0 gives way to 2, and that to 3, which is tied too, but then two were replaced.
    assert [row["rollout/replaced_groups"] for row in rows(folder)] == [2, 1, 0, 1]
    assert [row["group/tied"] for row in rows(folder)] == [0.5, 0, 0, 0]


def test_dynamic_sampling_and_curriculum_are_off_by_default(tmp_path):
    rollouts = run(make_config(tmp_path), SomeTied(), tmp_path)
    assert [number for number, _ in rollouts.begun] == list(range(8))
    assert not {"rollout/replaced_groups", "rollout/resting_questions"} & rows(tmp_path)[0].keys()


def test_curriculum_compares_with_the_largest_reward(whole, tmp_path):
    """Scores of 2 out of 2 are a mean of 1, scores of 1 out of 2 are not above 0.9."""
    folder, rollouts = whole("curriculum")
    # Of seven questions q0, q2, q3 and q4 were wrong or right throughout and rest in the second epoch.
    assert [name for _, name in rollouts.begun] == [f"q{number}" for number in (*range(7), 1, 5, 6, 0, 1)]
    assert [row["rollout/resting_questions"] for row in rows(folder)] == [3, 4, 0, 1]
    for number, answer in enumerate(({"f1": 1.0, "em": 1.0}, {"f1": 0.25})):
        folder = tmp_path / str(number)
        config = replace(tied_config(folder, **CURRICULUM), reward=RewardConfig(answer))
        assert run(config, SomeTied(), folder).begun == rollouts.begun
        assert [row["rollout/resting_questions"] for row in rows(folder)] == [3, 4, 0, 1]


def test_question_rests_once_it_taught_nothing_in_two_epochs(whole):
    """q2 is right throughout in the first epoch (group 2) and wrong throughout in the second (group 9)."""
    folder, rollouts = whole("long rests")
    assert rollouts.begun[9] == (9, "q2")
    assert [row["rollout/resting_questions"] for row in rows(folder)] == [0, 0, 0, 1]


class AnotherScore(ProcessGroup):
    """Another process scores a group otherwise: it would ask for other groups."""

    def assert_equal(self, name, value):
        if name == "score of a group":
            assert value() == [[0.0] * 3, [1.0, 0.0, 0.0]]
            raise UserError(f"process 1 has another {name} than process 0")


def test_scores_of_tied_groups_are_compared_across_processes(tmp_path):
    rollouts = SomeTied()
    state = make_state(tied_config(tmp_path), tmp_path, rollouts)
    state.process_group = AnotherScore()
    with pytest.raises(UserError, match="another score of a group"):
        state.stream.take(0)
    assert [number for number, _ in rollouts.begun] == [0, 1]
