"""The losses, token by token: each gives the term to minimise and whether the token is clipped.

The loss of a mini-batch is the sum of `Batch.weights` times the terms. A number of the whole mini-batch that
a loss needs comes from its look (`looks`), as a factor of each token.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.losses.looks import LOG_RATIO_LIMIT
from calibadv_jax.learner.losses.tokens import Tokens, segment_means, segment_sums

# Term to minimise, float32 [R, L], and which tokens are clipped, bool [R, L].
Terms = tuple[jax.Array, jax.Array]
TokenLoss = Callable[[Tokens, LossConfig], Terms]

OTHERS = 1e-8  # added to the probability of all other tokens, as in verl
SAME = 1e-5  # log-ratio up to which nothing but rounding is seen: two programs of one policy are apart by it
SEQUENCE_LIMIT = 10.0  # of gspo's log-ratio, from above, as in verl


def clipped(ratio: jax.Array, advantages: jax.Array, config: LossConfig) -> Terms:
    """PPO's pessimistic side of ratio and clipped ratio."""
    bounded = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    objective = jnp.minimum(ratio * advantages, bounded * advantages)
    return -objective, bounded * advantages < ratio * advantages


def vanilla(tokens: Tokens, config: LossConfig) -> Terms:
    """PPO. With `dual_clip` the term of a blamed token ends at that many times its advantage."""
    ratio, advantages = tokens.ratio, tokens.advantages
    terms, flags = clipped(ratio, advantages, config)
    if config.dual_clip > 0:
        most = -advantages * config.dual_clip
        beyond = (advantages < 0) & (terms > most)
        terms, flags = jnp.where(beyond, most, terms), flags | beyond
    return terms, flags


def cispo(tokens: Tokens, config: LossConfig) -> Terms:
    """REINFORCE with a clipped ratio as weight: a clipped token keeps its gradient."""
    ratio = jax.lax.stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    flags = weight != ratio
    if config.drop_above > 0:
        weight = jnp.where((tokens.advantages > 0) & (ratio > config.drop_above), 0.0, weight)
    return -tokens.advantages * tokens.logprobs * weight, flags


def gpg(tokens: Tokens, config: LossConfig) -> Terms:
    """REINFORCE without a ratio."""
    return -tokens.logprobs * tokens.advantages, jnp.zeros(tokens.trained.shape, bool)


def gspo(tokens: Tokens, config: LossConfig) -> Terms:
    """PPO with one ratio a sequence: the geometric mean of its tokens' ratios.

    The gradient goes to each token by its own log-probability only.
    """
    mean = jax.lax.stop_gradient(segment_means(tokens.logprobs - tokens.old_logprobs, tokens))
    own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)
    ratio = jnp.exp(jnp.minimum(mean + own, SEQUENCE_LIMIT))
    return clipped(ratio, tokens.advantages, config)


def gmpo(tokens: Tokens, config: LossConfig) -> Terms:
    """The geometric mean of clipped token ratios times the sequence's mean advantage."""
    sign, log_ratio = jnp.sign(tokens.advantages), tokens.logprobs - tokens.old_logprobs
    bounded = jnp.clip(log_ratio, -config.clip_low, config.clip_high)
    limited = sign * jnp.minimum(sign * log_ratio, sign * bounded)
    mean = jnp.minimum(segment_means(limited, tokens), LOG_RATIO_LIMIT)  # blamed tokens have no upper bound
    ratio = jnp.exp(mean)
    return -segment_means(tokens.advantages, tokens) * ratio, sign * bounded < sign * log_ratio


def scaled(tokens: Tokens, config: LossConfig) -> Terms:
    """Vanilla with a factor on each token's term: of balance, balance_detached and clip_cov."""
    terms, flags = vanilla(tokens, config)
    return tokens.given * terms, flags


def kl_cov(tokens: Tokens, config: LossConfig) -> Terms:
    """No clip; the chosen tokens are held near the policy that sampled them.

    Within SAME of it nothing pulls, where rounding would choose the side.
    """
    distance = jnp.where(jnp.abs(tokens.log_ratio) > SAME, jnp.abs(tokens.log_ratio), 0.0)
    terms = -tokens.ratio * tokens.advantages + config.cov_kl_coef * tokens.given * distance
    return terms, jnp.zeros(tokens.trained.shape, bool)


def sapo(tokens: Tokens, config: LossConfig) -> Terms:
    """A smooth gate in place of the clip: the gradient falls with the distance of the ratio from 1."""
    tau = jnp.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    gate = jax.nn.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
    return -gate * tokens.advantages, jnp.zeros(tokens.trained.shape, bool)


def dppo_tv(tokens: Tokens, config: LossConfig) -> Terms:
    """REINFORCE weighted by the ratio, without tokens whose probability has moved too far where it should."""
    moved = jnp.exp(tokens.logprobs) - jnp.exp(tokens.old_logprobs)
    beyond = jnp.where(tokens.advantages > 0, moved > config.clip_high, moved < -config.clip_low)
    return _within(tokens, beyond, config)


def dppo_kl(tokens: Tokens, config: LossConfig) -> Terms:
    """The same by the KL divergence of "this token or another one" under the two policies."""
    new, old = jnp.exp(tokens.logprobs), jnp.exp(tokens.old_logprobs)
    others = jnp.log((1.0 - old + OTHERS) / (1.0 - new + OTHERS))
    divergence = old * (tokens.old_logprobs - tokens.logprobs) + (1.0 - old) * others
    praised = tokens.advantages > 0
    moved = jnp.where(praised, new > old, new < old)
    beyond = moved & (divergence > jnp.where(praised, config.clip_high, config.clip_low))
    return _within(tokens, beyond, config)


def _within(tokens: Tokens, beyond: jax.Array, config: LossConfig) -> Terms:
    weight = jax.lax.stop_gradient(jnp.minimum(tokens.ratio, config.ratio_cap))
    terms = -tokens.advantages * weight * tokens.logprobs
    return jnp.where(beyond, 0.0, terms), beyond


def dro(tokens: Tokens, config: LossConfig) -> Terms:
    """REINFORCE, and a quadratic penalty on the distance from the policy that sampled."""
    distance = tokens.logprobs - tokens.old_logprobs  # not held within 20: it pulls back from anywhere
    terms = -tokens.logprobs * tokens.advantages + 0.5 * config.dro_beta * distance**2
    return terms, jnp.zeros(tokens.trained.shape, bool)


def lld(tokens: Tokens, config: LossConfig) -> Terms:
    """Vanilla, and a penalty on praised tokens whose log-probability has fallen.

    At log-ratio 0 the penalty is 0 but its gradient is the full one, as in the authors' code: the first
    update of a step pushes every praised token up. So it is within SAME of 0, where rounding would choose.
    `lld_gating` takes it from sequences in which nothing has fallen.
    """
    terms, flags = vanilla(tokens, config)
    fallen = jnp.where(tokens.log_ratio <= SAME, -tokens.log_ratio, 0.0)
    penalty = config.lld_coef * tokens.given * fallen
    if config.lld_gating:
        has_fallen = (tokens.log_ratio < -SAME) & (tokens.given > 0)
        row = segment_sums(has_fallen.astype(penalty.dtype), tokens.segment_ids)
        penalty = jnp.where(row > 0, penalty, 0.0)
    return terms + penalty, flags
