"""Runs with a critic, probes, replaced groups or a curriculum: resumed, replayed, and their checkpoints."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from trainer_rig import (
    MODEL,
    QUESTIONS,
    ScriptedRollouts,
    checkpoints,
    make_config,
    make_state,
    resumed,
    rows,
    run,
    shared_programs,  # noqa: F401
    write_group,
)

from calibadv_jax import cli
from calibadv_jax.advantages.estimators import critic_values, gae_and_returns
from calibadv_jax.config import OptimizerConfig, RewardConfig
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, replay
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.learner import critic as critic_learning
from calibadv_jax.learner import optimizer
from calibadv_jax.metrics.catalogue import find
from calibadv_jax.record.reader import find_step, read_step
from calibadv_jax.run import critic
from calibadv_jax.snapshots.checkpoint import restore_params

pytestmark = pytest.mark.medium


RATE = OptimizerConfig(lr=0.05, schedule="constant")


@pytest.fixture(scope="module", autouse=True)
def shared_critics():
    """Critics of equal settings have one learner, whose programs are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (critic, ("ValueLoss",)),
            (optimizer, ("make_schedule",)),
            (critic_learning, ("make_optimizer", "critic_of", "CriticLearner")),
        ):
            for name in names:
                patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


def critic_config(folder, advantage=None, **keys):
    learner = {"steps": 4, "row_length": 16, "microbatch_rows": 8, "row_widths": 1, "optimizer": RATE}
    keys = {"optimizer": RATE, "warmup_steps": 1} | keys
    return make_config(folder, learner=learner, advantage=advantage or {"name": "gae"}, critic=keys)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps, the first of them the critic's alone."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(critic_config(folder), ScriptedRollouts(), folder)


def kept(folder, step):
    return read_step(find_step(folder, step))


def test_resumed_critic_run_is_bit_for_bit_equal(whole, tmp_path):
    folder, rollouts = whole
    second = resumed(critic_config(tmp_path), tmp_path, 5)
    np.testing.assert_equal(second.loaded[-1][1], rollouts.loaded[-1][1])
    assert rows(tmp_path) == rows(folder)
    for step in (3, 4):  # after the restart
        for group, other in zip(kept(folder, step).groups, kept(tmp_path, step).groups, strict=True):
            for mine, trajectory in zip(group.trajectories, other.trajectories, strict=True):
                np.testing.assert_array_equal(critic_values(mine), critic_values(trajectory))


def test_step_with_failed_critic_is_not_saved(tmp_path, monkeypatch):
    """The policy is updated by then: the next start would train it once more on the same trajectories."""
    learn_values, asked = critic.learn_values, []

    def failing(*arguments):
        asked.append(arguments)
        if len(asked) == 4:
            raise RuntimeError("the device is full")
        return learn_values(*arguments)

    monkeypatch.setattr(critic, "learn_values", failing)
    with pytest.raises(RuntimeError, match="the device is full"):
        run(critic_config(tmp_path), ScriptedRollouts(), tmp_path)
    assert checkpoints(tmp_path) == [2]


def test_critic_warmup_leaves_the_policy_unchanged(whole):
    folder, rollouts = whole
    before, after, later = (params for _, params in rollouts.loaded[:3])
    np.testing.assert_equal(before, after)
    assert not np.array_equal(after["embed"]["embedding"], later["embed"]["embedding"])
    first, second = rows(folder)[:2]
    assert first["critic/updates"] == 1 and "actor/updates" not in first and "actor/loss" not in first
    assert second["actor/updates"] == second["critic/updates"] == 1
    # A critic that has learned nothing expects nothing.
    assert first["critic/values/max"] == first["critic/values/min"] == first["critic/explained_variance"] == 0
    assert second["critic/values/max"] != 0
    assert not [name for name in second if name.startswith("critic") and not find(name)]


def test_record_reproduces_advantages_and_critic_metrics(whole):
    folder, _ = whole
    step, config = kept(folder, 3), kept_config(kept(folder, 3), Path("step"))
    result = replay(step, config)
    assert equal_turns(step.credits, result.advantages.credits, rounding=0) == (12, 12)
    trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
    values = np.concatenate([critic_values(trajectory) for trajectory in trajectories]).astype(np.float64)
    returns = np.concatenate(
        [gae_and_returns(trajectory, config.advantage)[1] for trajectory in trajectories]
    )
    row = rows(folder)[2]
    assert row["critic/explained_variance"] == 1 - np.var(returns - values) / np.var(returns)
    assert row["critic/returns/mean"] == pytest.approx(1 / 3)  # lambda 1: the score, at every token
    error = 0.5 * np.mean((values - returns) ** 2)  # before the only update nothing is clipped
    assert row["critic/loss"] == pytest.approx(error, rel=1e-5)


def test_checkpoint_holds_critic_and_separable_policy(whole):
    folder, rollouts = whole
    state = make_state(critic_config(folder), folder)
    params, step = restore_params(folder / "checkpoints", state.trainer.learner.abstract_state()["params"])
    np.testing.assert_equal((step, jax.device_get(params)), (4, rollouts.loaded[-1][1]))
    names = set(state.trainer.critic.state["params"])
    assert names == set(state.model.policy.abstract_params) | {"value_head"} and "lm_head" not in names
    with pytest.raises(UserError, match="does not fit this policy and optimizer.*critic"):
        make_state(critic_config(folder, {"name": "grpo"}), folder)


def test_calibadv_calibrates_it_by_turn(tmp_path):
    advantage = {"name": "calibadv", "base": "gae", "target_ratio": 2.0}
    run(critic_config(tmp_path, advantage), ScriptedRollouts(), tmp_path)
    row = rows(tmp_path)[-1]
    assert row["advantage/answer/ratio_before"] != pytest.approx(2)
    assert row["advantage/answer/ratio_after"] == pytest.approx(2)
    step = kept(tmp_path, 4)
    result = replay(step, kept_config(step, Path("step")))
    assert equal_turns(step.credits, result.advantages.credits, rounding=0) == (12, 12)


def test_diverged_critic_ends_the_run(tmp_path):
    rate = OptimizerConfig(lr=1e38, schedule="constant")
    with pytest.raises(UserError, match="step 1 diverged"):
        run(critic_config(tmp_path, optimizer=rate), ScriptedRollouts(), tmp_path)


def test_critic_rate_is_read_before_the_update(tmp_path, monkeypatch):
    config = critic_config(tmp_path, optimizer=OptimizerConfig(lr=0.05, schedule="cosine", warmup_steps=1))
    trained = critic.Critic(config, MODEL, None)
    trained.state = {"updates": 0, "params": {"w": np.ones(1, np.float32)}}

    def learn(learner, state, *_):
        return state | {"updates": state["updates"] + 1}, {"critic/loss": 0.5}

    monkeypatch.setattr(critic, "learn_values", learn)
    group = write_group(0, QUESTIONS[0])
    for turn in (turn for trajectory in group.trajectories for turn in trajectory.turns):
        turn.values = np.zeros(len(turn.token_ids), np.float32)
    rates = [trained.update([group], np.random.default_rng(0))["critic/lr"] for _ in range(3)]
    assert rates == [float(trained.schedule(update)) for update in range(3)] and len(set(rates)) == 3


LEARNER = {"steps": 4, "row_length": 64, "microbatch_rows": 8, "row_widths": 1}


def probed_config(folder, name, learner=None, **sections):
    learner = (
        LEARNER | {"optimizer": replace(make_config(folder).learner.optimizer, lr=0.05)} | (learner or {})
    )
    advantage = {"name": name} if isinstance(name, str) else name
    return make_config(folder, learner=learner, advantage=advantage, **sections)


def kept_values_of(folder, step, policy):
    groups = read_step(find_step(folder, step)).groups
    return [
        t.golden_logprobs[policy]
        for group in groups
        for trajectory in group.trajectories
        for t in trajectory.turns
    ]


@pytest.mark.parametrize(
    ("name", "policy", "shares"),
    [("igpo", "current", True), pytest.param("tips", "initial", False, marks=pytest.mark.slow)],
)
def test_resumed_probed_run_is_equal_and_replayed(tmp_path, name, policy, shares):
    learner = {"share_prefixes": shares}
    whole = run(probed_config(tmp_path / "a", name, learner), ScriptedRollouts(), tmp_path / "a")
    second = resumed(probed_config(tmp_path / "b", name, learner), tmp_path / "b", 5)
    np.testing.assert_equal(second.loaded[-1][1], whole.loaded[-1][1])
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    row = json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row[f"advantage/golden/{policy}/first"] < 1 and row["timing_s/probe"] > 0
    for step in (1, 4):
        assert kept_values_of(tmp_path / "a", step, policy) == kept_values_of(tmp_path / "b", step, policy)
        kept = read_step(find_step(tmp_path / "a", step))
        equal, total = equal_turns(
            kept.credits, replay(kept, kept_config(kept, Path("step"))).advantages.credits, rounding=0
        )
        assert equal == total == 12
        assert any(turns[0] != turns[1] for credit in kept.credits for turns in credit.turns)


def test_probes_use_the_named_policies(tmp_path):
    probes = {"name": "grpo", "probes": ["initial", "current"]}

    class Again(ScriptedRollouts):
        def begin(self, number, question):
            return super().begin(number % 2, QUESTIONS[number % 2])

    plain = run(probed_config(tmp_path / "a", "grpo"), Again(), tmp_path / "a")
    probed = run(probed_config(tmp_path / "b", probes), Again(), tmp_path / "b")
    np.testing.assert_equal(plain.loaded[-1][1], probed.loaded[-1][1])
    first = kept_values_of(tmp_path / "b", 1, "initial")
    assert (
        first == kept_values_of(tmp_path / "b", 1, "current") == kept_values_of(tmp_path / "b", 4, "initial")
    )
    assert first != kept_values_of(tmp_path / "b", 4, "current")


def test_replay_without_probes_is_refused(tmp_path, capsys):
    run(probed_config(tmp_path, "grpo"), ScriptedRollouts(), tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["replay", str(tmp_path), "advantage.name=igpo"])
    assert stop.value.code == 2
    output = capsys.readouterr().err
    assert "train with advantage.probes='[current]'" in output and output.count("\n") == 1


class SomeTied(ScriptedRollouts):
    """Groups 0, 3, 4 and 9 are wrong throughout; group 2 is right throughout."""

    answers = dict.fromkeys((0, 3, 4, 9), "no") | {2: "yes"}

    def begin(self, number, question):
        future = super().begin(number, question)
        if number in self.answers and not future.exception():
            for trajectory in future.result().trajectories:
                trajectory.turns[-1] = reply_of(trajectory.turns[-1], self.answers[number])
        return future


def reply_of(turn, answer):
    text = f"<think>t</think><answer>{answer}</answer>"
    return replace(turn, text=text, answer=answer)


def config_of(folder, **data):
    return make_config(folder, rollout={"replace_tied": 2}, data=data)


def asked(folder, step):
    return [group.question.id for group in read_step(find_step(folder, step)).groups]


def test_tied_groups_are_replaced_alike_after_resume(tmp_path):
    whole = run(config_of(tmp_path / "a"), SomeTied(), tmp_path / "a")
    assert [number for number, _ in whole.begun] == list(range(12))
    # Step 1: 0 gives way to 2, and that to 3, which is tied too, but then two were replaced.
    result = rows(tmp_path / "a")
    assert [row["rollout/replaced_groups"] for row in result] == [2, 1, 0, 1]
    assert [row["group/tied"] for row in result] == [0.5, 0, 0, 0]
    second = resumed(config_of(tmp_path / "b"), tmp_path / "b", 10, SomeTied)
    assert rows(tmp_path / "b") == result
    assert second.begun == whole.begun[9:]
    np.testing.assert_equal(second.loaded[-1][1], whole.loaded[-1][1])


def test_curriculum_rests_questions_alike_after_resume(tmp_path):
    data = {"shuffle": False, "rest_below": 0.2, "rest_above": 0.9}
    whole = run(config_of(tmp_path / "a", **data), SomeTied(), tmp_path / "a")
    # Of seven questions q0, q2, q3 and q4 were wrong or right throughout and rest in the second epoch.
    assert [name for _, name in whole.begun] == [f"q{number}" for number in (*range(7), 1, 5, 6, 0, 1)]
    assert [row["rollout/resting_questions"] for row in rows(tmp_path / "a")] == [3, 4, 0, 1]
    resumed(config_of(tmp_path / "b", **data), tmp_path / "b", 8, SomeTied)
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    for step in range(1, 5):
        assert asked(tmp_path / "a", step) == asked(tmp_path / "b", step)


def test_curriculum_compares_with_the_largest_reward(tmp_path):
    """Scores of 2 out of 2 are a mean of 1, scores of 1 out of 2 are not above 0.9."""
    begun = []
    for number, answer in enumerate(({"f1": 1.0}, {"f1": 1.0, "em": 1.0}, {"f1": 0.25})):
        data, folder = {"shuffle": False, "rest_below": 0.2, "rest_above": 0.9}, tmp_path / str(number)
        config = replace(config_of(folder, **data), reward=RewardConfig(answer))
        begun.append(run(config, SomeTied(), folder).begun)
        assert [row["rollout/resting_questions"] for row in rows(folder)] == [3, 4, 0, 1]
    assert begun[0] == begun[1] == begun[2]


class AnotherScore(Hosts):
    """Another process scores a group otherwise: it would ask for other groups."""

    def same(self, what, value):
        if what == "score of a group":
            assert value() == [[0.0] * 3, [1.0, 0.0, 0.0]]
            raise UserError(f"process 1 has another {what} than process 0")


def test_scores_of_tied_groups_are_compared_across_processes(tmp_path):
    rollouts = SomeTied()
    state = make_state(config_of(tmp_path), tmp_path, rollouts)
    state.hosts = AnotherScore()
    with pytest.raises(UserError, match="another score of a group"):
        state.stream.take(0)
    assert [number for number, _ in rollouts.begun] == [0, 1]
