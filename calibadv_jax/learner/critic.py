"""The critic of PPO: a value at every token of a trajectory, and how it is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from calibadv_jax.config import Config, LearnerConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.learner.batching import Batch, Sample, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, State, target_hidden_states
from calibadv_jax.learner.losses import Metrics
from calibadv_jax.learner.optimizer import make_optimizer
from calibadv_jax.learner.step import make_sample, mini_batches, packed
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.transformer import CriticDecoder, Params, Policy


class CriticLearner(Learner):
    """Trains a critic: the value before a target stands in place of its log-probability."""

    metrics_of = "critic"

    def _values(self, base: Params, params: Params, batch: Batch, used: Any = None) -> tuple[Array, Array]:
        critic = self.policy.merge(merge_params(base, params))
        assert isinstance(critic, CriticDecoder)
        values = critic.values(target_hidden_states(critic, batch))
        return values, jnp.zeros_like(values)


def critic_of(policy: Policy) -> Policy:
    """Return a critic of the policy's shape, with a value head, and with adapters if the policy has some."""
    architecture = replace(policy.architecture, tie_word_embeddings=True)
    return Policy(architecture, policy.numerics, policy.adapters, CriticDecoder)


def critic_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> CriticLearner:
    """Return the learner of a policy's critic; UserError as `learner.policy_learner`."""
    optimizer = config.critic.optimizer
    options = LearnerOptions.from_config(config, optimizer)
    return CriticLearner(critic_of(policy), make_optimizer(optimizer, schedule), mesh, options)


def critic_params(critic: Policy, params: Params, mesh: Mesh) -> Params:
    """Return a policy's parameters with the head of a critic, in their shardings; no array is copied."""
    shared = {name: params[name] for name in critic.abstract_params if name != "value_head"}
    zeros = optax.tree.zeros_like(critic.abstract_params["value_head"])
    shardings = param_shardings(critic.abstract_params, mesh)["value_head"]
    return shared | {"value_head": jax.device_put(zeros, shardings)}


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """Half the larger squared error of plain and clipped values (returns: advantages, old: old_logprobs)."""

    clip: float  # 0: none

    def __call__(self, values: Array, _: Array, batch: Batch, reference: Any) -> tuple[Array, Metrics]:
        error = (values - batch.advantages) ** 2
        clipped = jnp.zeros(error.shape, bool)
        if self.clip > 0:
            bounded = jnp.clip(values, batch.old_logprobs - self.clip, batch.old_logprobs + self.clip)
            bounded = (bounded - batch.advantages) ** 2
            clipped = bounded > error
            error = jnp.maximum(error, bounded)
        loss = 0.5 * jnp.sum(batch.weights * error)
        return loss, {"critic/clipfrac": jnp.sum(batch.weights * clipped)}


def value_sample(trajectory: Trajectory, values: np.ndarray, returns: np.ndarray) -> Sample:
    """Return a critic's sample, given the sampled tokens' values before the step and returns, both [n]."""
    sample = make_sample(trajectory, np.zeros(len(trajectory.mask)))
    sample.advantages[sample.mask] = returns
    old = np.zeros_like(sample.advantages)
    old[sample.mask] = values
    return replace(sample, old_logprobs=old)


def learn_values(
    learner: Learner,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss: ValueLoss,
    rng: np.random.Generator,
) -> tuple[State, dict[str, float]]:
    """Train on mini-batches of samples; return the new state and means over the updates, if there are any."""
    history: list[dict[str, float]] = []
    for chosen in mini_batches(samples, config, rng):
        members = [samples[index] for index in chosen]
        rows = packed(learner, members, config, token_weights(members, "token_mean"))
        state, metrics = learner.update(state, rows.batches(), loss)
        history.append(metrics)
    if not history:
        return state, {}
    means = {name: math.fsum(metrics[name] for metrics in history) / len(history) for name in history[0]}
    return state, means | {"critic/updates": float(len(history))}
