"""Intervals, the paired test and pass@k against computations that enumerate everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import bootstrap

from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation import report
from calibadv_jax.evaluation.records import pass_at_k
from calibadv_jax.evaluation.report import interval, intervals_of_sums
from calibadv_jax.evaluation.statistics import compare_paired

FIRST = np.array([1.0, 0.0, 0.5, 0.2, 0.9, 0.4])
SECOND = np.array([0.2, 0.8, 0.6])


def resampled(values):
    """The mean of every one of the N^N equally likely resamples."""
    return np.array([np.mean(sample) for sample in itertools.product(values, repeat=len(values))])


@pytest.mark.parametrize("elements", [report.ELEMENTS, 70])  # 70: eleven resamples at a time
def test_interval_is_that_of_scipy(monkeypatch, elements):
    monkeypatch.setattr(report, "ELEMENTS", elements)
    expected = bootstrap(
        (FIRST, SECOND),
        lambda first, second, axis: (np.mean(first, axis=axis) + np.mean(second, axis=axis)) / 2,
        n_resamples=500,
        batch=elements // len(FIRST),
        vectorized=True,
        axis=-1,
        confidence_level=0.9,
        method="percentile",
        rng=random_state(0, 0, "bootstrap"),
    ).confidence_interval
    assert interval([FIRST, SECOND], 0.9, 500) == pytest.approx((expected.low, expected.high), rel=1e-14)


def test_interval_of_sums_resamples_rows():
    """A ratio of sums, such as a share of all blame, over every one of the N^N resamples of the rows."""
    sums = np.stack([FIRST, 1 + np.arange(len(FIRST))], axis=1)
    every = np.array([np.sum(rows, axis=0) for rows in itertools.product(sums, repeat=len(sums))])
    expected = np.quantile(every[:, 0] / every[:, 1], [0.1, 0.9])

    def ratio(drawn):
        return drawn[:, :1] / drawn[:, 1:]

    bounds = intervals_of_sums(sums, ratio, 0.8, 40_000)
    assert bounds.shape == (1, 2) and bounds[0] == pytest.approx(expected, abs=0.01)


def test_interval_is_repeatable_and_needs_two_questions():
    assert interval([FIRST], 0.95, 100) == interval([FIRST], 0.95, 100)
    assert interval([FIRST, SECOND[:1]], 0.95, 100) is None
    assert interval([FIRST], 0.95, 0) is None
    assert interval([np.ones(5)], 0.95, 100) == (1, 1)


def signs(differences):
    """All signs that an exchange of the two policies' scores can give."""
    return np.array(list(itertools.product([1, -1], repeat=len(differences)))) * differences


@pytest.mark.medium
def test_p_value_is_that_of_all_exchanges():
    other = np.array([0.0, 0.0, 0.1, 0.3, 0.5, 0.0])  # one question is equal for both
    differences = other - FIRST
    sums = signs(differences).sum(1)
    expected = (np.abs(sums) >= abs(differences.sum()) - 1e-9).mean()
    compared = compare_paired([FIRST], [other], 0.95, 10_000)
    assert 0.05 < expected < 0.5
    assert compared.p_value == pytest.approx(expected)
    assert (compared.questions, compared.first, compared.second) == (6, FIRST.mean(), other.mean())
    assert compared.difference == pytest.approx(differences.mean())
    low, high = np.quantile(resampled(differences), [0.025, 0.975])
    assert compare_paired([FIRST], [other], 0.95, 40_000).interval == pytest.approx((low, high), abs=0.01)


def test_average_weighs_data_sources_alike_in_test():
    first, second = [FIRST, SECOND], [FIRST[::-1] - 0.3, SECOND + 0.5]
    sums = [signs(b - a).mean(1) for a, b in zip(first, second, strict=True)]
    exchanged = (sums[0][:, None] + sums[1][None]) / 2
    observed = sum((b - a).mean() for a, b in zip(first, second, strict=True)) / 2
    compared = compare_paired(first, second, 0.95, 10_000)
    assert compared.difference == pytest.approx(observed)
    assert compared.p_value == pytest.approx((np.abs(exchanged) >= abs(observed) - 1e-9).mean())


def test_many_questions_are_exchanged_at_random():
    rng = np.random.default_rng(0)
    first = rng.random(400)
    same, better = first + rng.normal(0, 0.3, 400), first + rng.normal(0.1, 0.3, 400)
    least = 2 / (999 + 1)
    assert compare_paired([first], [better], 0.95, 999).p_value == pytest.approx(least)
    compared, again = (compare_paired([first], [same], 0.95, 999) for _ in "12")
    assert compared.p_value > 0.05 and compared == again


def test_one_question_that_differs_says_nothing():
    compared = compare_paired([FIRST], [FIRST + [0.5, 0, 0, 0, 0, 0]], 0.95, 100)
    assert compared.difference > 0 and compared.p_value == 1.0
    compared = compare_paired([FIRST], [FIRST.copy()], 0.95, 100)
    assert (compared.difference, compared.interval, compared.p_value) == (0, (0, 0), 1)


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_pass_at_k_equals_share_of_choices(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        attempts = [1] * correct + [0] * (samples - correct)
        choices = [any(sample) for sample in itertools.combinations(attempts, k)]
        assert pass_at_k(samples, correct, k) == pytest.approx(np.mean(choices))
