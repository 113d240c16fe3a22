"""Curves of a metric over the steps: means over seeds, moving means, fewer points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Values by step; NaN where no run had a finite one. Every array has one element a point, [N]."""

    name: str
    steps: np.ndarray  # float64
    mean: np.ndarray  # float64, mean over the runs that have the step
    low: np.ndarray  # float64, smallest value of these runs
    high: np.ndarray  # float64, largest value of these runs
    trend: np.ndarray  # float64, moving mean of `mean`

    @property
    def has_band(self) -> bool:
        """Whether the runs differ anywhere."""
        return bool(np.any(self.high > self.low))


def over_seeds(name: str, runs: Sequence[Mapping[int, float | None]], smooth: int = 1) -> Curve:
    """Return mean, smallest and largest value over the runs at every logged step.

    Args:
        name: name of the curve.
        runs: step -> value of each run; None: the value was not finite.
        smooth: number of steps that the trend averages.
    """
    steps = sorted({step for run in runs for step in run})
    rows = [[run.get(step) for step in steps] for run in runs]
    values = np.array(rows, np.float64)  # [runs, N]; None becomes NaN
    mean = _summarise_finite(np.ma.mean, values)
    return Curve(
        name,
        steps=np.array(steps, np.float64),
        mean=mean,
        low=_summarise_finite(np.ma.min, values),
        high=_summarise_finite(np.ma.max, values),
        trend=moving_mean(mean, smooth),
    )


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the finite values among `width` around each, fewer at both ends.

    Args:
        values: float64 [N].
        width: number of values, at least 1.

    Returns:
        float64 [N]; NaN where the value itself is not finite.
    """
    if len(values) == 0:
        return values
    padded = np.pad(values, ((width - 1) // 2, width // 2), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width).T  # [width, N]
    means = _summarise_finite(np.ma.mean, windows)
    return np.where(np.isfinite(values), means, np.nan)


def thin(curve: Curve, max_points: int) -> Curve:
    """Return at most `max_points` points: means of as many steps each, with a band of all their values."""
    width = max(1, -(-len(curve.steps) // max_points))  # steps of a point, rounded up

    def summarise(summary: Any, values: np.ndarray) -> np.ndarray:
        padded = np.pad(values, (0, -len(values) % width), constant_values=np.nan)
        return _summarise_finite(summary, padded.reshape(-1, width).T)

    return Curve(
        curve.name,
        steps=summarise(np.ma.mean, curve.steps),
        mean=summarise(np.ma.mean, curve.mean),
        low=summarise(np.ma.min, curve.low),
        high=summarise(np.ma.max, curve.high),
        trend=summarise(np.ma.mean, curve.trend),
    )


def _summarise_finite(summary: Any, values: np.ndarray) -> np.ndarray:
    """Summarise each column's finite values; NaN where there is none.

    Args:
        summary: a function of masked arrays, such as np.ma.mean.
        values: float64 [rows, N].

    Returns:
        float64 [N].
    """
    return summary(np.ma.masked_invalid(values), axis=0).filled(np.nan)
