"""Paired comparison of two policies on the same questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test

from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.report import ELEMENTS, Strata, interval, stratified_mean


@dataclass(frozen=True)
class Comparison:
    questions: int
    first: float
    second: float
    difference: float  # second - first
    interval: tuple[float, float] | None  # of the difference
    p_value: float  # two-sided


def compare_paired(first: Strata, second: Strata, confidence: float, resamples: int) -> Comparison:
    """Compare two policies' scores of the same questions in the same order.

    The permutation test exchanges the two scores of a question, in all ways where there are few and in
    `resamples` random ways otherwise. The bootstrap interval resamples the questions' differences.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    # The mean is a weighted sum; a question with equal scores adds nothing to it, exchanged or not.
    weighted = np.concatenate([values / (len(values) * len(differences)) for values in differences])
    weighted = weighted[weighted != 0]
    p_value = 1.0  # also of one question: exchanged or not, the difference is as large
    if len(weighted) > 1:
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
    count, bounds = sum(map(len, differences)), interval(differences, confidence, resamples)
    means = stratified_mean(first), stratified_mean(second), stratified_mean(differences)
    return Comparison(count, *means, bounds, float(p_value))
