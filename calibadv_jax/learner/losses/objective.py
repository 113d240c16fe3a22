"""The functions that the learner minimises: sums of `batch.weights` times a term of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Batch
from calibadv_jax.learner.losses.corrections import corrected
from calibadv_jax.learner.losses.looks import LOG_RATIO_LIMIT
from calibadv_jax.learner.losses.registry import find_loss
from calibadv_jax.learner.losses.tokens import Tokens

KL_LIMIT = 10.0
# What is reported of the tokens, whatever the weights of the loss; see `policy_gradient`.
TOKEN_METRICS = frozenset(
    f"actor/{name}" for name in ("entropy", "ppo_kl", "pg_clipfrac", "sampler_mismatch", "sampler_masked")
)

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
    """The loss of `loss.name` with advantages given per token, and the KL and entropy terms.

    Args:
        on_policy: the ratio's denominator is the current policy itself (first and only update on its
            own samples), which saves the pass that would recompute it.

    Returns:
        A function of log-probabilities [R, L], entropies [R, L], the batch, and the reference policy's
        log-probabilities (or None): the loss, and metrics. The terms of the loss are sums of weighted token
        values, those of TOKEN_METRICS sums over the trained tokens of the batch, which their number divides.

    Raises:
        UserError: an own loss cannot be imported, or has another signature.
    """
    token_loss = find_loss(config.name).terms

    def loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        old = jax.lax.stop_gradient(logprobs) if on_policy else batch.old_logprobs
        log_ratio = jnp.clip(logprobs - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        trained = batch.weights > 0
        tokens = Tokens(logprobs, old, log_ratio, batch.advantages, trained, batch.segment_ids, batch.factors)
        policy_terms, clipped = token_loss(tokens, config)
        gap = jax.lax.stop_gradient(old - batch.sampler_logprobs)
        policy_terms, masked = corrected(policy_terms, gap, tokens, config)
        terms = policy_terms
        if config.entropy_coef > 0:  # 0 times the entropies would still cost the gradient of them
            terms = terms - config.entropy_coef * entropies
        values = {
            "actor/pg_loss": policy_terms,
            "actor/entropy": entropies,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac": clipped,
            "actor/sampler_mismatch": jnp.abs(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)),
        }
        if masked is not None:
            values["actor/sampler_masked"] = masked
        if reference is not None:
            divergence = KL_ESTIMATORS[config.kl_estimator](reference - logprobs)
            terms = terms + config.kl_coef * divergence
            values["actor/kl_loss"] = divergence
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
