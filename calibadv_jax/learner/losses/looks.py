"""What a loss must know of the whole mini-batch before its microbatches: a factor for each token.

Computed on the host in float64, so that neither the size of a microbatch nor the packing changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from calibadv_jax.config import LossConfig

LOG_RATIO_LIMIT = 20.0  # as in the CalibAdv authors' code: exp stays finite


@dataclass(frozen=True)
class Trained:
    """The trained tokens of a mini-batch's samples, one after the other; float64 [N], N at least 1."""

    advantages: np.ndarray
    weights: np.ndarray
    logprobs: np.ndarray  # of the current policy; `old_logprobs` where the loss does not ask for them
    old_logprobs: np.ndarray  # the ratio's denominator

    @property
    def ratio(self) -> np.ndarray:
        return np.exp(np.clip(self.logprobs - self.old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    @property
    def covariance(self) -> np.ndarray:
        """Of advantage and log-probability, each token's share: what moves the entropy."""
        advantage, logprob = self.advantages.mean(), self.logprobs.mean()
        return (self.advantages - advantage) * (self.logprobs - logprob)


Look = Callable[[Trained, LossConfig, np.random.Generator], np.ndarray]


def praised(trained: Trained, config: LossConfig, rng: np.random.Generator) -> np.ndarray:
    """lld: what makes the weighted sum over the praised tokens their mean."""
    positive = trained.advantages > 0
    return np.where(positive, 1.0 / (max(1, positive.sum()) * trained.weights), 0.0)


def _has_both_sides(trained: Trained) -> bool:
    return bool((trained.advantages > 0).any() and (trained.advantages < 0).any())


def balance(trained: Trained, config: LossConfig, rng: np.random.Generator) -> np.ndarray:
    """The published rule: its factor on blamed tokens has a gradient of its own, which cancels theirs.

    With S the praised tokens' sum of terms the whole is (balance_ratio - 1) |S|; 0 where a side is missing.
    """
    if not _has_both_sides(trained):
        return np.zeros(len(trained.advantages))
    return np.where(trained.advantages > 0, 1.0 - config.balance_ratio, 0.0)


def balance_detached(trained: Trained, config: LossConfig, rng: np.random.Generator) -> np.ndarray:
    """What was meant: the blamed tokens' terms come to `balance_ratio` times those of the praised ones."""
    if not _has_both_sides(trained):
        return np.zeros(len(trained.advantages))
    ratio, advantages = trained.ratio, trained.advantages
    bounded = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    terms = -trained.weights * np.minimum(ratio * advantages, bounded * advantages)
    blamed, wanted = terms[advantages < 0].sum(), -terms[advantages > 0].sum()
    return np.where(advantages < 0, config.balance_ratio * wanted / blamed, 1.0)


def clip_cov(trained: Trained, config: LossConfig, rng: np.random.Generator) -> np.ndarray:
    """0 for a few tokens, drawn at random among unclipped ones of large covariance; 1 for the others."""
    candidates = np.flatnonzero(cov_candidates(trained, config))
    count = cov_count(len(trained.advantages), config)
    if len(candidates) > count:
        candidates = rng.choice(candidates, count, replace=False)
    factors = np.ones(len(trained.advantages))
    factors[candidates] = 0.0
    return factors


def cov_candidates(trained: Trained, config: LossConfig) -> np.ndarray:
    """Which tokens clip_cov draws from: bool [N]."""
    ratio, advantages = trained.ratio, trained.advantages
    bounded = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    free = bounded * advantages >= ratio * advantages
    covariance = trained.covariance
    return free & (covariance > config.cov_low) & (covariance < config.cov_high)


def kl_cov(trained: Trained, config: LossConfig, rng: np.random.Generator) -> np.ndarray:
    """1 for the tokens of largest covariance, 0 for others.

    Equal ones are taken in the order of the samples. A covariance of exactly 0 is never taken: without any
    advantage no token stands out.
    """
    covariance = trained.covariance
    first = np.argsort(-covariance, kind="stable")[: cov_count(len(covariance), config)]
    factors = np.zeros(len(covariance))
    factors[first] = covariance[first] != 0
    return factors


def cov_count(tokens: int, config: LossConfig) -> int:
    """How many of so many trained tokens are chosen."""
    return max(1, int(config.cov_share * tokens))
