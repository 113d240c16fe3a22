"""Losses of the policy: the sum of `Batch.weights` times a term of each token.

Formulas and sources: docs/losses.md. `config.sections.learner.LOSS_KEYS` lists the keys that each loss reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.random import Generator

from calibadv_jax.config import Config, LossConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.user_functions import failure, import_user_function, is_address
from calibadv_jax.learner.batching import Arrays, Batch, Sample

LOG_RATIO_LIMIT = 20.0  # as in the CalibAdv authors' code: exp stays finite
KL_LIMIT = 10.0
GSPO_LOG_RATIO_LIMIT = 10.0  # upper bound only, as in verl
OTHER_TOKENS_EPSILON = 1e-8  # added to the probability of all other tokens, as in verl
LOG_RATIO_ROUNDING = 1e-5  # two programs of one policy differ by up to this
# Sums over the trained tokens, independent of the weights of the loss; see `PolicyLoss`.
TOKEN_METRICS = {"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"}
TOKEN_METRICS |= {"actor/sampler_mismatch", "actor/sampler_masked"}
EXPECTED = "def my_loss(tokens: Tokens, config: LossConfig) -> tuple[jax.Array, jax.Array]"
RETURNED = "the terms to minimise (float32 [R, L]) and which tokens are clipped (bool [R, L])"

Metrics = dict[str, Array]
LossFunction = Callable[[Array, Array, Batch, Any], tuple[Array, Metrics]]


# --- Tokens ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Packed rows [R, L], float32 unless noted. Sequences lie one after the other in a row."""

    logprobs: Array  # of the current policy: the gradient flows through them
    old_logprobs: Array  # the ratio's denominator
    log_ratio: Array  # logprobs - old_logprobs, clipped to ±LOG_RATIO_LIMIT
    advantages: Array
    trained: Array  # bool; the other columns must have no influence
    segment_ids: Array  # int32, the sequence's number in its row; 0 = padding
    factors: Any  # of the loss's `BatchFactor`; None: it has none

    @property
    def ratio(self) -> Array:
        return jnp.exp(self.log_ratio)

    @property
    def none_clipped(self) -> Array:
        return jnp.zeros(self.trained.shape, bool)


def _over_segments(reduce: Callable[..., Array], values: Array, segment_ids: Array) -> Array:
    """Reduce, with neutral element 0, by a scan: the same order on every device, and rows stay on theirs."""
    edges = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = jnp.ones((len(segment_ids), 1), bool)
    starts, ends = jnp.concatenate([edge, edges], axis=1), jnp.concatenate([edges, edge], axis=1)

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        begins = right[1]
        return jnp.where(begins, right[0], reduce(left[0], right[0])), left[1] | begins

    running, _ = jax.lax.associative_scan(combine, (values, starts), axis=1)
    totals = jnp.where(ends, running, jnp.zeros_like(running))
    spread, _ = jax.lax.associative_scan(combine, (totals, ends), axis=1, reverse=True)
    return spread


# (values, segment_ids) -> the sum or the maximum, of values >= 0, over each token's sequence, at every token
# of it: [R, L].
segment_sums = jax.jit(functools.partial(_over_segments, jnp.add))
segment_maxima = jax.jit(functools.partial(_over_segments, jnp.maximum))


def segment_means(values: Array, tokens: Tokens) -> Array:
    """Return the mean over the trained tokens of each token's sequence; 0 if it has none."""
    count = segment_sums(tokens.trained.astype(jnp.float32), tokens.segment_ids)
    total = segment_sums(jnp.where(tokens.trained, values, 0.0), tokens.segment_ids)
    return total / jnp.maximum(count, 1.0)


# --- Statistics of the whole mini-batch ---


@dataclass(frozen=True)
class TrainedTokens:
    """The trained tokens of a mini-batch's samples, one after the other; float64 [N], N at least 1."""

    advantages: np.ndarray
    weights: np.ndarray
    logprobs: np.ndarray  # of the current policy; `old_logprobs` unless the loss `needs_logprobs`
    old_logprobs: np.ndarray  # the ratio's denominator

    @property
    def ratio(self) -> np.ndarray:
        return np.exp(np.clip(self.logprobs - self.old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    @property
    def covariance(self) -> np.ndarray:
        """Each token's share of the covariance of advantage and log-probability, which moves the entropy."""
        return (self.advantages - self.advantages.mean()) * (self.logprobs - self.logprobs.mean())

    @property
    def has_both_signs(self) -> bool:
        return bool((self.advantages > 0).any() and (self.advantages < 0).any())


# A factor of each token, float64 [N], from statistics of the whole mini-batch: computed on the host, so that
# neither the size of a microbatch nor the packing changes it.
BatchFactor = Callable[[TrainedTokens, LossConfig, Generator], np.ndarray]


def positive_mean_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """lld: turn the weighted sum over tokens with a positive advantage into their mean."""
    positive = trained.advantages > 0
    return np.where(positive, 1.0 / (max(1, positive.sum()) * trained.weights), 0.0)


def balance_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """balance: the published rule, whose factor on negative advantages cancels their gradient by its own."""
    positive = trained.advantages > 0
    return np.where(positive & trained.has_both_signs, 1.0 - config.balance_ratio, 0.0)


def balance_detached_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """balance_detached: scale the negative side's terms to `balance_ratio` times the positive side's."""
    ratio, advantages = trained.ratio, trained.advantages
    if not trained.has_both_signs:
        return np.zeros(len(advantages))
    bounded = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    terms = -trained.weights * np.minimum(ratio * advantages, bounded * advantages)
    negative, positive = terms[advantages < 0].sum(), -terms[advantages > 0].sum()
    return np.where(advantages < 0, config.balance_ratio * positive / negative, 1.0)


def clip_cov_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """clip_cov: 0 for a few tokens, drawn at random among unclipped ones of large covariance; else 1."""
    ratio, advantages, covariance = trained.ratio, trained.advantages, trained.covariance
    bounded = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    unclipped = bounded * advantages >= ratio * advantages
    candidates = np.flatnonzero(unclipped & (covariance > config.cov_low) & (covariance < config.cov_high))
    if len(candidates) > (count := _cov_count(len(advantages), config)):
        candidates = rng.choice(candidates, count, replace=False)
    factors = np.ones(len(advantages))
    factors[candidates] = 0.0
    return factors


def kl_cov_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """kl_cov: 1 for the tokens of largest covariance, unless it is exactly 0; 0 for others."""
    covariance = trained.covariance
    largest = np.argsort(-covariance, kind="stable")[: _cov_count(len(covariance), config)]
    factors = np.zeros(len(covariance))
    factors[largest] = covariance[largest] != 0
    return factors


def _cov_count(num_tokens: int, config: LossConfig) -> int:
    return max(1, int(config.cov_share * num_tokens))


# --- Formulas: the term to minimise, float32 [R, L], and which tokens are clipped, bool [R, L] ---

Terms = tuple[Array, Array]
TokenLoss = Callable[[Tokens, LossConfig], Terms]


def clipped_ratio(ratio: Array, advantages: Array, config: LossConfig) -> Terms:
    """PPO: the pessimistic side of ratio and clipped ratio."""
    bounded = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    objective = jnp.minimum(ratio * advantages, bounded * advantages)
    return -objective, bounded * advantages < ratio * advantages


def vanilla(tokens: Tokens, config: LossConfig) -> Terms:
    """PPO. With `dual_clip` the term of a negative advantage is bounded by that many times the advantage."""
    ratio, advantages = tokens.ratio, tokens.advantages
    terms, clipped = clipped_ratio(ratio, advantages, config)
    if config.dual_clip > 0:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (terms > bound)
        terms, clipped = jnp.where(beyond, bound, terms), clipped | beyond
    return terms, clipped


def cispo(tokens: Tokens, config: LossConfig) -> Terms:
    ratio = jax.lax.stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    clipped = weight != ratio
    if config.drop_above > 0:
        weight = jnp.where((tokens.advantages > 0) & (ratio > config.drop_above), 0.0, weight)
    return -tokens.advantages * tokens.logprobs * weight, clipped


def gpg(tokens: Tokens, config: LossConfig) -> Terms:
    return -tokens.logprobs * tokens.advantages, tokens.none_clipped


def gspo(tokens: Tokens, config: LossConfig) -> Terms:
    """PPO with one ratio a sequence, the geometric mean, whose gradient goes through each token by itself."""
    mean = jax.lax.stop_gradient(segment_means(tokens.logprobs - tokens.old_logprobs, tokens))
    own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)
    ratio = jnp.exp(jnp.minimum(mean + own, GSPO_LOG_RATIO_LIMIT))
    return clipped_ratio(ratio, tokens.advantages, config)


def gmpo(tokens: Tokens, config: LossConfig) -> Terms:
    sign, log_ratio = jnp.sign(tokens.advantages), tokens.logprobs - tokens.old_logprobs
    bounded = jnp.clip(log_ratio, -config.clip_low, config.clip_high)
    limited = sign * jnp.minimum(sign * log_ratio, sign * bounded)
    # Negative advantages have no upper bound.
    ratio = jnp.exp(jnp.minimum(segment_means(limited, tokens), LOG_RATIO_LIMIT))
    return -segment_means(tokens.advantages, tokens) * ratio, sign * bounded < sign * log_ratio


def scaled_vanilla(tokens: Tokens, config: LossConfig) -> Terms:
    terms, clipped = vanilla(tokens, config)
    return tokens.factors * terms, clipped


def kl_cov(tokens: Tokens, config: LossConfig) -> Terms:
    """No clip; a penalty holds the chosen tokens near the policy that sampled them."""
    # 0 where rounding would choose the side.
    distance = jnp.where(jnp.abs(tokens.log_ratio) > LOG_RATIO_ROUNDING, jnp.abs(tokens.log_ratio), 0.0)
    terms = -tokens.ratio * tokens.advantages + config.cov_kl_coef * tokens.factors * distance
    return terms, tokens.none_clipped


def sapo(tokens: Tokens, config: LossConfig) -> Terms:
    """The gradient falls with the distance of the ratio from 1."""
    tau = jnp.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    gate = jax.nn.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
    return -gate * tokens.advantages, tokens.none_clipped


def dppo_tv(tokens: Tokens, config: LossConfig) -> Terms:
    moved = jnp.exp(tokens.logprobs) - jnp.exp(tokens.old_logprobs)
    beyond = jnp.where(tokens.advantages > 0, moved > config.clip_high, moved < -config.clip_low)
    return _inside_trust_region(tokens, beyond, config)


def dppo_kl(tokens: Tokens, config: LossConfig) -> Terms:
    """As dppo_tv, by the KL divergence of "this token or another one" under the two policies."""
    new, old = jnp.exp(tokens.logprobs), jnp.exp(tokens.old_logprobs)
    odds = jnp.log((1.0 - old + OTHER_TOKENS_EPSILON) / (1.0 - new + OTHER_TOKENS_EPSILON))
    divergence = old * (tokens.old_logprobs - tokens.logprobs) + (1.0 - old) * odds
    positive = tokens.advantages > 0
    moved = jnp.where(positive, new > old, new < old)
    beyond = moved & (divergence > jnp.where(positive, config.clip_high, config.clip_low))
    return _inside_trust_region(tokens, beyond, config)


def _inside_trust_region(tokens: Tokens, beyond: Array, config: LossConfig) -> Terms:
    weight = jax.lax.stop_gradient(jnp.minimum(tokens.ratio, config.ratio_cap))
    terms = -tokens.advantages * weight * tokens.logprobs
    return jnp.where(beyond, 0.0, terms), beyond


def dro(tokens: Tokens, config: LossConfig) -> Terms:
    distance = tokens.logprobs - tokens.old_logprobs  # not clipped: it pulls back from anywhere
    return -tokens.logprobs * tokens.advantages + 0.5 * config.dro_beta * distance**2, tokens.none_clipped


def lld(tokens: Tokens, config: LossConfig) -> Terms:
    """vanilla, and a penalty on positive advantages whose log-probability has fallen.

    At log-ratio 0, and within rounding of it, the penalty has its full gradient, as in the authors' code: the
    first update of a step pushes every such token up. `lld_gating` removes it where nothing has fallen.
    """
    terms, clipped = vanilla(tokens, config)
    fallen = jnp.where(tokens.log_ratio <= LOG_RATIO_ROUNDING, -tokens.log_ratio, 0.0)
    penalty = config.lld_coef * tokens.factors * fallen
    if config.lld_gating:
        has_fallen = (tokens.log_ratio < -LOG_RATIO_ROUNDING) & (tokens.factors > 0)
        num_fallen = segment_sums(has_fallen.astype(penalty.dtype), tokens.segment_ids)
        penalty = jnp.where(num_fallen > 0, penalty, 0.0)
    return terms + penalty, clipped


# --- Registry ---


@dataclass(frozen=True)
class Loss:
    """A loss, and its needs beside the tokens of a microbatch."""

    terms: TokenLoss
    summary: str  # printed at the start of a run
    batch_factor: BatchFactor | None = None
    needs_logprobs: bool = False  # the factor reads the current policy's: one more forward pass an update
    every_sample: bool = False  # samples without advantage count, too


LOSSES: dict[str, Loss] = {
    "vanilla": Loss(vanilla, "PPO's clipped ratio, token by token"),
    "cispo": Loss(cispo, "REINFORCE weighted by the clipped ratio: clipped tokens keep their gradient"),
    "gspo": Loss(gspo, "PPO with one ratio a trajectory; its widths are of the order of 0.0003"),
    "gmpo": Loss(gmpo, "geometric mean of a trajectory's ratios; clip_low and clip_high bound logarithms"),
    "gpg": Loss(gpg, "REINFORCE: no ratio and no clip"),
    "clip_cov": Loss(
        scaled_vanilla,
        "PPO without a few tokens of large covariance of advantage and log-probability",
        clip_cov_factor,
        needs_logprobs=True,
        every_sample=True,
    ),
    "kl_cov": Loss(
        kl_cov,
        "no clip; tokens of largest covariance of advantage and log-probability are held near the old policy",
        kl_cov_factor,
        needs_logprobs=True,
        every_sample=True,
    ),
    "lld": Loss(lld, "PPO, and a penalty on falling tokens of positive advantage", positive_mean_factor),
    "balance": Loss(
        scaled_vanilla,
        "as published: no gradient for negative advantages, and tokens of positive advantage are pushed down"
        " where loss.balance_ratio is above 1; loss.name=balance_detached does what was meant",
        balance_factor,
    ),
    "sapo": Loss(sapo, "a smooth gate in place of PPO's clip"),
    "dppo_tv": Loss(dppo_tv, "REINFORCE weighted by the ratio; no gradient for probabilities moved too far"),
    "dppo_kl": Loss(dppo_kl, "as dppo_tv, with a KL divergence in place of the difference"),
    "dro": Loss(dro, "REINFORCE with a quadratic penalty on moving from the old policy", every_sample=True),
    "balance_detached": Loss(
        scaled_vanilla,
        "PPO with the terms of negative advantages rescaled to balance_ratio times those of positive ones",
        balance_detached_factor,
        needs_logprobs=True,
    ),
}


@functools.cache  # one object a loss: programs are compiled for it
def find_loss(name: str) -> Loss:
    """Return the loss of `loss.name`, one of LOSSES or ``package.module:function``; UserError if unusable."""
    if not is_address(name):
        return LOSSES[name]
    function = import_user_function(name, "loss.name", ("tokens", "config"), EXPECTED)

    def terms(tokens: Tokens, config: LossConfig) -> Terms:
        try:
            return function(tokens, config)
        except Exception as error:  # a function of the user's own may raise anything
            fault = f"calling it raised {failure(error)}"
            raise UserError(f"loss.name is {name}, but {fault}; expected: {EXPECTED}") from error

    return Loss(terms, f"your own: {name}", every_sample=True)


def check_loss(config: LossConfig) -> list[str]:
    """Return the summary of the loss, empty for the default. UserError if an own loss cannot be used."""
    loss = find_loss(config.name)
    if is_address(config.name):
        row = jnp.zeros((2, 4), jnp.float32)
        tokens = Tokens(row, row, row, row, row > 0, row.astype(jnp.int32), None)
        returned = jax.eval_shape(lambda tokens: loss.terms(tokens, config), tokens)
        arrays = returned if isinstance(returned, tuple) else ()
        types = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in arrays]
        if types != [((2, 4), jnp.float32), ((2, 4), jnp.bool_)]:
            fault = f"it must return {RETURNED}"
            raise UserError(f"loss.name is {config.name}, but {fault}; expected: {EXPECTED}")
    cost = "; one more forward pass an update" if loss.needs_logprobs else ""
    return [] if config.name == "vanilla" else [f"loss {config.name}: {loss.summary}{cost}"]


# --- Importance correction between the sampling and the trained policy ---


def importance_correction(
    terms: Array, gap: Array, tokens: Tokens, config: LossConfig
) -> tuple[Array, Array | None]:
    """Apply truncated and masked importance weights; all terms stay in the mean, masked ones as 0.

    `gap`: learner's less sampler's log-probabilities, float32 [R, L]. Also returns masked tokens, or None.
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
        masked = masked | (_mismatch(gap, tokens, config) > config.reject_above)
    return jnp.where(masked, 0.0, terms), masked


def _mismatch(gap: Array, tokens: Tokens, config: LossConfig) -> Array:
    """Return each token's measure that `reject_above` bounds, float32 [R, L]."""
    gap = jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    measure = 0.5 * gap**2 if config.reject_by == "k2" else jnp.exp(gap) - 1.0 - gap
    measure = jnp.where(tokens.trained, measure, 0.0)
    if config.reject_over == "sequence_mean":
        return segment_means(measure, tokens)
    reduce = {"sequence_sum": segment_sums, "sequence_max": segment_maxima}.get(config.reject_over)
    return measure if reduce is None else reduce(measure, tokens.segment_ids)


# --- The functions that the learner minimises ---


def _low_variance_kl(difference: Array) -> Array:
    """k3 of Schulman, "Approximating KL divergence": exp(d) - d - 1 with d = reference - policy."""
    difference = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -KL_LIMIT, KL_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "kl": lambda difference: -difference,
    "abs": jnp.abs,
    "mse": lambda difference: 0.5 * difference**2,
    "low_var_kl": _low_variance_kl,
}


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of `loss.name` with advantages given per token, and the KL and entropy terms.

    Called with log-probabilities [R, L], entropies [R, L], the batch, and the reference policy's
    log-probabilities (or None), it returns the loss, and metrics: sums of weighted token values, or sums over
    the trained tokens for TOKEN_METRICS.
    """

    config: LossConfig
    on_policy: bool  # the ratio's denominator is the current policy itself
    definition: Loss

    @property
    def recomputes(self) -> bool:
        """Whether the ratio divides by the learner's probabilities before the step's first update."""
        return self.config.old_logprobs == "recompute" and not self.on_policy

    def has_gradient(self, sample: Sample) -> bool:
        """Return False if the sample's gradient is zero: no advantage, and no other term of the loss."""
        if self.config.kl_coef or self.config.entropy_coef or self.definition.every_sample:
            return bool(sample.mask.any())
        return bool(np.any(sample.advantages[sample.mask]))

    def factors(
        self, samples: Sequence[Sample], weights: Arrays, logprobs: Arrays | None, rng: Generator
    ) -> list[np.ndarray] | None:
        """Return each token's batch factor, float32 [T] a sample, or None; `logprobs` None: the old ones.

        At least one token must be trained.
        """
        if self.definition.batch_factor is None:
            return None
        mask = np.concatenate([sample.mask for sample in samples])
        factors = np.zeros(len(mask), np.float32)
        old = [sample.denominator for sample in samples]
        new = old if logprobs is None else logprobs
        columns = [s.advantages for s in samples], weights, new, new if self.on_policy else old
        trained = (np.concatenate(arrays)[mask].astype(np.float64) for arrays in columns)
        factors[mask] = self.definition.batch_factor(TrainedTokens(*trained), self.config, rng)
        ends = np.cumsum([len(sample.tokens) for sample in samples])
        return np.split(factors, ends)[:-1]

    def __call__(
        self, logprobs: Array, entropies: Array, batch: Batch, reference: Array | None
    ) -> tuple[Array, Metrics]:
        config = self.config
        old = jax.lax.stop_gradient(logprobs) if self.on_policy else batch.old_logprobs
        log_ratio = jnp.clip(logprobs - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        trained = batch.weights > 0
        tokens = Tokens(logprobs, old, log_ratio, batch.advantages, trained, batch.segment_ids, batch.factors)
        policy_terms, clipped = self.definition.terms(tokens, config)
        gap = jax.lax.stop_gradient(old - batch.sampler_logprobs)
        policy_terms, masked = importance_correction(policy_terms, gap, tokens, config)
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


def on_policy_only(loss: LossConfig, minibatch_size: int, epochs: int) -> bool:
    """Return whether every rollout gets exactly one update: old and current policy are then the same."""
    return loss.old_logprobs == "recompute" and minibatch_size == 0 and epochs == 1


def policy_gradient(config: LossConfig, on_policy: bool) -> PolicyLoss:
    """Return the loss of a config; UserError as `find_loss`. For `on_policy` see `on_policy_only`."""
    return PolicyLoss(config, on_policy, find_loss(config.name))


def policy_loss(config: Config) -> PolicyLoss:
    settings = config.learner
    return policy_gradient(config.loss, on_policy_only(config.loss, settings.minibatch_size, settings.epochs))


def negative_log_likelihood(
    logprobs: Array, entropies: Array, batch: Batch, reference: Array | None
) -> tuple[Array, Metrics]:
    """Supervised fine-tuning: mean negative log-probability (nats a token)."""
    loss = -jnp.sum(batch.weights * logprobs)
    return loss, {"sft/entropy": jnp.sum(batch.weights * entropies)}
