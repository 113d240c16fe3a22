"""Token losses. Every loss is a sum of `batch.weights` times a per-token term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Batch

LOG_RATIO_LIMIT = 20.0  # as in the CalibAdv authors' code: exp stays finite
KL_LIMIT = 10.0

Metrics = dict[str, jax.Array]
LossFunction = Callable[[jax.Array, jax.Array, Batch, Any], tuple[jax.Array, Metrics]]


@dataclass(frozen=True)
class Loss:
    """A loss, and what it asks of the backward pass.

    Called with log-probabilities [R, L], entropies [R, L], the batch, and the reference policy's
    log-probabilities (or None); returns the loss, and metrics as sums of weighted token values.
    """

    function: LossFunction
    uses_entropy: bool  # False: the entropies are metrics only, and no gradient flows through them

    def __call__(
        self, logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        return self.function(logprobs, entropies, batch, reference)


def _low_variance(difference: jax.Array) -> jax.Array:
    """k3 of Schulman, "Approximating KL divergence": exp(d) - d - 1 with d = reference - policy."""
    difference = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -KL_LIMIT, KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "kl": lambda difference: -difference,
    "abs": jnp.abs,
    "mse": lambda difference: 0.5 * difference**2,
    "low_var_kl": _low_variance,
}


def policy_gradient(config: LossConfig, on_policy: bool) -> Loss:
    """PPO's clipped objective with advantages given per token.

    Args:
        on_policy: the ratio's denominator is the current policy itself (first and only update on its
            own samples), which saves the pass that would recompute it.
    """

    def loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        old = jax.lax.stop_gradient(logprobs) if on_policy else batch.old_logprobs
        log_ratio = jnp.clip(logprobs - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
        objective = jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
        mismatch = jax.lax.stop_gradient(
            jnp.clip(old - batch.sampler_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        )
        if config.importance_cap > 0:
            objective = objective * jnp.minimum(jnp.exp(mismatch), config.importance_cap)
        terms = -objective
        if config.entropy_coef > 0:
            terms = terms - config.entropy_coef * entropies
        values = {
            "actor/pg_loss": -objective,
            "actor/entropy": entropies,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac": (clipped * batch.advantages < ratio * batch.advantages),
            "actor/sampler_mismatch": jnp.abs(mismatch),
        }
        if reference is not None:
            divergence = KL_ESTIMATORS[config.kl_estimator](reference - logprobs)
            terms = terms + config.kl_coef * divergence
            values["actor/kl_loss"] = divergence
        metrics = {name: jnp.sum(batch.weights * value) for name, value in values.items()}
        return jnp.sum(batch.weights * terms), metrics

    return Loss(loss, uses_entropy=config.entropy_coef > 0)


def _negative_log_likelihood(
    logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    loss = -jnp.sum(batch.weights * logprobs)
    return loss, {"sft/entropy": jnp.sum(batch.weights * entropies)}


negative_log_likelihood = Loss(_negative_log_likelihood, uses_entropy=False)
"""Supervised fine-tuning: mean negative log-probability (nats a token)."""
