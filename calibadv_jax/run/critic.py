"""The critic of PPO between the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Critic:
    """The value model, its learner and its state.

    It copies `params`, the policy that the run begins with, and donates the trained ones. None: its state
    comes from a checkpoint.
    """

    def __init__(self, config: Config, model: Model, params: Params | None):
        self.config = config
        self.schedule = schedule_of(config, config.critic.optimizer)
        self.learner = critic_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = ValueLoss(config.critic.clip)
        self.state: State = {}
        if params is not None:
            self.state = self.learner.init(critic_params(self.learner.policy, params, model.mesh))

    def with_values(self, groups: Sequence[Group]) -> list[Group]:
        """Return copies of the groups whose turns have `values`."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        samples = [make_sample(each, np.zeros(len(each.mask), np.float32)) for each in trajectories]
        rows: Iterator[np.ndarray] = iter(())
        if batch := [sample for sample in samples if sample.mask.any()]:
            rows = iter(sample_logprobs(self.learner, self.state["params"], batch, self.config.learner))
        valued = iter(
            _with_values(
                trajectory, next(rows)[sample.mask] if sample.mask.any() else np.zeros(0, np.float32)
            )
            for trajectory, sample in zip(trajectories, samples, strict=True)
        )
        return [replace(group, trajectories=[next(valued) for _ in group.trajectories]) for group in groups]

    def update(self, groups: Sequence[Group], rng: np.random.Generator) -> dict[str, float]:
        """Train on the returns of the scored groups; the metrics say how good the values before it were."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        values = [critic_values(trajectory) for trajectory in trajectories]
        returns = [gae_and_returns(trajectory, self.config.advantage)[1] for trajectory in trajectories]
        samples = [value_sample(*each) for each in zip(trajectories, values, returns, strict=True)]
        rate = float(self.schedule(int(self.state["updates"])))
        self.state, learned = learn_values(
            self.learner, self.state, samples, self.config.learner, self.loss, rng
        )
        if not learned:
            return {}
        learned["critic/finite"] = float(self.learner.is_finite(self.state["params"]))
        before, targets = np.concatenate(values).astype(np.float64), np.concatenate(returns)
        spreads = {
            f"critic/{name}/{statistic}": float(getattr(array, statistic)())
            for name, array in (("values", before), ("returns", targets))
            for statistic in ("mean", "max", "min")
        }
        return {"critic/lr": rate} | learned | spreads | explained(before, targets)


def explained(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Return 1 - variance of (returns - values) / variance of the returns; nothing if they are all equal.

    `values` and `returns`: float64 [N], of all sampled tokens of the step.
    """
    spread = float(np.var(returns))
    return {"critic/explained_variance": 1 - float(np.var(returns - values)) / spread} if spread else {}


def _with_values(trajectory: Trajectory, values: np.ndarray) -> Trajectory:
    """Split the values, float32 [sampled tokens], among copies of the turns."""
    turns, start = [], 0
    for turn in trajectory.turns:
        turns.append(replace(turn, values=values[start : start + len(turn.token_ids)]))
        start += len(turn.token_ids)
    return replace(trajectory, turns=turns)
