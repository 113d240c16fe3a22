"""The functions that the learner minimises: sums of `batch.weights` times a term of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Batch, Sample
from calibadv_jax.learner.losses.corrections import corrected
from calibadv_jax.learner.losses.looks import LOG_RATIO_LIMIT, Trained
from calibadv_jax.learner.losses.registry import Loss, find_loss
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


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of `loss.name` with advantages given per token, and the KL and entropy terms.

    Called by the learner's programs with log-probabilities [R, L], entropies [R, L], the batch, and the
    reference policy's log-probabilities (or None), it returns the loss, and metrics. The terms of the loss
    are sums of weighted token values, those of TOKEN_METRICS sums over the trained tokens of the batch,
    which their number divides.
    """

    config: LossConfig
    on_policy: bool  # the ratio's denominator is the current policy itself
    named: Loss

    @property
    def recomputes(self) -> bool:
        """Whether the ratio divides by the learner's probabilities before the step's first update."""
        return self.config.old_logprobs == "recompute" and not self.on_policy

    def is_moved_by(self, sample: Sample) -> bool:
        """False where the sample's gradient is zero: no advantage, and no other term of the loss."""
        if self.config.kl_coef or self.config.entropy_coef or self.named.every_sample:
            return bool(sample.mask.any())
        return bool(np.any(sample.advantages[sample.mask]))

    def factors(
        self,
        samples: Sequence[Sample],
        weights: Sequence[np.ndarray],
        logprobs: Sequence[np.ndarray] | None,
        rng: np.random.Generator,
    ) -> list[np.ndarray] | None:
        """The factor of every token, float32 [T] a sample, from the loss's look at the whole mini-batch.

        Args:
            logprobs: of the current policy, float32 [T] a sample; None: those that the ratio divides by.
            rng: of losses that draw.

        Returns:
            None where the loss has no look.
        """
        if self.named.look is None:
            return None
        factors = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
        if not any(sample.mask.any() for sample in samples):
            return factors
        old = [s.logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
        new = old if logprobs is None else logprobs

        def joined(values: Sequence[np.ndarray]) -> np.ndarray:
            pairs = zip(samples, values, strict=True)
            return np.concatenate([one[sample.mask] for sample, one in pairs]).astype(np.float64)

        advantages = joined([sample.advantages for sample in samples])
        trained = Trained(advantages, joined(weights), joined(new), joined(new if self.on_policy else old))
        found = self.named.look(trained, self.config, rng)
        start = 0
        for sample, values in zip(samples, factors, strict=True):
            count = int(sample.mask.sum())
            values[sample.mask] = found[start : start + count]
            start += count
        return factors

    def __call__(
        self, logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
    ) -> tuple[jax.Array, Metrics]:
        config = self.config
        old = jax.lax.stop_gradient(logprobs) if self.on_policy else batch.old_logprobs
        log_ratio = jnp.clip(logprobs - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        trained = batch.weights > 0
        tokens = Tokens(logprobs, old, log_ratio, batch.advantages, trained, batch.segment_ids, batch.factors)
        policy_terms, clipped = self.named.terms(tokens, config)
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


def policy_gradient(config: LossConfig, on_policy: bool) -> PolicyLoss:
    """The loss of a config.

    Args:
        on_policy: see `learner.on_policy_only`; it saves the pass that would recompute the denominator.

    Raises:
        UserError: an own loss cannot be imported, or has another signature.
    """
    return PolicyLoss(config, on_policy, find_loss(config.name))


def negative_log_likelihood(
    logprobs: jax.Array, entropies: jax.Array, batch: Batch, reference: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    """Supervised fine-tuning: mean negative log-probability (nats a token)."""
    loss = -jnp.sum(batch.weights * logprobs)
    return loss, {"sft/entropy": jnp.sum(batch.weights * entropies)}
