"""Losses of the policy, token by token: the learner minimises the sum of `Batch.weights` times these terms.

The formulas have the letters of docs/losses.md: r is the importance ratio, d its logarithm, lp the
log-probability under the current policy, A the advantage, sg a value without gradient, and clip(r) is r cut
to the range from 1 - `clip_low` to 1 + `clip_high`. The KL term and the entropy bonus are in `objective`.
`core.registry.LOSSES` names them, with the keys that each reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calibadv_jax.config import LossConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import LOSSES
from calibadv_jax.core.user_functions import (
    describe_failure,
    import_user_function,
    is_address,
    load_function,
)
from calibadv_jax.learner.batch_factors import LOG_RATIO_LIMIT, BatchFactor

GSPO_LOG_RATIO_LIMIT = 10.0  # Upper limit of GSPO's log-ratio, as in verl; there is no lower one.
OTHER_TOKENS_EPSILON = 1e-8  # Added to the probability of all other tokens in dppo_kl, as in verl.
LOG_RATIO_ROUNDING = 1e-5  # Log-ratios of one policy, computed by two programs, differ from 0 by up to this.
# How a loss of the user's own is declared, and what it returns; for error messages.
EXPECTED = "def my_loss(tokens: Tokens, config: LossConfig) -> tuple[jax.Array, jax.Array]"
RETURNED = "the terms to minimise (float32 [R, L]) and which tokens are clipped (bool [R, L])"


# --- Tokens ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Packed rows of R x L tokens. The sequences of a row lie one after the other.

    Attributes:
        logprobs: float32 [R, L], log-probabilities under the current policy, in nats. The gradient flows
            through them.
        old_logprobs: float32 [R, L], log-probabilities in the denominator of the ratio.
        log_ratio: float32 [R, L], logprobs - old_logprobs, clipped to ±LOG_RATIO_LIMIT.
        advantages: float32 [R, L].
        trained: bool [R, L]. The other columns must have no influence on trained ones.
        segment_ids: int32 [R, L], number of the sequence in its row; 0: padding.
        factors: float32 [R, L], from the loss's `BatchFactor`; None: the loss has none.
    """

    logprobs: Array
    old_logprobs: Array
    log_ratio: Array
    advantages: Array
    trained: Array
    segment_ids: Array
    factors: Any

    @property
    def ratio(self) -> Array:
        """Importance ratio of each token, float32 [R, L]."""
        return jnp.exp(self.log_ratio)

    @property
    def none_clipped(self) -> Array:
        """False for every token, bool [R, L]."""
        return jnp.zeros(self.trained.shape, bool)


def _reduce_segments(reduce: Callable[..., Array], values: Array, segment_ids: Array) -> Array:
    """Reduce the values of each sequence, and give every token of the sequence the result.

    Scans along the rows give the same order of operations on every device, and keep rows on their device.

    Args:
        reduce: an associative function of two arrays with neutral element 0.
        values: float32 [R, L].
        segment_ids: int32 [R, L].

    Returns:
        float32 [R, L].
    """
    differs = segment_ids[:, 1:] != segment_ids[:, :-1]  # [R, L-1]
    edge = jnp.ones((len(segment_ids), 1), bool)
    is_first = jnp.concatenate([edge, differs], axis=1)  # [R, L]
    is_last = jnp.concatenate([differs, edge], axis=1)

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        """Reduce two successive stretches; a right one with a boundary does not look further left."""
        left_value, left_has_boundary = left
        right_value, right_has_boundary = right
        value = jnp.where(right_has_boundary, right_value, reduce(left_value, right_value))
        return value, left_has_boundary | right_has_boundary

    running, _ = jax.lax.associative_scan(combine, (values, is_first), axis=1)
    totals_at_last = jnp.where(is_last, running, jnp.zeros_like(running))
    totals, _ = jax.lax.associative_scan(combine, (totals_at_last, is_last), axis=1, reverse=True)
    return totals


# (values, segment_ids) -> the sum over each token's sequence, at every token of it: [R, L].
segment_sums = jax.jit(functools.partial(_reduce_segments, jnp.add))
# The same for the maximum of values >= 0.
segment_maxima = jax.jit(functools.partial(_reduce_segments, jnp.maximum))


def segment_means(values: Array, tokens: Tokens) -> Array:
    """Return the mean over the trained tokens of each token's sequence.

    Args:
        values: float32 [R, L].
        tokens: the rows.

    Returns:
        float32 [R, L], at every token of the sequence; 0 if it has no trained token.
    """
    count = segment_sums(tokens.trained.astype(jnp.float32), tokens.segment_ids)
    total = segment_sums(jnp.where(tokens.trained, values, 0.0), tokens.segment_ids)
    return total / jnp.maximum(count, 1.0)


# --- The losses ---

Terms = tuple[Array, Array]  # the terms to minimise, float32 [R, L]; which tokens are clipped, bool [R, L]
TokenLoss = Callable[[Tokens, LossConfig], Terms]


def clipped_ratio(ratio: Array, advantages: Array, config: LossConfig) -> Terms:
    """Return PPO's terms: max(-A r, -A clip(r)), arXiv 1707.06347.

    Args:
        ratio: float32 [R, L], of tokens or of sequences.
        advantages: float32 [R, L].
        config: a token with A > 0 has no gradient where r > 1 + `clip_high`, and a token with A < 0 has none
            where r < 1 - `clip_low`.

    Returns:
        The terms, float32 [R, L], and which tokens have no gradient, bool [R, L].
    """
    bounded_ratio = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    objective = jnp.minimum(ratio * advantages, bounded_ratio * advantages)
    return -objective, bounded_ratio * advantages < ratio * advantages


def vanilla(tokens: Tokens, config: LossConfig) -> Terms:
    """Return PPO's terms: max(-A r, -A clip(r)); where A < 0, at most -A `dual_clip`.

    Sources: PPO, arXiv 1707.06347; a larger `clip_high` is DAPO's clip-higher, arXiv 2503.14476; dual clip,
    arXiv 1912.09729, as in verl.

    Args:
        tokens: packed rows.
        config: the ratio is cut at 1 - `clip_low` (it ends the gradient where A < 0) and at 1 + `clip_high`
            (where A > 0). `dual_clip` bounds the ratio where A < 0; 0: no bound.

    Returns:
        The terms, float32 [R, L], and which tokens have no gradient, bool [R, L].
    """
    advantages = tokens.advantages
    terms, is_clipped = clipped_ratio(tokens.ratio, advantages, config)
    if config.dual_clip > 0:
        bound = -advantages * config.dual_clip
        is_beyond = (advantages < 0) & (terms > bound)
        terms = jnp.where(is_beyond, bound, terms)
        is_clipped = is_clipped | is_beyond
    return terms, is_clipped


def cispo(tokens: Tokens, config: LossConfig) -> Terms:
    """Return CISPO's terms: -A lp sg(clip(r)), MiniMax-M1, arXiv 2506.13585.

    Args:
        tokens: packed rows.
        config: the weight sg(r) is at least 1 - `clip_low` and at most 1 + `clip_high`, whatever the sign of
            A. A token beyond them keeps its gradient. With `drop_above`, a token with A > 0 and r above it
            has none: the CalibAdv authors' rule; 0: off.

    Returns:
        The terms, float32 [R, L], and which tokens have a weight other than their ratio, bool [R, L].
    """
    ratio = jax.lax.stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = weight != ratio
    if config.drop_above > 0:
        is_dropped = (tokens.advantages > 0) & (ratio > config.drop_above)
        weight = jnp.where(is_dropped, 0.0, weight)
    return -tokens.advantages * tokens.logprobs * weight, is_clipped


def gpg(tokens: Tokens, config: LossConfig) -> Terms:
    """Return GPG's terms: -A lp, arXiv 2504.02546.

    Args:
        tokens: packed rows.
        config: not read. There is no ratio, and `clip_low` and `clip_high` have no meaning.

    Returns:
        The terms, float32 [R, L], and False for every token, bool [R, L], since none is clipped.
    """
    return -tokens.logprobs * tokens.advantages, tokens.none_clipped


def gspo(tokens: Tokens, config: LossConfig) -> Terms:
    """Return GSPO's terms: max(-A s, -A clip(s)), arXiv 2507.18071.

    s is one ratio for a sequence, the exponential of its mean d. Its gradient flows through each token's own
    log-probability (GSPO-token): log s_t = sg(mean d) + lp_t - sg(lp_t).

    Args:
        tokens: packed rows.
        config: the sequence's ratio s is cut at 1 - `clip_low` and 1 + `clip_high`. The paper has 0.0003 and
            0.0004.

    Returns:
        The terms, float32 [R, L], and which tokens have no gradient, bool [R, L].
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs  # not clipped
    sequence_log_ratio = jax.lax.stop_gradient(segment_means(log_ratio, tokens))
    zero_with_gradient = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)
    ratio = jnp.exp(jnp.minimum(sequence_log_ratio + zero_with_gradient, GSPO_LOG_RATIO_LIMIT))
    return clipped_ratio(ratio, tokens.advantages, config)


def gmpo(tokens: Tokens, config: LossConfig) -> Terms:
    """Return GMPO's terms: -mean A * exp(mean of clipped d) over the sequence, arXiv 2507.20673.

    The same as `geo_mean` in verl.trainer.ppo.core_algos.

    Args:
        tokens: packed rows.
        config: `clip_low` and `clip_high` bound the logarithm d of a token's ratio, not the ratio: d is at
            most `clip_high` where A > 0, and at least -`clip_low` where A < 0. verl's example has 0.4.

    Returns:
        The terms, float32 [R, L], and which tokens have a bounded d, bool [R, L].
    """
    sign = jnp.sign(tokens.advantages)
    log_ratio = tokens.logprobs - tokens.old_logprobs
    bounded = jnp.clip(log_ratio, -config.clip_low, config.clip_high)
    pessimistic = sign * jnp.minimum(sign * log_ratio, sign * bounded)
    # Where A < 0 nothing bounds the log-ratio from above.
    ratio = jnp.exp(jnp.minimum(segment_means(pessimistic, tokens), LOG_RATIO_LIMIT))
    return -segment_means(tokens.advantages, tokens) * ratio, sign * bounded < sign * log_ratio


def scaled_vanilla(tokens: Tokens, config: LossConfig) -> Terms:
    """Return PPO's terms times a factor of each token: f * max(-A r, -A clip(r)).

    The factor makes the loss:

    - `clip_cov`, arXiv 2505.22617: f = 0 for a few tokens of large covariance of advantage and
      log-probability, else 1 (`clip_cov_factor`).
    - `balance`, from the CalibAdv authors' verl.trainer.ppo.core_algos as it runs: f = 1 - `balance_ratio`
      where A > 0, else 0 (`balance_factor`).
    - `balance_detached`, the same as it was meant: f scales the terms of A < 0 so that their sum is
      `balance_ratio` times that of A > 0 (`balance_detached_factor`).

    Args:
        tokens: packed rows with `factors`.
        config: `clip_low` and `clip_high` have the meaning of `vanilla`.

    Returns:
        The terms, float32 [R, L], and which tokens PPO clips, bool [R, L].
    """
    terms, is_clipped = vanilla(tokens, config)
    return tokens.factors * terms, is_clipped


def kl_cov(tokens: Tokens, config: LossConfig) -> Terms:
    """Return KL-cov's terms: -A r, plus `cov_kl_coef` * |d| for tokens of largest covariance.

    Source: arXiv 2505.22617. The tokens are chosen by `kl_cov_factor`. Within LOG_RATIO_ROUNDING of 0 the
    penalty is 0, since rounding would choose the sign of its gradient.

    Args:
        tokens: packed rows with `factors`.
        config: `cov_kl_coef` is read. Nothing is clipped, and `clip_low` and `clip_high` have no meaning.

    Returns:
        The terms, float32 [R, L], and False for every token, bool [R, L], since none is clipped.
    """
    distance = jnp.where(jnp.abs(tokens.log_ratio) > LOG_RATIO_ROUNDING, jnp.abs(tokens.log_ratio), 0.0)
    terms = -tokens.ratio * tokens.advantages + config.cov_kl_coef * tokens.factors * distance
    return terms, tokens.none_clipped


def sapo(tokens: Tokens, config: LossConfig) -> Terms:
    """Return SAPO's terms: -A (4 / τ) sigmoid(τ (r - 1)), arXiv 2511.20347.

    The gradient falls smoothly with the distance of the ratio from 1.

    Args:
        tokens: packed rows.
        config: τ is `tau_positive` where A > 0, else `tau_negative`; a larger τ is a narrower gate. Nothing
            is clipped, and `clip_low` and `clip_high` have no meaning.

    Returns:
        The terms, float32 [R, L], and False for every token, bool [R, L], since none is clipped.
    """
    tau = jnp.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    gate = jax.nn.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
    return -gate * tokens.advantages, tokens.none_clipped


def dppo_tv(tokens: Tokens, config: LossConfig) -> Terms:
    """Return DPPO's terms by total variation, arXiv 2602.04879.

    -A lp sg(min(r, `ratio_cap`)), and 0 where the token's probability has changed too far.

    Args:
        tokens: packed rows.
        config: a term is 0 where A > 0 and the probability has risen by more than `clip_high`, or A < 0 and
            it has fallen by more than `clip_low`. Both are differences of probabilities, not ratios; reported
            runs have 0.15 and 0.2.

    Returns:
        The terms, float32 [R, L], and which ones are 0, bool [R, L].
    """
    change = jnp.exp(tokens.logprobs) - jnp.exp(tokens.old_logprobs)
    is_beyond = jnp.where(tokens.advantages > 0, change > config.clip_high, change < -config.clip_low)
    return _inside_trust_region(tokens, is_beyond, config)


def dppo_kl(tokens: Tokens, config: LossConfig) -> Terms:
    """Return DPPO's terms by the KL divergence of "this token or another one", arXiv 2602.04879.

    With p and q the token's probabilities under the current and the old policy, the divergence is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The terms are -A lp sg(min(r, `ratio_cap`)), and 0 where
    the probability has moved in the direction of A and the divergence is too large.

    Args:
        tokens: packed rows.
        config: `clip_high` is the largest divergence where A > 0, `clip_low` where A < 0, in nats; reported
            runs have 0.05.

    Returns:
        The terms, float32 [R, L], and which ones are 0, bool [R, L].
    """
    new = jnp.exp(tokens.logprobs)
    old = jnp.exp(tokens.old_logprobs)
    others_log_ratio = jnp.log((1.0 - old + OTHER_TOKENS_EPSILON) / (1.0 - new + OTHER_TOKENS_EPSILON))
    divergence = old * (tokens.old_logprobs - tokens.logprobs) + (1.0 - old) * others_log_ratio
    is_positive = tokens.advantages > 0
    has_moved = jnp.where(is_positive, new > old, new < old)
    limit = jnp.where(is_positive, config.clip_high, config.clip_low)
    return _inside_trust_region(tokens, has_moved & (divergence > limit), config)


def _inside_trust_region(tokens: Tokens, is_beyond: Array, config: LossConfig) -> Terms:
    """Return -A lp sg(min(r, ratio_cap)), and 0 for tokens beyond the trust region."""
    weight = jax.lax.stop_gradient(jnp.minimum(tokens.ratio, config.ratio_cap))
    terms = -tokens.advantages * weight * tokens.logprobs
    return jnp.where(is_beyond, 0.0, terms), is_beyond


def dro(tokens: Tokens, config: LossConfig) -> Terms:
    """Return DRO's terms: -A lp + `dro_beta` / 2 * d².

    Source: `compute_policy_loss_dro` of verl.trainer.ppo.core_algos.

    Args:
        tokens: packed rows.
        config: `dro_beta` is read. Nothing is clipped, and `clip_low` and `clip_high` have no meaning.

    Returns:
        The terms, float32 [R, L], and False for every token, bool [R, L], since none is clipped.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs  # not clipped: the penalty acts at any distance
    terms = -tokens.logprobs * tokens.advantages + 0.5 * config.dro_beta * log_ratio**2
    return terms, tokens.none_clipped


def lld(tokens: Tokens, config: LossConfig) -> Terms:
    """Return PPO's terms plus a penalty on tokens with A > 0 that have become less likely.

    max(-A r, -A clip(r)) + `lld_coef` * f * max(0, -d), where f makes the penalty a mean over the tokens with
    A > 0 (`positive_mean_factor`). Source: `lld` in verl.trainer.ppo.core_algos of the CalibAdv authors,
    after lazy likelihood displacement, arXiv 2512.04220.

    At d = 0, and within LOG_RATIO_ROUNDING of it, the penalty has its full gradient, as in the authors' code:
    the first update of a step pushes every such token up.

    Args:
        tokens: packed rows with `factors`.
        config: `clip_low`, `clip_high` and `dual_clip` have the meaning of `vanilla`, and do not limit the
            penalty. With `lld_gating`, sequences in which no token has become less likely have no penalty.

    Returns:
        The terms, float32 [R, L], and which tokens PPO clips, bool [R, L].
    """
    terms, is_clipped = vanilla(tokens, config)
    decrease = jnp.where(tokens.log_ratio <= LOG_RATIO_ROUNDING, -tokens.log_ratio, 0.0)
    penalty = config.lld_coef * tokens.factors * decrease
    if config.lld_gating:
        has_decreased = (tokens.log_ratio < -LOG_RATIO_ROUNDING) & (tokens.factors > 0)
        num_decreased = segment_sums(has_decreased.astype(penalty.dtype), tokens.segment_ids)
        penalty = jnp.where(num_decreased > 0, penalty, 0.0)
    return terms + penalty, is_clipped


# --- Losses by name ---


@dataclass(frozen=True)
class Loss:
    """A loss, and what it needs beside the tokens of a microbatch.

    Attributes:
        terms: the formula.
        summary: printed at the start of a run.
        batch_factor: computes `Tokens.factors`; None: the loss has none.
        needs_logprobs: whether `batch_factor` reads the current policy's log-probabilities, which costs one
            more forward pass for each update.
        every_sample: whether samples without advantage change the loss.
    """

    terms: TokenLoss
    summary: str
    batch_factor: BatchFactor | None = None
    needs_logprobs: bool = False
    every_sample: bool = False


@functools.cache  # Programs are compiled for a loss object, so each name has one.
def find_loss(name: str, keywords: tuple[str, ...] = ()) -> Loss:
    """Return the loss of a name.

    Args:
        name: `loss.name`, one of LOSSES or ``package.module:function``.
        keywords: names of the arguments in `loss.args`.

    Returns:
        The loss. A user's own is computed for samples without advantage, too, and its terms raise UserError
        if the function fails.

    Raises:
        UserError: if the user's function cannot be imported or has other parameters.
    """
    if not is_address(name):
        entry = LOSSES[name]
        return Loss(
            load_function(entry.address),
            entry.summary,
            batch_factor=load_function(entry.batch_factor) if entry.batch_factor else None,
            needs_logprobs=entry.needs_logprobs,
            every_sample=entry.every_sample,
        )
    function = import_user_function(name, "loss.name", ("tokens", "config"), EXPECTED, keywords)

    def own_terms(tokens: Tokens, config: LossConfig) -> Terms:
        """Call the user's function; raise UserError if it fails."""
        try:
            return function(tokens, config, **config.args)
        except Exception as error:  # a function of the user's own may raise anything
            raise UserError(
                f"loss.name is {name}, but calling it raised {describe_failure(error)}; expected: {EXPECTED}"
            ) from error

    return Loss(own_terms, f"your own: {name}", every_sample=True)


def check_loss(config: LossConfig) -> list[str]:
    """Check the loss of a config, and describe it.

    Args:
        config: section `loss`. A user's own loss is tried on abstract arrays.

    Returns:
        One line for the start of a run; empty for the default loss.

    Raises:
        UserError: if a loss of the user's own cannot be imported, raises or returns something else.
    """
    loss = find_loss(config.name, tuple(config.args))
    if is_address(config.name):
        _check_own_loss(loss, config)
    if config.name == "vanilla":
        return []
    cost = "; one more forward pass an update" if loss.needs_logprobs else ""
    return [f"loss {config.name}: {loss.summary}{cost}"]


def _check_own_loss(loss: Loss, config: LossConfig) -> None:
    shape = (2, 4)
    row = jnp.zeros(shape, jnp.float32)
    tokens = Tokens(
        logprobs=row,
        old_logprobs=row,
        log_ratio=row,
        advantages=row,
        trained=row > 0,
        segment_ids=row.astype(jnp.int32),
        factors=None,
    )
    returned = jax.eval_shape(lambda tokens: loss.terms(tokens, config), tokens)
    arrays = returned if isinstance(returned, tuple) else ()
    types = [(getattr(array, "shape", None), getattr(array, "dtype", None)) for array in arrays]
    if types != [(shape, jnp.float32), (shape, jnp.bool_)]:
        raise UserError(f"loss.name is {config.name}, but it must return {RETURNED}; expected: {EXPECTED}")
