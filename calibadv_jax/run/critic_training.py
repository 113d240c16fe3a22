"""The critic of PPO: its values before a step's update, and its own update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.advantages.gae import critic_values, gae_and_returns
from calibadv_jax.config import Config
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.learner.critic import ValueLoss, critic_learner, critic_params, learn_values, value_sample
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.optimizer import run_schedule
from calibadv_jax.learner.step import make_sample, sample_logprobs
from calibadv_jax.policy.transformer import Params
from calibadv_jax.run.model import Model


class Critic:
    """The value model of a run, its learner and its train state.

    Args:
        config: The run's config.
        model: The policy without parameters, its tokenizer and its mesh.
        params: Parameters of the policy that the run begins with, from which the value model starts. The
            trained ones are donated. None: the state is restored from a checkpoint.
    """

    def __init__(self, config: Config, model: Model, params: Params | None):
        self.config = config
        self.schedule = run_schedule(config, config.critic.optimizer)
        self.learner = critic_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = ValueLoss(config.critic.clip)
        self.state: State = {}
        if params is not None:
            self.state = self.learner.init(critic_params(self.learner.policy, params, model.mesh))

    def with_values(self, groups: Sequence[Group]) -> list[Group]:
        """Compute the critic's values of the sampled tokens.

        Args:
            groups: The groups of the step.

        Returns:
            Copies of the groups whose turns have `values`, float32 [sampled tokens of the turn].
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        values = self._values(trajectories)
        valued_groups = []
        start = 0
        for group in groups:
            end = start + len(group.trajectories)
            valued = [
                _with_values(trajectory, trajectory_values)
                for trajectory, trajectory_values in zip(group.trajectories, values[start:end], strict=True)
            ]
            valued_groups.append(replace(group, trajectories=valued))
            start = end
        return valued_groups

    def _values(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return the values of each trajectory's sampled tokens, float32 [sampled tokens]."""
        values = [np.zeros(0, np.float32) for _ in trajectories]
        places = []  # of the trajectories with a sampled token; the others are not computed
        samples = []
        for place, trajectory in enumerate(trajectories):
            sample = make_sample(trajectory, np.zeros(len(trajectory.mask), np.float32))
            if sample.mask.any():
                places.append(place)
                samples.append(sample)
        if samples:
            rows = sample_logprobs(self.learner, self.state["params"], samples, self.config.learner)
            for place, sample, row in zip(places, samples, rows, strict=True):
                values[place] = row[sample.mask]
        return values

    def train_step(self, groups: Sequence[Group], rng: np.random.Generator) -> dict[str, float]:
        """Train the critic on the returns of the scored groups.

        Args:
            groups: The scored groups, with the critic's values.
            rng: Orders the mini-batches.

        Returns:
            The metrics of the update, and how well the values before it predicted the returns. Empty if no
            token was sampled.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        values = [critic_values(trajectory) for trajectory in trajectories]
        returns = [gae_and_returns(trajectory, self.config.advantage)[1] for trajectory in trajectories]
        samples = [
            value_sample(trajectory, trajectory_values, trajectory_returns)
            for trajectory, trajectory_values, trajectory_returns in zip(
                trajectories, values, returns, strict=True
            )
        ]
        rate = float(self.schedule(int(self.state["updates"])))
        self.state, learned = learn_values(
            self.learner, self.state, samples, self.config.learner, self.loss, rng
        )
        if not learned:
            return {}
        metrics = {"critic/lr": rate}
        metrics.update(learned)
        metrics["critic/finite"] = float(self.learner.is_finite(self.state["params"]))
        all_values = np.concatenate(values).astype(np.float64)  # [sampled tokens]
        all_returns = np.concatenate(returns)  # float64 [sampled tokens]
        metrics.update(_fit_metrics(all_values, all_returns))
        return metrics


def _with_values(trajectory: Trajectory, values: np.ndarray) -> Trajectory:
    """Split the values, float32 [sampled tokens], among copies of the turns."""
    turns = []
    start = 0
    for turn in trajectory.turns:
        end = start + len(turn.token_ids)
        turns.append(replace(turn, values=values[start:end]))
        start = end
    return replace(trajectory, turns=turns)


def _fit_metrics(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Return statistics of values and returns, float64 [sampled tokens], and the explained variance."""
    metrics: dict[str, float] = {}
    for name, array in (("values", values), ("returns", returns)):
        metrics[f"critic/{name}/mean"] = float(array.mean())
        metrics[f"critic/{name}/max"] = float(array.max())
        metrics[f"critic/{name}/min"] = float(array.min())
    variance = float(np.var(returns))
    if variance:
        metrics["critic/explained_variance"] = 1 - float(np.var(returns - values)) / variance
    return metrics
