"""Means of scores by data source with bootstrap intervals, as JSON, Markdown and CSV.

Scores come as strata: a float64 array [N] for each group of questions, such as a data source. Their mean is
the mean of the groups' means: one group gives the plain mean, several give the average of data sets.
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
Intervals = dict[str, dict[str, dict[str, tuple[float, float]]]]  # the same -> (low, high)

ALL = "all"  # in place of a data source: mean over all questions
AVERAGE = "average"  # in place of a data source: mean of the data sources' means, where there are several
METRICS = ("f1", "em", "cover_em", "text_f1", "text_cover_em", "format", "answered", "searches", "tokens")
COUNTS = ("questions", "trajectories", "failed")
MIN_QUESTIONS_FOR_INTERVAL = (
    30  # with fewer questions or groups a bootstrap interval is too narrow to decide anything
)
RESAMPLED_ELEMENTS = (
    2_000_000  # number of float64 values that are resampled at a time, which bounds the memory
)


@dataclass(frozen=True)
class ScoreReport:
    """Means and bootstrap intervals; the counts are among the means."""

    means: Means
    intervals: Intervals = field(default_factory=dict)


def stratified_mean(strata: Strata) -> float:
    """Return the mean of the strata's means."""
    return float(sum(np.mean(values) for values in strata) / len(strata))


def bootstrap_interval(strata: Strata, confidence: float, resamples: int) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval (low, high) of `stratified_mean`.

    Questions are resampled within each stratum. The result equals that of ``scipy.stats.bootstrap``, whose
    import takes a second.

    Args:
        strata: Scores, float64 [N] for each stratum.
        confidence: Level of the interval, such as 0.95.
        resamples: Number of resamples; 0: no interval.

    Returns:
        None if a stratum has fewer than two questions, or `resamples` is 0.
    """
    sizes = [len(values) for values in strata]
    if not resamples or min(sizes) < 2:
        return None

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the stratified means of so many resamples, float64 [count]."""
        stratum_means = []
        for values in strata:
            indices = rng.integers(0, len(values), (count, len(values)))
            stratum_means.append(values[indices].mean(axis=1))
        means: np.ndarray = np.mean(stratum_means, axis=0)
        return means

    low, high = _bounds(draw, max(sizes), confidence, resamples)
    return float(low), float(high)


def bootstrap_intervals_of_sums(
    sums: np.ndarray, statistics: Callable[[np.ndarray], np.ndarray], confidence: float, resamples: int
) -> np.ndarray:
    """Return percentile bootstrap intervals of functions of column sums; rows are resampled.

    Args:
        sums: float64 [N, K], a row for each question or group.
        statistics: Turns the column sums of R resamples, float64 [R, K], into M statistics of each resample,
            float64 [R, M], NaN where undefined.
        confidence: Level of the intervals, such as 0.95.
        resamples: Number of resamples.

    Returns:
        float64 [M, 2]: low and high of each statistic.
    """
    probabilities = np.full(len(sums), 1 / len(sums))

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        row_counts = rng.multinomial(len(sums), probabilities, count)  # [count, N]
        return statistics(row_counts @ sums)

    return _bounds(draw, len(sums), confidence, resamples).T


def _bounds(
    draw: Callable[[int, np.random.Generator], np.ndarray], size: int, confidence: float, resamples: int
) -> np.ndarray:
    """Return percentile bounds of statistics, float64 [2] or [2, M].

    `draw` returns the statistics of a number of resamples, float64 [count] or [count, M]. A resample has
    `size` values.
    """
    rng = random_state(0, 0, "bootstrap")
    batch_size = max(1, RESAMPLED_ELEMENTS // size)
    batches = []
    for start in range(0, resamples, batch_size):
        batches.append(draw(min(batch_size, resamples - start), rng))
    tail = (1 - confidence) / 2
    bounds: np.ndarray = np.nanquantile(np.concatenate(batches), [tail, 1 - tail], axis=0)
    return bounds


def summarise(rows: Sequence[ScoredRow], resamples: int = 0, confidence: float = 0.95) -> ScoreReport:
    """Return means over questions by temperature and data source, in the order of the rows.

    A question with several trajectories counts once, with the mean of its finished ones. A question without
    a finished one is counted in `failed` only, and one with fewer than k of them is left out of pass@k.

    Args:
        rows: Rows of an evaluation.
        resamples: Number of bootstrap resamples; 0: no intervals.
        confidence: Level of the intervals.
    """
    report = ScoreReport({})
    for temperature, temperature_rows in _group_by(rows, "temperature").items():
        rows_by_source = _group_by(temperature_rows, "data_source")
        strata_by_name = {ALL: [temperature_rows]}
        if len(rows_by_source) > 1:
            strata_by_name[AVERAGE] = list(rows_by_source.values())
        for source, source_rows in rows_by_source.items():
            strata_by_name[source] = [source_rows]
        means = report.means.setdefault(temperature, {})
        intervals = report.intervals.setdefault(temperature, {})
        for name, strata in strata_by_name.items():
            means[name], intervals[name] = _summary(strata, resamples, confidence)
    return report


def _group_by(rows: Sequence[ScoredRow], column: str) -> dict[str, list[ScoredRow]]:
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def _summary(
    strata: Sequence[Sequence[ScoredRow]], resamples: int, confidence: float
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return means and intervals of the metrics over strata of rows, by metric."""
    means: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    rows = [row for stratum_rows in strata for row in stratum_rows]
    for name in metric_names(rows):
        scores = [scores_of(stratum_rows, name) for stratum_rows in strata]
        if any(len(values) == 0 for values in scores):
            continue
        means[name] = stratified_mean(scores)
        bounds = bootstrap_interval(scores, confidence, resamples)
        if bounds is not None:
            intervals[name] = bounds
    errors = [attempt["error"] for row in rows for attempt in row["trajectories"]]
    num_failed = sum(error is not None for error in errors)
    means["questions"] = float(sum(bool(row["scores"]) for row in rows))
    means["trajectories"] = float(len(errors) - num_failed)
    means["failed"] = float(num_failed)
    return means, intervals


def metric_names(rows: Sequence[ScoredRow]) -> list[str]:
    """Return the names of `METRICS` that a row has, then mean@k and pass@k."""
    names = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    return [name for name in METRICS if name in names] + [name for name in names if "@" in name]


def scores_of(rows: Sequence[ScoredRow], metric: str) -> np.ndarray:
    """Return the scores of the questions that have one, float64 [N]."""
    return np.array([row["scores"][metric] for row in rows if metric in row["scores"]], np.float64)


def unanswered_warnings(means: Means) -> list[str]:
    """Return a warning for each temperature at which no trajectory answered."""
    warnings = []
    for temperature, sources in means.items():
        if sources[ALL].get("answered") == 0:
            warnings.append(
                f"temperature {temperature}: no trajectory has an answer; teach the format (calibadv sft),"
                " or raise rollout.max_turn_length and rollout.max_length"
            )
    return warnings


def table_rows(report: ScoreReport) -> tuple[list[str], list[list[Any]]]:
    """Return headers, and one row for each temperature and data source; "-" where there is no value."""
    names: list[str] = []
    for sources in report.means.values():
        for values in sources.values():
            names += [name for name in values if name not in COUNTS and name not in names]
    rows: list[list[Any]] = []
    for temperature, sources in report.means.items():
        for source, values in sources.items():
            scores = [values.get(name, "-") for name in names]
            counts = [int(values[name]) for name in COUNTS]
            rows.append([temperature, source, *scores, *counts])
    # The column of data sources is called "data", because "questions" is the name of a count.
    return ["temperature", "data", *names, *COUNTS], rows


def markdown_table(report: ScoreReport, confidence: float) -> str:
    """Write a table whose cells are ``0.775 [0.721, 0.826]``: the mean and its interval.

    Args:
        report: Means and intervals.
        confidence: Level of the intervals, for the line below the table.
    """
    headers, rows = table_rows(report)
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    for temperature, source, *values in rows:
        bounds = report.intervals.get(temperature, {}).get(source, {})
        cells = [temperature, source.replace("|", "\\|")]
        for name, value in zip(headers[2:], values, strict=True):
            cell = f"{value:.3f}" if isinstance(value, float) else str(value)
            if name in bounds:
                low, high = bounds[name]
                cell += f" [{low:.3f}, {high:.3f}]"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    if any(bounds for sources in report.intervals.values() for bounds in sources.values()):
        lines.append("")
        lines.append(f"Means over questions; in brackets {100 * confidence:g}% bootstrap intervals.")
    return "\n".join(lines) + "\n"


def csv_table(report: ScoreReport) -> str:
    """Write three columns a metric, such as em, em_low and em_high; empty where there is no value."""
    headers, rows = table_rows(report)
    names = headers[2 : -len(COUNTS)]
    columns = ["temperature", "data", *COUNTS]
    for name in names:
        columns += [name, f"{name}_low", f"{name}_high"]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(columns)
    for temperature, source, *_ in rows:
        values = report.means[temperature][source]
        bounds = report.intervals.get(temperature, {}).get(source, {})
        cells = [temperature, source, *(int(values[name]) for name in COUNTS)]
        for name in names:
            low, high = bounds.get(name, ("", ""))
            cells += [values.get(name, ""), low, high]
        writer.writerow(cells)
    return output.getvalue()
