"""The functions that the learner minimises: policy loss with KL and entropy terms, and supervised loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.random import Generator

from calibadv_jax.config import Config, DemonstrationsConfig, LossConfig, TeacherConfig
from calibadv_jax.learner.batch_factors import LOG_RATIO_LIMIT, TrainedTokens
from calibadv_jax.learner.batching import Arrays, Batch, Sample
from calibadv_jax.learner.losses import (
    Loss,
    Tokens,
    find_loss,
    segment_maxima,
    segment_means,
    segment_sums,
)

KL_LIMIT = 10.0  # The low-variance estimate of the KL divergence is clipped to ± this.
# Metrics that are sums over the trained tokens, whatever their weights in the loss; see `PolicyLoss`.
TOKEN_METRICS = {
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/sampler_mismatch",
    "actor/sampler_masked",
    "teacher/kl",
    "teacher/guided_share",
}

Metrics = dict[str, Array]
# (log-probabilities [R, L], entropies [R, L], batch, reference log-probabilities [R, L] or None)
# -> (loss [], metrics)
LossFunction = Callable[[Array, Array, Batch, Any], tuple[Array, Metrics]]


# --- Importance correction between the sampling and the trained policy ---


def importance_correction(
    terms: Array, gap: Array, tokens: Tokens, config: LossConfig
) -> tuple[Array, Array | None]:
    """Apply truncated and masked importance weights.

    The weight of a token is w = exp(gap), or its sequence's product or geometric mean. A term is multiplied
    by min(w, `importance_cap`). It becomes 0 where w is outside [`importance_low`, `importance_high`] or the
    mismatch of learner and sampler exceeds `reject_above`. All three together are IcePop.

    Args:
        terms: of the policy loss, float32 [R, L].
        gap: learner's less sampler's log-probabilities, float32 [R, L].
        tokens: the rows.
        config: keys `importance_…` and `reject_…`.

    Returns:
        The terms, and which tokens are masked, bool [R, L], or None if the config masks none. Masked tokens
        stay in the mean as 0.
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
        # The objective -terms is weighted, then negated: XLA fuses both signs away.
        terms = -(-terms * jnp.minimum(weight, config.importance_cap))
    if not config.masks_by_mismatch:
        return terms, None
    is_masked = weight < config.importance_low
    if config.importance_high > 0:
        is_masked = is_masked | (weight > config.importance_high)
    if config.reject_by != "none":
        is_masked = is_masked | (_mismatch(gap, tokens, config) > config.reject_above)
    return jnp.where(is_masked, 0.0, terms), is_masked


def _mismatch(gap: Array, tokens: Tokens, config: LossConfig) -> Array:
    """Return the distance of learner and sampler that `reject_above` bounds, float32 [R, L].

    k2: gap² / 2; k3: exp(gap) - 1 - gap; of each token, or its sequence's sum, mean or maximum.
    """
    gap = jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distance = 0.5 * gap**2 if config.reject_by == "k2" else jnp.exp(gap) - 1.0 - gap
    distance = jnp.where(tokens.trained, distance, 0.0)
    if config.reject_over == "sequence_mean":
        return segment_means(distance, tokens)
    if config.reject_over == "sequence_sum":
        return segment_sums(distance, tokens.segment_ids)
    if config.reject_over == "sequence_max":
        return segment_maxima(distance, tokens.segment_ids)
    return distance


# --- Estimators of the KL divergence to the reference policy ---
# Each takes d, the log-probability under the reference less that under the policy, float32 [R, L], of tokens
# that the policy sampled, and estimates KL(policy || reference) for each token. J. Schulman compares k1, k2
# and k3 in "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. The bias that is named below
# is that of the value. As a term of the loss, an estimate is differentiated with the tokens fixed: on policy,
# the expected gradient of k1 is then 0, and that of k2 is the gradient of the KL divergence.


def k1_kl(difference: Array) -> Array:
    """Return Schulman's k1: -d.

    It is unbiased, but has a high variance, and is negative for half of the tokens.

    Args:
        difference: d, float32 [R, L].

    Returns:
        Estimates in nats, float32 [R, L].
    """
    return -difference


def absolute_kl(difference: Array) -> Array:
    """Return |d|.

    It is biased upwards: it is of first order in d, where the KL divergence is of second order.

    Args:
        difference: d, float32 [R, L].

    Returns:
        Estimates in nats, float32 [R, L].
    """
    return jnp.abs(difference)


def k2_kl(difference: Array) -> Array:
    """Return Schulman's k2: d² / 2.

    It has a low variance, and its bias is small where the policies are close.

    Args:
        difference: d, float32 [R, L].

    Returns:
        Estimates in nats, float32 [R, L].
    """
    return 0.5 * difference**2


def k3_kl(difference: Array) -> Array:
    """Return Schulman's k3: exp(d) - d - 1.

    It is unbiased and never negative, with a low variance. d is clipped to ±LOG_RATIO_LIMIT and the estimate
    to ±KL_LIMIT, as in verl, which adds a bias for tokens that the reference finds far likelier or less
    likely.

    Args:
        difference: d, float32 [R, L].

    Returns:
        Estimates in nats, float32 [R, L].
    """
    difference = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -KL_LIMIT, KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "kl": k1_kl,
    "abs": absolute_kl,
    "mse": k2_kl,
    "low_var_kl": k3_kl,
}


# --- The teacher: on-policy distillation ---
# The teacher's log-probabilities are those of the tokens that the policy sampled, so that k1 of the reverse
# KL divergence KL(policy || teacher) is lp less the teacher's. On policy, both forms below with their
# defaults have the same gradient: that of lp, times w (lp - teacher).

NO_TEACHER = TeacherConfig()


def teacher_advantages(batch: Batch, old_logprobs: Array, config: TeacherConfig) -> Array:
    """Return the advantages, with the teacher's part if it acts on them: A + w clip(teacher - old).

    Source: "On-Policy Distillation", https://thinkingmachines.ai/blog/on-policy-distillation; the idea is
    that of GKD, arXiv 2306.13649.

    Args:
        batch: packed rows, with w in `teacher_weights`; without them its advantages are returned.
        old_logprobs: log-probabilities in the denominator of the ratio, float32 [R, L]; not differentiated.
        config: section `teacher`; `clip` bounds the difference, in nats.

    Returns:
        float32 [R, L].
    """
    if batch.teacher_weights is None or config.acts_on != "advantage":
        advantages: Array = batch.advantages
        return advantages
    difference = batch.teacher_logprobs - jax.lax.stop_gradient(old_logprobs)
    return batch.advantages + batch.teacher_weights * jnp.clip(difference, -config.clip, config.clip)


def teacher_terms(batch: Batch, logprobs: Array, config: TeacherConfig) -> Array:
    """Return the terms of the reverse KL divergence to the teacher: w times `config.estimator`'s estimate.

    Args:
        batch: packed rows, with w in `teacher_weights`.
        logprobs: under the current policy, float32 [R, L].
        config: section `teacher`. A difference of the log-probabilities beyond `clip` nats counts as `clip`,
            in the value and in the size of the gradient, which does not vanish there.

    Returns:
        Terms to minimise, float32 [R, L]; 0 where w is 0.
    """
    difference = batch.teacher_logprobs - logprobs
    excess = difference - jnp.clip(difference, -config.clip, config.clip)
    difference = difference - jax.lax.stop_gradient(excess)
    return batch.teacher_weights * KL_ESTIMATORS[config.estimator](difference)


# --- Demonstrations ---

NO_DEMONSTRATIONS = DemonstrationsConfig()


def shaped_terms(logprobs: Array, advantages: Array, gamma: float) -> Array:
    """Return LUFFY's terms: -A p / (p + gamma), where p is the probability of the token; arXiv 2504.14945.

    The probability under whoever wrote the demonstration is unknown, and counts as 1. The gradient is that of
    lp, times -A p gamma / (p + gamma)^2: largest at p = gamma, where plain p would favour likely tokens.

    Args:
        logprobs: under the current policy, float32 [R, L].
        advantages: A, float32 [R, L].
        gamma: above 0.

    Returns:
        Terms to minimise, float32 [R, L].
    """
    # p / (p + gamma), written so that it is stable for small p.
    return -advantages * jax.nn.sigmoid(logprobs - jnp.log(gamma))


# --- The policy's loss ---


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of `loss.name` with an advantage for each token, and the KL and entropy terms.

    Attributes:
        config: section `loss` of a config.
        on_policy: whether the denominator of the ratio is the current policy itself; see `on_policy_only`.
        definition: formula and needs of the loss.
        teacher: section `teacher` of a config; read where the rows have a teacher.
        demonstrations: section `demonstrations` of a config; read where the rows have demonstrations.
    """

    config: LossConfig
    on_policy: bool
    definition: Loss
    teacher: TeacherConfig = NO_TEACHER
    demonstrations: DemonstrationsConfig = NO_DEMONSTRATIONS

    @property
    def recomputes(self) -> bool:
        """Whether the ratio divides by the learner's probabilities before the step's first update."""
        return self.config.old_logprobs == "recompute" and not self.on_policy

    def has_gradient(self, sample: Sample) -> bool:
        """Return whether a sample can change the gradient.

        Args:
            sample: of a step.

        Returns:
            Whether a trained token has an advantage other than 0, or a teacher. If the loss has a KL or
            entropy term, or needs `every_sample`, whether any token is trained.
        """
        has_other_terms = self.config.kl_coef or self.config.entropy_coef or self.definition.every_sample
        if has_other_terms:
            return bool(sample.mask.any())
        if sample.teacher_weights is not None and np.any(sample.teacher_weights[sample.mask]):
            return True
        return bool(np.any(sample.advantages[sample.mask]))

    def factors(
        self,
        samples: Sequence[Sample],
        weights: Arrays,
        logprobs: Arrays | None,
        rng: Generator,
    ) -> list[np.ndarray] | None:
        """Return the factor of each token from statistics of the mini-batch.

        Args:
            samples: of the mini-batch, with at least one trained token.
            weights: of each token in the loss, float32 [T] for each sample.
            logprobs: under the current policy, float32 [T] for each sample; None: the old ones.
            rng: for losses that draw tokens.

        Returns:
            float32 [T] for each sample, 0 where a token is not trained; None if the loss has no factors.
        """
        batch_factor = self.definition.batch_factor
        if batch_factor is None:
            return None
        denominators = [sample.denominator for sample in samples]
        if logprobs is None:
            logprobs = denominators
        old_logprobs = logprobs if self.on_policy else denominators
        mask = np.concatenate([sample.mask for sample in samples])

        def trained_tokens(arrays: Arrays) -> np.ndarray:
            """Return the values of the mini-batch's trained tokens, float64 [N]."""
            return np.concatenate(arrays)[mask].astype(np.float64)

        trained = TrainedTokens(
            advantages=trained_tokens([sample.advantages for sample in samples]),
            weights=trained_tokens(weights),
            logprobs=trained_tokens(logprobs),
            old_logprobs=trained_tokens(old_logprobs),
        )
        factors = np.zeros(len(mask), np.float32)
        factors[mask] = batch_factor(trained, self.config, rng)
        ends = np.cumsum([len(sample.tokens) for sample in samples])
        return np.split(factors, ends)[:-1]

    def __call__(
        self,
        logprobs: Array,
        entropies: Array,
        batch: Batch,
        reference: Array | None,
    ) -> tuple[Array, Metrics]:
        """Compute the loss of packed rows: the sum of weights * (term - entropy bonus + KL term + teacher).

        The teacher is part of the advantages or a term of its own, see `teacher_advantages` and
        `teacher_terms`. A demonstration has the same terms as other trajectories, or those of
        `shaped_terms`, and no KL term, whose estimators hold for sampled tokens only.

        Args:
            logprobs: of the targets under the current policy, float32 [R, L].
            entropies: float32 [R, L].
            batch: the rows.
            reference: log-probabilities under the reference policy, float32 [R, L]; None: no KL term.

        Returns:
            The loss, float32 [], and metrics, also []: sums of weighted token values, or, for TOKEN_METRICS,
            sums over the trained tokens.
        """
        config = self.config
        old_logprobs = jax.lax.stop_gradient(logprobs) if self.on_policy else batch.old_logprobs
        log_ratio = jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        tokens = Tokens(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            log_ratio=log_ratio,
            advantages=teacher_advantages(batch, old_logprobs, self.teacher),
            trained=batch.weights > 0,
            segment_ids=batch.segment_ids,
            factors=batch.factors,
        )
        policy_terms, is_clipped = self.definition.terms(tokens, config)
        is_demonstrated = None if batch.demonstrated is None else batch.demonstrated > 0
        if is_demonstrated is not None and self.demonstrations.importance == "shaped":
            shaped = shaped_terms(logprobs, tokens.advantages, self.demonstrations.gamma)
            policy_terms = jnp.where(is_demonstrated, shaped, policy_terms)
            is_clipped = is_clipped & ~is_demonstrated
        gap = jax.lax.stop_gradient(old_logprobs - batch.sampler_logprobs)
        policy_terms, is_masked = importance_correction(policy_terms, gap, tokens, config)
        terms = policy_terms
        # With a coefficient of 0 the gradient of the entropies would still be computed.
        if config.entropy_coef > 0:
            terms = terms - config.entropy_coef * entropies
        values = {
            "actor/pg_loss": policy_terms,
            "actor/entropy": entropies,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac": is_clipped,
            "actor/sampler_mismatch": jnp.abs(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)),
        }
        if is_masked is not None:
            values["actor/sampler_masked"] = is_masked
        if reference is not None:
            divergence = KL_ESTIMATORS[config.kl_estimator](reference - logprobs)
            if is_demonstrated is not None:
                divergence = jnp.where(is_demonstrated, 0.0, divergence)
            terms = terms + config.kl_coef * divergence
            values["actor/kl_loss"] = divergence
        if batch.teacher_weights is not None:
            is_guided = batch.teacher_weights > 0
            values["teacher/guided_share"] = is_guided
            values["teacher/kl"] = jnp.where(is_guided, old_logprobs - batch.teacher_logprobs, 0.0)
            if self.teacher.acts_on == "loss":
                teaching = teacher_terms(batch, logprobs, self.teacher)
                terms = terms + teaching
                values["teacher/loss"] = teaching
        metrics: Metrics = {}
        for name, value in values.items():
            if name in TOKEN_METRICS:
                metrics[name] = jnp.sum(jnp.where(tokens.trained, value, 0.0))
            else:
                metrics[name] = jnp.sum(batch.weights * value)
        return jnp.sum(batch.weights * terms), metrics


def on_policy_only(loss: LossConfig, minibatch_size: int, epochs: int) -> bool:
    """Return whether every rollout gets exactly one update, so that old and current policy are the same.

    Args:
        loss: section `loss`; `old_logprobs` is read.
        minibatch_size: trajectories of an update; 0: all of the step.
        epochs: passes over the trajectories of a step.

    Returns:
        True if one update follows the recomputation of the old log-probabilities.
    """
    return loss.old_logprobs == "recompute" and minibatch_size == 0 and epochs == 1


def policy_gradient(
    config: LossConfig,
    on_policy: bool,
    teacher: TeacherConfig = NO_TEACHER,
    demonstrations: DemonstrationsConfig = NO_DEMONSTRATIONS,
) -> PolicyLoss:
    """Return the loss of a section `loss`.

    Args:
        config: the section.
        on_policy: see `on_policy_only`.
        teacher: section `teacher`.
        demonstrations: section `demonstrations`.

    Returns:
        The loss. Each call returns a new object, for which a learner compiles a program.

    Raises:
        UserError: if a loss of the user's own cannot be imported.
    """
    definition = find_loss(config.name, tuple(config.args))
    return PolicyLoss(config, on_policy, definition, teacher, demonstrations)


def policy_loss(config: Config) -> PolicyLoss:
    """Return the loss of a config.

    Args:
        config: of the run; sections `loss`, `teacher`, `demonstrations` and `learner` are read.

    Returns:
        The loss, as `policy_gradient`.

    Raises:
        UserError: as `policy_gradient`.
    """
    on_policy = on_policy_only(config.loss, config.learner.minibatch_size, config.learner.epochs)
    return policy_gradient(config.loss, on_policy, config.teacher, config.demonstrations)


# --- The supervised loss ---


def negative_log_likelihood(
    logprobs: Array, entropies: Array, batch: Batch, reference: Array | None
) -> tuple[Array, Metrics]:
    """Compute the loss of supervised fine-tuning: the mean of -lp, in nats a token.

    Args:
        logprobs: of the targets, float32 [R, L].
        entropies: float32 [R, L].
        batch: the rows. Their weights make the sum a mean.
        reference: not used.

    Returns:
        The loss, float32 [], and the metric ``sft/entropy``, the mean entropy in nats.
    """
    loss = -jnp.sum(batch.weights * logprobs)
    return loss, {"sft/entropy": jnp.sum(batch.weights * entropies)}
