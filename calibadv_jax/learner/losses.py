"""Token losses. Every loss is a sum of `batch.weights` times a per-token term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Batch

LOG_RATIO_LIMIT = 20.0  # as in the CalibAdv authors' code: exp stays finite
KL_LIMIT = 10.0
# What is reported of the tokens, whatever the weights of the loss; see `policy_gradient`.
TOKEN_METRICS = frozenset({"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/sampler_mismatch"})

Metrics = dict[str, jax.Array]
LossFunction = Callable[[jax.Array, jax.Array, Batch, Any], tuple[jax.Array, Metrics]]


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


def policy_gradient(config: LossConfig, on_policy: bool) -> LossFunction:
    """PPO's clipped objective with advantages given per token.

    Args:
        on_policy: the ratio's denominator is the current policy itself (first and only update on its
            own samples), which saves the pass that would recompute it.

    Returns:
        A function of log-probabilities [R, L], entropies [R, L], the batch, and the reference policy's
        log-probabilities (or None): the loss, and metrics. The terms of the loss are sums of weighted token
        values, those of TOKEN_METRICS sums over the trained tokens of the batch, which their number divides.
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
        if config.entropy_coef > 0:  # 0 times the entropies would still cost the gradient of them
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
        trained = batch.weights > 0
        metrics = {
            name: jnp.sum(jnp.where(trained, value, 0.0) if name in TOKEN_METRICS else batch.weights * value)
            for name, value in values.items()
        }
        return jnp.sum(batch.weights * terms), metrics

    return loss


def negative_log_likelihood(
    logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    """Supervised fine-tuning: mean negative log-probability (nats a token)."""
    loss = -jnp.sum(batch.weights * logprobs)
    return loss, {"sft/entropy": jnp.sum(batch.weights * entropies)}
