"""What PPO carries beside the policy: a critic, its optimizer, and what it learns of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.advantages.estimators import critic_values, gae_and_returns
from calibadv_jax.config import Config
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.learner.critic import ValueLoss, critic_learner, critic_params, learn_values, value_sample
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.optimizer import schedule_of
from calibadv_jax.learner.step import make_sample, sample_logprobs
from calibadv_jax.policy.transformer import Params
from calibadv_jax.run.model import Model


class RunCritic:
    """A critic between the steps.

    Args:
        params: of the policy that the run begins with, which the critic is a copy of; those that are trained
            are donated. None: the state comes from a checkpoint.
    """

    def __init__(self, config: Config, model: Model, params: Params | None):
        self.config = config
        self.schedule = schedule_of(config, config.critic.optimizer)
        self.learner = critic_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = ValueLoss(config.critic.clip)
        self.state: State = {}
        if params is not None:
            self.state = self.learner.init(critic_params(self.learner.policy, params, model.mesh))

    def valued(self, groups: Sequence[Group]) -> list[Group]:
        """Copies of the groups whose turns have `values`."""
        trajectories = [one for group in groups for one in group.trajectories]
        samples = [make_sample(one, np.zeros(len(one.mask), np.float32)) for one in trajectories]
        asked = [index for index, sample in enumerate(samples) if sample.mask.any()]
        params, known = self.state["params"], [samples[index] for index in asked]
        found: list[np.ndarray] = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
        if asked:
            values = sample_logprobs(self.learner, params, known, self.config.learner)
            for index, one in zip(asked, values, strict=True):
                found[index] = one
        each = iter(
            _with_values(one, values[sample.mask])
            for one, sample, values in zip(trajectories, samples, found, strict=True)
        )
        return [replace(group, trajectories=[next(each) for _ in group.trajectories]) for group in groups]

    def update(self, groups: Sequence[Group], rng: np.random.Generator) -> dict[str, float]:
        """Learns what the scored groups came to, and tells what the values before it were worth."""
        trajectories = [one for group in groups for one in group.trajectories]
        values = [critic_values(one) for one in trajectories]
        returns = [gae_and_returns(one, self.config.advantage)[1] for one in trajectories]
        samples = [value_sample(*each) for each in zip(trajectories, values, returns, strict=True)]
        rate = float(self.schedule(int(self.state["updates"])))
        self.state, learned = learn_values(
            self.learner, self.state, samples, self.config.learner, self.loss, rng
        )
        if not learned:
            return {}
        learned["critic/finite"] = float(self.learner.is_finite(self.state["params"]))
        before, wanted = np.concatenate(values).astype(np.float64), np.concatenate(returns)
        return (
            {"critic/lr": rate}
            | learned
            | _spread("critic/values", before)
            | _spread("critic/returns", wanted)
            | explained(before, wanted)
        )


def explained(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """1 - variance of what the values miss / variance of the returns; nothing where the returns are equal.

    Args:
        values: float64 [N], of all sampled tokens of the step.
        returns: float64 [N].
    """
    spread = float(np.var(returns))
    return {"critic/explained_variance": 1 - float(np.var(returns - values)) / spread} if spread else {}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _with_values(trajectory: Trajectory, values: np.ndarray) -> Trajectory:
    """A copy whose turns have their part of the values, float32 [n], before its sampled tokens."""
    turns, start = [], 0
    for turn in trajectory.turns:
        turns.append(replace(turn, values=values[start : start + len(turn.token_ids)]))
        start += len(turn.token_ids)
    return replace(trajectory, turns=turns)
