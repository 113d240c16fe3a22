"""Means, bands and trends, compared with loops over plain lists."""

import math
import random

import numpy as np
import pytest

from calibadv_jax.contrib.report.gather import moving_mean, over_seeds, thin


def random_runs(draw: random.Random, number: int) -> list[dict[int, float | None]]:
    """Seeds that lack some steps and have some values that were not finite."""
    return [
        {
            step: None if draw.random() < 0.2 else draw.uniform(-5, 5)
            for step in range(1, 30)
            if draw.random() < 0.7
        }
        for _ in range(number)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_band_is_that_of_a_loop(seed):
    draw = random.Random(seed)
    runs = random_runs(draw, draw.randint(1, 5))
    curve = over_seeds("x", runs)
    assert curve.steps.tolist() == sorted(set().union(*runs))
    for index, step in enumerate(curve.steps.tolist()):
        there = [run[step] for run in runs if run.get(step) is not None]
        assert curve.count[index] == len(there)
        if there:
            assert curve.mean[index] == pytest.approx(sum(there) / len(there), abs=1e-12)
            assert (curve.low[index], curve.high[index]) == (min(there), max(there))
        else:
            assert np.isnan([curve.mean[index], curve.low[index], curve.high[index]]).all()


def test_band_needs_two_differing_seeds():
    assert not over_seeds("x", [{1: 0.5, 2: None}]).has_band
    assert not over_seeds("x", [{1: 0.5}, {1: 0.5}]).has_band
    assert over_seeds("x", [{1: 0.5}, {1: 0.75}]).has_band


def test_curve_without_a_finite_value_is_empty():
    assert over_seeds("x", [{}, {}]).is_empty
    assert over_seeds("x", [{1: None}]).is_empty
    assert not over_seeds("x", [{1: None, 2: 0.0}]).is_empty


@pytest.mark.parametrize("width", [1, 2, 3, 6, 50])
def test_trend_is_that_of_a_loop(width):
    draw = random.Random(width)
    values = [math.nan if draw.random() < 0.2 else draw.uniform(-5, 5) for _ in range(20)]
    before, after = (width - 1) // 2, width // 2
    result = moving_mean(np.array(values), width)
    for index, value in enumerate(values):
        around = values[max(0, index - before) : index + after + 1]
        finite = [each for each in around if not math.isnan(each)]
        expected = math.nan if math.isnan(value) else sum(finite) / len(finite)
        assert result[index] == pytest.approx(expected, nan_ok=True)


def test_trend_is_smoothed_and_mean_is_not():
    curve = over_seeds("x", [{1: 0.0, 2: 3.0, 3: 0.0}], smooth=3)
    assert curve.mean.tolist() == [0, 3, 0]
    assert curve.trend.tolist() == [1.5, 1, 1.5]


@pytest.mark.parametrize("seed", range(10))
def test_thinning_is_that_of_a_loop(seed):
    draw = random.Random(seed)
    whole = over_seeds("x", random_runs(draw, 3), smooth=3)
    thinned = thin(whole, 7)
    width = thinned.steps_per_point
    assert len(thinned.steps) <= 7 and width == math.ceil(len(whole.steps) / 7)
    for index in range(len(thinned.steps)):
        part = slice(index * width, (index + 1) * width)
        assert thinned.steps[index] == pytest.approx(np.mean(whole.steps[part]))
        for name, summary in {"mean": np.mean, "low": min, "high": max, "trend": np.mean}.items():
            finite = [each for each in getattr(whole, name)[part].tolist() if not math.isnan(each)]
            expected = summary(finite) if finite else math.nan
            assert getattr(thinned, name)[index] == pytest.approx(expected, nan_ok=True)
        assert thinned.count[index] == max(whole.count[part])


def test_no_spike_is_lost_by_thinning():
    values = dict.fromkeys(range(1, 1001), 0.0) | {617: 9.0}
    assert thin(over_seeds("x", [values]), 60).high.max() == 9.0


def test_short_curve_is_left_as_it_is():
    curve = over_seeds("x", [{1: 0.5, 2: 0.25}])
    assert thin(curve, 2) is curve
