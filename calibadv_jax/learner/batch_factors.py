"""Factors of tokens that some losses derive from the trained tokens of a whole mini-batch.

They are computed on the host, so that neither the size of a microbatch nor the packing changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from calibadv_jax.config import LossConfig

# Log-ratios are clipped to ± this, as in the CalibAdv authors' code, so that their exponential stays finite.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class TrainedTokens:
    """The trained tokens of a mini-batch's samples, one after the other, float64 [N] with N at least 1.

    Attributes:
        advantages: of each token.
        weights: of each token in the loss.
        logprobs: log-probability under the current policy, in nats; `old_logprobs` unless the loss
            `needs_logprobs`.
        old_logprobs: log-probability in the denominator of the ratio, in nats.
    """

    advantages: np.ndarray
    weights: np.ndarray
    logprobs: np.ndarray
    old_logprobs: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """Importance ratio of each token, float64 [N]; its logarithm is clipped to ±LOG_RATIO_LIMIT."""
        log_ratio = self.logprobs - self.old_logprobs
        return np.exp(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    @property
    def covariance(self) -> np.ndarray:
        """Each token's share of the covariance of advantage and log-probability, float64 [N].

        The covariance drives the change of the entropy. A share is (A - mean A) (lp - mean lp); arXiv
        2505.22617.
        """
        centred_advantages = self.advantages - self.advantages.mean()
        centred_logprobs = self.logprobs - self.logprobs.mean()
        return centred_advantages * centred_logprobs

    @property
    def has_both_signs(self) -> bool:
        """Whether there are both positive and negative advantages."""
        has_positive = (self.advantages > 0).any()
        has_negative = (self.advantages < 0).any()
        return bool(has_positive and has_negative)


# (trained tokens, config, random generator) -> a factor for each token, float64 [N].
BatchFactor = Callable[[TrainedTokens, LossConfig, Generator], np.ndarray]


def positive_mean_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """Return the factor of `lld`'s penalty, which makes it a mean over tokens with a positive advantage.

    1 / (number of tokens with A > 0 * the token's weight) where A > 0, else 0.

    Args:
        trained: trained tokens of the mini-batch.
        config: not read.
        rng: not used.

    Returns:
        float64 [N].
    """
    is_positive = trained.advantages > 0
    num_positive = max(1, is_positive.sum())
    return np.where(is_positive, 1.0 / (num_positive * trained.weights), 0.0)


def balance_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """Return the factor of `balance`: 1 - `balance_ratio` where A > 0, else 0.

    This is the published rule as it runs: its factor on the terms of one side is not detached, and cancels
    the gradient of negative advantages. All factors are 0 if the advantages have one sign.

    Args:
        trained: trained tokens of the mini-batch.
        config: `balance_ratio` is read.
        rng: not used.

    Returns:
        float64 [N].
    """
    is_positive = trained.advantages > 0
    return np.where(is_positive & trained.has_both_signs, 1.0 - config.balance_ratio, 0.0)


def balance_detached_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """Return the factor of `balance_detached`, which scales the terms of negative advantages.

    With S+ and S- the absolute sums of the weighted PPO terms of tokens with A > 0 and A < 0, it is
    `balance_ratio` * S+ / S- where A < 0, else 1. All factors are 0 if the advantages have one sign.

    Args:
        trained: trained tokens of the mini-batch, with the current policy's log-probabilities.
        config: `balance_ratio`, `clip_low` and `clip_high` are read.
        rng: not used.

    Returns:
        float64 [N].
    """
    ratio = trained.ratio
    advantages = trained.advantages
    if not trained.has_both_signs:
        return np.zeros(len(advantages))
    clipped_ratio = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    terms = -trained.weights * np.minimum(ratio * advantages, clipped_ratio * advantages)
    negative_sum = terms[advantages < 0].sum()
    positive_sum = -terms[advantages > 0].sum()
    return np.where(advantages < 0, config.balance_ratio * positive_sum / negative_sum, 1.0)


def clip_cov_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """Return the factor of `clip_cov`: 0 for a few tokens of large covariance, else 1.

    Candidates are the tokens that PPO does not clip and whose covariance is between `cov_low` and `cov_high`.
    Out of these, `cov_share` of all trained tokens are drawn, at least one.

    Args:
        trained: trained tokens of the mini-batch, with the current policy's log-probabilities.
        config: `clip_low`, `clip_high`, `cov_share`, `cov_low` and `cov_high` are read.
        rng: draws the tokens if there are more candidates than needed.

    Returns:
        float64 [N].
    """
    ratio = trained.ratio
    advantages = trained.advantages
    covariance = trained.covariance
    clipped_ratio = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    is_unclipped = clipped_ratio * advantages >= ratio * advantages
    is_in_range = (covariance > config.cov_low) & (covariance < config.cov_high)
    chosen = np.flatnonzero(is_unclipped & is_in_range)
    count = _num_chosen(len(advantages), config)
    if len(chosen) > count:
        chosen = rng.choice(chosen, count, replace=False)
    factors = np.ones(len(advantages))
    factors[chosen] = 0.0
    return factors


def kl_cov_factor(trained: TrainedTokens, config: LossConfig, rng: Generator) -> np.ndarray:
    """Return the factor of `kl_cov`'s penalty: 1 for the tokens of largest covariance, else 0.

    Args:
        trained: trained tokens of the mini-batch, with the current policy's log-probabilities.
        config: `cov_share` is read: the share of all trained tokens that is chosen, at least one token.
        rng: not used.

    Returns:
        float64 [N]; 0 for tokens whose covariance is exactly 0, too.
    """
    covariance = trained.covariance
    by_covariance = np.argsort(-covariance, kind="stable")
    largest = by_covariance[: _num_chosen(len(covariance), config)]
    factors = np.zeros(len(covariance))
    factors[largest] = covariance[largest] != 0
    return factors


def _num_chosen(num_tokens: int, config: LossConfig) -> int:
    return max(1, int(config.cov_share * num_tokens))
