"""The critic of PPO between the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.advantages.gae import critic_values, gae_and_returns
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
        batch = [sample for sample in samples if sample.mask.any()]
        params, config = self.state["params"], self.config.learner
        rows = iter(sample_logprobs(self.learner, params, batch, config) if batch else ())
        no_values = np.zeros(0, np.float32)
        values = [next(rows)[sample.mask] if sample.mask.any() else no_values for sample in samples]
        valued = map(_with_values, trajectories, values)
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
        if variance := float(np.var(targets)):
            spreads["critic/explained_variance"] = 1 - float(np.var(targets - before)) / variance
        return {"critic/lr": rate} | learned | spreads


def _with_values(trajectory: Trajectory, values: np.ndarray) -> Trajectory:
    """Split the values, float32 [sampled tokens], among copies of the turns."""
    parts = np.split(values, np.cumsum([len(turn.token_ids) for turn in trajectory.turns]))
    turns = [replace(turn, values=part) for turn, part in zip(trajectory.turns, parts, strict=False)]
    return replace(trajectory, turns=turns)
