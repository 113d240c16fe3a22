"""Values by step of several seeds, as one curve with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Means by step. NaN where no run has a finite value at a step that some run logged.

    All arrays have the shape [N] and are ordered by step.
    """

    name: str
    steps: np.ndarray  # float64
    mean: np.ndarray  # float64, over the runs that have the step
    low: np.ndarray  # float64, smallest of them
    high: np.ndarray  # float64, largest of them
    count: np.ndarray  # int64, how many they are
    trend: np.ndarray  # float64, moving mean of `mean`
    steps_per_point: int = 1

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.high > self.low))

    @property
    def is_empty(self) -> bool:
        return not np.any(np.isfinite(self.mean))


def over_seeds(name: str, runs: Sequence[Mapping[int, float | None]], smooth: int = 1) -> Curve:
    """Mean, smallest and largest over the runs, at every step that one of them logged.

    Args:
        runs: step -> value of each run; None where the value was not finite.
        smooth: points that the trend is a mean of.
    """
    steps = sorted({step for run in runs for step in run})
    values = np.full((len(runs), len(steps)), np.nan)  # [runs, N]
    for row, run in zip(values, runs, strict=True):
        for column, step in enumerate(steps):
            value = run.get(step)
            if value is not None:
                row[column] = value
    mean, low, high, count = _spread(values, values, values)
    return Curve(name, np.array(steps, np.float64), mean, low, high, count, moving_mean(mean, smooth))


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite ones of `width` values around each, fewer at both ends; NaN stays NaN."""
    if not len(values):
        return values
    before, after = (width - 1) // 2, width // 2
    padded = np.pad(values, (before, after), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)  # [N, width]
    mean, *_ = _spread(windows.T, windows.T, windows.T)
    return np.where(np.isfinite(values), mean, np.nan)


def thin(curve: Curve, max_points: int) -> Curve:
    """At most `max_points` points: each stands for as many steps in a row, the last one for those left.

    The mean is over its steps, the band from the smallest to the largest value of any run at any of them, so
    that no spike is lost.
    """
    width = -(-len(curve.steps) // max_points)
    if width <= 1:
        return curve

    def split(values: np.ndarray) -> np.ndarray:  # [width, points], NaN at the end
        values = values.astype(np.float64)
        filled = np.pad(values, (0, -len(values) % width), constant_values=np.nan)
        return filled.reshape(-1, width).T

    mean, low, high, _ = _spread(split(curve.mean), split(curve.low), split(curve.high))
    count = np.nanmax(split(curve.count), axis=0).astype(np.int64)
    trend, *_ = _spread(*[split(curve.trend)] * 3)
    steps = np.nanmean(split(curve.steps), axis=0)
    return Curve(curve.name, steps, mean, low, high, count, trend, width)


def _spread(
    values: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum, maximum and number of the finite values of each column; NaN where there is none."""
    is_finite = np.isfinite(values)
    count = is_finite.sum(axis=0)
    total = np.where(is_finite, values, 0.0).sum(axis=0)
    mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    low = np.where(np.isfinite(lowest), lowest, np.inf).min(axis=0, initial=np.inf)
    high = np.where(np.isfinite(highest), highest, -np.inf).max(axis=0, initial=-np.inf)
    return mean, np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan), count
