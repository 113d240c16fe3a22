"""What is said of one policy's scores: means over questions, their bootstrap intervals, pass@k.

Scores come as strata: one float64 array [N] a group of questions, such as a data source. Their mean is the
mean of the groups' means, so that one group gives the plain mean and several give the average of data sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from calibadv_jax.core.seeds import random_state

Strata = Sequence[np.ndarray]

FEW = 30  # with fewer questions or groups a bootstrap interval is too narrow to decide anything
ELEMENTS = 2_000_000  # values that are resampled at a time: bounds the memory, in doubles


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct (Chen et al., arXiv 2107.03374).

    Raises:
        ValueError: k is not in 1 … samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def stratified_mean(strata: Strata) -> float:
    """Mean of the strata's means."""
    return float(sum(np.mean(values) for values in strata) / len(strata))


def interval(strata: Strata, confidence: float, resamples: int) -> tuple[float, float] | None:
    """Percentile bootstrap interval of `stratified_mean`: questions are resampled within each stratum.

    The numbers of ``scipy.stats.bootstrap``, whose import takes a second.

    Returns:
        (low, high); None where a stratum has fewer than two questions, or `resamples` is 0.
    """
    if not resamples or min(map(len, strata)) < 2:
        return None
    rng = random_state(0, 0, "bootstrap")
    batch = max(1, ELEMENTS // max(map(len, strata)))
    means = np.concatenate(
        [_resampled(strata, min(batch, resamples - done), rng) for done in range(0, resamples, batch)]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def intervals_of_sums(
    sums: np.ndarray, statistics: Callable[[np.ndarray], np.ndarray], confidence: float, resamples: int
) -> np.ndarray:
    """Percentile bootstrap intervals of functions of column sums, float64 [M, 2]: rows are resampled.

    Args:
        sums: float64 [N, K], a row for each question or group.
        statistics: float64 [R, K], the sums of R resamples, -> float64 [R, M]; NaN where one is undefined.
    """
    rng = random_state(0, 0, "bootstrap")
    batch = max(1, ELEMENTS // len(sums))
    even = np.full(len(sums), 1 / len(sums))
    drawn = [
        statistics(rng.multinomial(len(sums), even, min(batch, resamples - done)) @ sums)
        for done in range(0, resamples, batch)
    ]
    tail = (1 - confidence) / 2
    found: np.ndarray = np.nanquantile(np.concatenate(drawn), [tail, 1 - tail], axis=0).T
    return found


def _resampled(strata: Strata, count: int, rng: np.random.Generator) -> np.ndarray:
    """`stratified_mean` of so many resamples, float64 [count]."""
    drawn = (values[rng.integers(0, len(values), (count, len(values)))] for values in strata)
    means: np.ndarray = np.mean([values.mean(axis=1) for values in drawn], axis=0)
    return means
