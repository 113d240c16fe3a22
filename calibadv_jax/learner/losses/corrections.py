"""Weights for tokens that another policy sampled than the one that is trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.losses.looks import LOG_RATIO_LIMIT
from calibadv_jax.learner.losses.tokens import Tokens, segment_maxima, segment_means, segment_sums


def corrected(
    terms: jax.Array, gap: jax.Array, tokens: Tokens, config: LossConfig
) -> tuple[jax.Array, jax.Array | None]:
    """The terms with truncated and masked importance weights; all stay in the mean, masked ones as 0.

    Args:
        gap: learner's less sampler's log-probabilities, float32 [R, L].

    Returns:
        The terms, and which tokens are masked; None where the config masks none.
    """
    if config.importance_cap == 0 and not config.masks_by_mismatch:
        return terms, None
    log_weight = gap
    if config.importance_level == "sequence":
        log_weight = segment_sums(jnp.where(tokens.trained, gap, 0.0), tokens.segment_ids)
    elif config.importance_level == "sequence_geometric":
        log_weight = segment_means(gap, tokens)
    weight = jnp.exp(jnp.clip(log_weight, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if config.importance_cap > 0:
        # The objective is weighted, and negated then: XLA then fuses both signs away.
        terms = -(-terms * jnp.minimum(weight, config.importance_cap))
    if not config.masks_by_mismatch:
        return terms, None
    masked = weight < config.importance_low
    if config.importance_high > 0:
        masked = masked | (weight > config.importance_high)
    if config.reject_by != "none":
        masked = masked | (_distance(gap, tokens, config) > config.reject_above)
    return jnp.where(masked, 0.0, terms), masked


def _distance(gap: jax.Array, tokens: Tokens, config: LossConfig) -> jax.Array:
    """What `reject_above` is compared with at each token, float32 [R, L]."""
    gap = jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    each = 0.5 * gap**2 if config.reject_by == "k2" else jnp.exp(gap) - 1.0 - gap
    each = jnp.where(tokens.trained, each, 0.0)
    return {
        "token": lambda: each,
        "sequence_sum": lambda: segment_sums(each, tokens.segment_ids),
        "sequence_mean": lambda: segment_means(each, tokens),
        "sequence_max": lambda: segment_maxima(each, tokens.segment_ids),
    }[config.reject_over]()
