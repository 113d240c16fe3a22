"""PPO: a critic is trained, saved and asked beside the policy."""

from __future__ import annotations

import functools
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

from calibadv_jax.advantages.estimators import critic_values, gae_and_returns
from calibadv_jax.config import OptimizerConfig
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, replay
from calibadv_jax.core.errors import UserError
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
