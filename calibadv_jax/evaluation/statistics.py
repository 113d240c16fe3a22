"""Paired comparison of two policies on the same questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test

from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.score_tables import (
    RESAMPLED_ELEMENTS,
    Strata,
    bootstrap_interval,
    stratified_mean,
)


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same questions.

    Attributes:
        questions: Number of questions.
        first: Mean score of the first policy.
        second: Mean score of the second policy.
        difference: Mean of second - first.
        interval: Bootstrap interval of the difference; None for too few questions.
        p_value: Two-sided, of the paired permutation test.
    """

    questions: int
    first: float
    second: float
    difference: float
    interval: tuple[float, float] | None
    p_value: float


def compare_paired(first: Strata, second: Strata, confidence: float, resamples: int) -> Comparison:
    """Compare two policies' scores of the same questions in the same order.

    The permutation test exchanges the two scores of a question, in all ways where there are few and in
    `resamples` random ways otherwise. The bootstrap interval resamples the questions' differences.

    Args:
        first: Scores of the first policy, float64 [N] for each stratum.
        second: Scores of the second policy, likewise.
        confidence: Level of the interval, such as 0.95.
        resamples: Number of resamples of the interval, and of random permutations.
    """
    differences = [
        second_values - first_values for first_values, second_values in zip(first, second, strict=True)
    ]
    return Comparison(
        questions=sum(map(len, differences)),
        first=stratified_mean(first),
        second=stratified_mean(second),
        difference=stratified_mean(differences),
        interval=bootstrap_interval(differences, confidence, resamples),
        p_value=_permutation_p_value(differences, resamples),
    )


def _permutation_p_value(differences: Strata, resamples: int) -> float:
    """Return the two-sided p-value of the stratified mean of paired differences."""
    # The stratified mean is a weighted sum. A question with equal scores adds nothing to it, whether they are
    # exchanged or not.
    weighted = np.concatenate([values / (len(values) * len(differences)) for values in differences])
    weighted = weighted[weighted != 0]
    if len(weighted) <= 1:
        return 1.0  # exchanging the scores of a single question leaves the size of the difference as it is
    test = permutation_test(
        (weighted,),
        lambda values, axis: values.sum(axis),
        permutation_type="samples",
        n_resamples=resamples,
        batch=max(1, RESAMPLED_ELEMENTS // len(weighted)),
        vectorized=True,
        axis=-1,
        rng=random_state(0, 0, "permutation"),
    )
    return float(test.pvalue)
