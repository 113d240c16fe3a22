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
from calibadv_jax.learner.objective import Metrics
from calibadv_jax.learner.optimizer import make_optimizer
from calibadv_jax.learner.step import make_sample, mini_batches, pack_rows
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.transformer import CriticDecoder, Params, Policy

VALUE_HEAD = "value_head"  # name of the critic's head among the parameters


class CriticLearner(Learner):
    """Trains a critic: the value before a target takes the place of its log-probability."""

    metrics_prefix = "critic"

    def _values(self, base: Params, params: Params, batch: Batch, used: Any = None) -> tuple[Array, Array]:
        """Return the values before the targets, float32 [R, L], and zeros in place of entropies."""
        critic = self.policy.merge(merge_params(base, params))
        assert isinstance(critic, CriticDecoder)
        values = critic.values(target_hidden_states(critic, batch))
        return values, jnp.zeros_like(values)


def make_critic(policy: Policy) -> Policy:
    """Return a critic of the policy's shape.

    Args:
        policy: gives architecture, numerics and adapters.

    Returns:
        A decoder with a value head in place of the output head. It has the policy's adapters, if there are
        any.
    """
    architecture = replace(policy.architecture, tie_word_embeddings=True)  # no output head of its own
    return Policy(architecture, policy.numerics, policy.adapters, CriticDecoder)


def critic_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> CriticLearner:
    """Return the learner of a policy's critic.

    Args:
        config: of the run.
        policy: the policy, which gives the critic's shape.
        mesh: the devices.
        schedule: learning rate of the critic by update.

    Returns:
        A learner without state; see `Learner.init`.

    Raises:
        UserError: as `LearnerOptions.check`.
    """
    options = LearnerOptions.from_config(config, config.critic.optimizer)
    optimizer = make_optimizer(config.critic.optimizer, schedule)
    return CriticLearner(make_critic(policy), optimizer, mesh, options)


def critic_params(critic: Policy, params: Params, mesh: Mesh) -> Params:
    """Return the first parameters of a critic: those of a policy, and a value head of zeros.

    Args:
        critic: from `make_critic`.
        params: all parameters of the policy, in their shardings.
        mesh: the devices.

    Returns:
        Nested parameters of the critic. They share the policy's arrays.
    """
    results = {name: params[name] for name in critic.abstract_params if name != VALUE_HEAD}
    zeros = optax.tree.zeros_like(critic.abstract_params[VALUE_HEAD])
    sharding = param_shardings(critic.abstract_params, mesh)[VALUE_HEAD]
    results[VALUE_HEAD] = jax.device_put(zeros, sharding)
    return results


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """The critic's loss: half the larger squared error of the value and of the clipped value.

    0.5 * max((v - R)², (clip(v, v_old - c, v_old + c) - R)²), with R the return (in `Batch.advantages`), v
    the value, v_old the value before the step (in `Batch.old_logprobs`) and c the clip range. Source:
    verl.trainer.ppo.core_algos.

    Attributes:
        clip: c; 0: no clip.
    """

    clip: float

    def __call__(self, values: Array, _: Array, batch: Batch, reference: Any) -> tuple[Array, Metrics]:
        """Return the weighted sum of the terms, and the share of clipped tokens.

        Args:
            values: float32 [R, L], before each target.
            _: not used.
            batch: packed rows [R, L].
            reference: not used.

        Returns:
            The loss, float32 [], and the metric ``critic/clipfrac``, the sum of the weights of the clipped
            tokens.
        """
        error = (values - batch.advantages) ** 2
        is_clipped = jnp.zeros(error.shape, bool)
        if self.clip > 0:
            clipped_values = jnp.clip(values, batch.old_logprobs - self.clip, batch.old_logprobs + self.clip)
            clipped_error = (clipped_values - batch.advantages) ** 2
            is_clipped = clipped_error > error
            error = jnp.maximum(error, clipped_error)
        loss = 0.5 * jnp.sum(batch.weights * error)
        return loss, {"critic/clipfrac": jnp.sum(batch.weights * is_clipped)}


def value_sample(trajectory: Trajectory, values: np.ndarray, returns: np.ndarray) -> Sample:
    """Return the sample that a critic is trained on.

    Args:
        trajectory: with n sampled tokens.
        values: before each sampled token, under the critic before the step, [n].
        returns: of each sampled token, [n].

    Returns:
        A sample with the returns in `advantages` and the values in `old_logprobs`, both 0 where a token was
        not sampled.
    """
    sample = make_sample(trajectory, np.zeros(len(trajectory.mask)))
    sample.advantages[sample.mask] = returns
    old_values = np.zeros_like(sample.advantages)
    old_values[sample.mask] = values
    return replace(sample, old_logprobs=old_values)


def learn_values(
    learner: Learner,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss: ValueLoss,
    rng: np.random.Generator,
) -> tuple[State, dict[str, float]]:
    """Train a critic on a step's samples, in mini-batches.

    Args:
        learner: of the critic.
        state: of the critic; donated.
        samples: from `value_sample`.
        config: section `learner`, for mini-batches and epochs.
        loss: the critic's.
        rng: draws the order of the samples.

    Returns:
        The new state, and means of the metrics over the updates; no metrics if there was no update.

    Raises:
        ValueError: if a sample is longer than a row.
    """
    history: list[dict[str, float]] = []
    for chosen in mini_batches(samples, config, rng):
        members = [samples[index] for index in chosen]
        rows = pack_rows(learner, members, config, token_weights(members, "token_mean"))
        state, metrics = learner.update(state, rows.batches(), loss)
        history.append(metrics)
    if not history:
        return state, {}
    means: dict[str, float] = {}
    for name in history[0]:
        total = math.fsum(metrics[name] for metrics in history)
        means[name] = total / len(history)
    means["critic/updates"] = float(len(history))
    return state, means
