"""Means of scores by data source with bootstrap intervals, as JSON, Markdown and CSV.

Scores come as strata: one float64 array [N] a group of questions, such as a data source. Their mean is the
mean of the groups' means: one group gives the plain mean, several give the average of data sets.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.records import ScoredRow

Strata = Sequence[np.ndarray]
Means = dict[str, dict[str, dict[str, float]]]  # temperature -> data source -> metric -> mean

ALL = "all"  # mean over all questions
AVERAGE = "average"  # mean of the data sources' means, where there are several
METRICS = ("f1", "em", "cover_em", "text_f1", "text_cover_em", "format", "answered", "searches", "tokens")
COUNTS = ("questions", "trajectories", "failed")
FEW = 30  # with fewer questions or groups a bootstrap interval is too narrow to decide anything
ELEMENTS = 2_000_000  # values that are resampled at a time: bounds the memory, in doubles


@dataclass(frozen=True)
class ScoreReport:
    """Means and bootstrap intervals; the counts stand among the means."""

    means: Means
    intervals: dict[str, dict[str, dict[str, tuple[float, float]]]] = field(default_factory=dict)


def stratified_mean(strata: Strata) -> float:
    return float(sum(np.mean(values) for values in strata) / len(strata))


def interval(strata: Strata, confidence: float, resamples: int) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval (low, high) of `stratified_mean`.

    Questions are resampled within each stratum. The numbers of ``scipy.stats.bootstrap``, whose import takes
    a second. None where a stratum has fewer than two questions, or `resamples` is 0.
    """
    if not resamples or min(map(len, strata)) < 2:
        return None

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        drawn = (values[rng.integers(0, len(values), (count, len(values)))] for values in strata)
        means: np.ndarray = np.mean([values.mean(axis=1) for values in drawn], axis=0)
        return means

    low, high = _bounds(draw, max(map(len, strata)), confidence, resamples)
    return float(low), float(high)


def intervals_of_sums(
    sums: np.ndarray, statistics: Callable[[np.ndarray], np.ndarray], confidence: float, resamples: int
) -> np.ndarray:
    """Return percentile bootstrap intervals of functions of column sums, float64 [M, 2]; rows are resampled.

    The `sums` are float64 [N, K], a row for each question or group; `statistics` turns the sums of R
    resamples, float64 [R, K], into float64 [R, M], NaN where undefined.
    """
    even = np.full(len(sums), 1 / len(sums))

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        return statistics(rng.multinomial(len(sums), even, count) @ sums)

    return _bounds(draw, len(sums), confidence, resamples).T


def _bounds(
    draw: Callable[[int, np.random.Generator], np.ndarray], size: int, confidence: float, resamples: int
) -> np.ndarray:
    """Return percentile bounds of the statistics that `draw` returns for resamples of `size` values each."""
    rng, batch = random_state(0, 0, "bootstrap"), max(1, ELEMENTS // size)
    drawn = [draw(min(batch, resamples - done), rng) for done in range(0, resamples, batch)]
    tail = (1 - confidence) / 2
    bounds: np.ndarray = np.nanquantile(np.concatenate(drawn), [tail, 1 - tail], axis=0)
    return bounds


def summarise(rows: Sequence[ScoredRow], resamples: int = 0, confidence: float = 0.95) -> ScoreReport:
    """Return means over questions by temperature and data source, in the order of the rows.

    A question with several trajectories counts once, with the mean of its finished ones. A question without
    a finished one is counted in `failed` only, and one with fewer than k of them is left out of pass@k.
    """
    report = ScoreReport({})
    for temperature, members in _grouped(rows, "temperature").items():
        by_source = _grouped(members, "data_source")
        average = {AVERAGE: list(by_source.values())} if len(by_source) > 1 else {}
        groups = {ALL: [members]} | average | {name: [of_source] for name, of_source in by_source.items()}
        means = report.means.setdefault(temperature, {})
        intervals = report.intervals.setdefault(temperature, {})
        for name, strata in groups.items():
            means[name], intervals[name] = _summary(strata, resamples, confidence)
    return report


def _grouped(rows: Sequence[ScoredRow], column: str) -> dict[str, list[ScoredRow]]:
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def _summary(
    strata: Sequence[Sequence[ScoredRow]], resamples: int, confidence: float
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    means: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    rows = [row for members in strata for row in members]
    for name in metric_names(rows):
        values = [scores_of(members, name) for members in strata]
        if all(map(len, values)):
            means[name] = stratified_mean(values)
            if (bounds := interval(values, confidence, resamples)) is not None:
                intervals[name] = bounds
    has_failed = [attempt["error"] is not None for row in rows for attempt in row["trajectories"]]
    means["questions"] = float(sum(bool(row["scores"]) for row in rows))
    means["trajectories"], means["failed"] = float(has_failed.count(False)), float(sum(has_failed))
    return means, intervals


def metric_names(rows: Sequence[ScoredRow]) -> list[str]:
    """Return the names of `METRICS` that a row has, then mean@k and pass@k."""
    names = {name: None for row in rows for name in row["scores"]}
    return [name for name in METRICS if name in names] + [name for name in names if "@" in name]


def scores_of(rows: Sequence[ScoredRow], metric: str) -> np.ndarray:
    """Return the scores of the questions that have one, float64 [N]."""
    return np.array([row["scores"][metric] for row in rows if metric in row["scores"]], np.float64)


def unanswered(means: Means) -> list[str]:
    """Return a line for each temperature at which no trajectory answered."""
    advice = "teach the format (calibadv sft), or raise rollout.max_turn_length and rollout.max_length"
    return [
        f"temperature {temperature}: nobody answered; {advice}"
        for temperature, sources in means.items()
        if sources[ALL].get("answered") == 0
    ]


def table_rows(report: ScoreReport) -> tuple[list[str], list[list[Any]]]:
    """Return headers, and one row for each temperature and data source; "-" where there is no value."""
    means = [values for sources in report.means.values() for values in sources.values()]
    names = list(dict.fromkeys(name for values in means for name in values if name not in COUNTS))
    rows = [
        [temperature, source, *(values.get(name, "-") for name in names)]
        + [int(values[name]) for name in COUNTS]
        for temperature, sources in report.means.items()
        for source, values in sources.items()
    ]
    # Not "questions": the data sources' column has had that name, and the count has it now.
    return ["temperature", "data", *names, *COUNTS], rows


def markdown_table(report: ScoreReport, confidence: float) -> str:
    """Write a table whose cells are ``0.775 [0.721, 0.826]``: the mean and its interval."""
    headers, rows = table_rows(report)
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    for temperature, source, *cells in rows:
        bounds = report.intervals.get(temperature, {}).get(source, {})
        shown = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
        for place, name in enumerate(headers[2:]):
            if name in bounds:
                shown[place] += " [{:.3f}, {:.3f}]".format(*bounds[name])
        lines.append("| " + " | ".join([temperature, source.replace("|", "\\|"), *shown]) + " |")
    if any(bounds for sources in report.intervals.values() for bounds in sources.values()):
        lines += ["", f"Means over questions; in brackets {100 * confidence:g}% bootstrap intervals."]
    return "\n".join(lines) + "\n"


def csv_table(report: ScoreReport) -> str:
    """Write three columns a metric, such as em, em_low and em_high; empty where there is no value."""
    headers, rows = table_rows(report)
    names = headers[2 : -len(COUNTS)]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    columns = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    writer.writerow(["temperature", "data", *COUNTS, *columns])
    for temperature, source, *_ in rows:
        values = report.means[temperature][source]
        bounds = report.intervals.get(temperature, {}).get(source, {})
        cells = [cell for name in names for cell in (values.get(name, ""), *bounds.get(name, ("", "")))]
        writer.writerow([temperature, source, *(int(values[name]) for name in COUNTS), *cells])
    return output.getvalue()
