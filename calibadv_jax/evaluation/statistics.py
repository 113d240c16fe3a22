"""Intervals and tests over questions: bootstrap, paired permutation test, pass@k.

Scores come as strata: one float64 array [N] a group of questions, such as a data source. Their mean is the
mean of the groups' means, so that one group gives the plain mean and several give the average of data sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import bootstrap, permutation_test

from calibadv_jax.seeds import random_state

Strata = Sequence[np.ndarray]

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
    return float(_mean(*strata, axis=-1))


def interval(strata: Strata, confidence: float, resamples: int) -> tuple[float, float] | None:
    """Percentile bootstrap interval of `stratified_mean`: questions are resampled within each stratum.

    Returns:
        (low, high); None where a stratum has fewer than two questions, or `resamples` is 0.
    """
    if not resamples or min(map(len, strata)) < 2:
        return None
    result = bootstrap(
        tuple(strata),
        _mean,
        n_resamples=resamples,
        batch=_batch(strata),
        vectorized=True,
        axis=-1,
        confidence_level=confidence,
        method="percentile",
        rng=random_state(0, 0, "bootstrap"),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same questions."""

    questions: int
    first: float
    second: float
    difference: float  # second - first
    interval: tuple[float, float] | None  # of the difference
    p_value: float  # two-sided


def compare_paired(first: Strata, second: Strata, confidence: float, resamples: int) -> Comparison:
    """Difference of two policies' means, its interval, and a permutation test.

    The test exchanges the two scores of a question, in all ways where there are few and in `resamples` random
    ways otherwise. The interval resamples the questions' differences.

    Args:
        first, second: scores of the same questions in the same order.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    # The mean is a weighted sum; a question with equal scores adds nothing to it, exchanged or not.
    weighted = np.concatenate([values / (len(values) * len(differences)) for values in differences])
    weighted = weighted[weighted != 0]
    p_value = 1.0
    if len(weighted):
        p_value = permutation_test(
            (weighted,),
            lambda values, axis: values.sum(axis),
            permutation_type="samples",
            n_resamples=resamples,
            batch=max(1, ELEMENTS // len(weighted)),
            vectorized=True,
            axis=-1,
            rng=random_state(0, 0, "permutation"),
        ).pvalue
    return Comparison(
        sum(map(len, differences)),
        stratified_mean(first),
        stratified_mean(second),
        stratified_mean(differences),
        interval(differences, confidence, resamples),
        float(p_value),
    )


def _mean(*strata: np.ndarray, axis: int) -> Any:
    return sum(np.mean(values, axis=axis) for values in strata) / len(strata)


def _batch(strata: Strata) -> int:
    return max(1, ELEMENTS // max(map(len, strata)))
