"""Scores by data source with their intervals, as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibadv_jax.evaluation.intervals import interval, stratified_mean
from calibadv_jax.evaluation.records import Row

Means = dict[str, dict[str, dict[str, float]]]  # temperature -> data source -> metric -> mean
Intervals = dict[str, dict[str, dict[str, tuple[float, float]]]]

ALL = "all"  # mean over all questions
AVERAGE = "average"  # mean of the data sources' means, where there are several
METRICS = ("f1", "em", "cover_em", "text_f1", "text_cover_em", "format", "answered", "searches", "tokens")
COUNTS = ("questions", "trajectories", "failed")


@dataclass(frozen=True)
class Report:
    """Means and bootstrap intervals; the counts stand among the means."""

    means: Means
    intervals: Intervals = field(default_factory=dict)


def summarise(rows: Sequence[Row], resamples: int = 0, confidence: float = 0.95) -> Report:
    """Means over questions by temperature and data source, in the order in which they come.

    A question with several trajectories counts once, with the mean of its finished ones. A question without
    a finished one is counted in `failed` only, and one with fewer than k of them is left out of pass@k.
    """
    means: Means = {}
    intervals: Intervals = {}
    by_temperature: dict[str, list[Row]] = {}
    for row in rows:
        by_temperature.setdefault(row["temperature"], []).append(row)
    for temperature, some in by_temperature.items():
        means[temperature], intervals[temperature] = {}, {}
        by_source: dict[str, list[Row]] = {}
        for row in some:
            by_source.setdefault(row["data_source"], []).append(row)
        groups = {ALL: [some]}
        if len(by_source) > 1:
            groups[AVERAGE] = list(by_source.values())
        groups |= {source: [members] for source, members in by_source.items()}
        for name, strata in groups.items():
            means[temperature][name], intervals[temperature][name] = _of(strata, resamples, confidence)
    return Report(means, intervals)


def _of(
    strata: Sequence[Sequence[Row]], resamples: int, confidence: float
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    means: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    rows = [row for members in strata for row in members]
    for name in metric_names(rows):
        values = [scores_of(members, name) for members in strata]
        if all(map(len, values)):
            means[name] = stratified_mean(values)
            if (found := interval(values, confidence, resamples)) is not None:
                intervals[name] = found
    failed = [sum(one["error"] is not None for one in row["trajectories"]) for row in rows]
    tried = sum(len(row["trajectories"]) for row in rows)
    means["questions"] = float(sum(bool(row["scores"]) for row in rows))
    return means | {"trajectories": float(tried - sum(failed)), "failed": float(sum(failed))}, intervals


def metric_names(rows: Sequence[Row]) -> list[str]:
    """The known metrics first, then mean@k and pass@k; those that no row has are left out."""
    found = {name: None for row in rows for name in row["scores"]}
    return [name for name in METRICS if name in found] + [name for name in found if "@" in name]


def scores_of(rows: Sequence[Row], metric: str) -> np.ndarray:
    """float64 [N]: one score a question that has one."""
    return np.array([row["scores"][metric] for row in rows if metric in row["scores"]], np.float64)


def unanswered(means: Means) -> list[str]:
    """A line for each temperature at which no trajectory answered."""
    return [
        f"temperature {temperature}: nobody answered, so that these scores tell nothing of what the policy"
        " knows: it does not keep to the format (teach it: calibadv sft), or its turns are cut"
        " (rollout.max_turn_length, rollout.max_length)"
        for temperature, sources in means.items()
        if sources[ALL].get("answered") == 0
    ]


def table_rows(report: Report) -> tuple[list[str], list[list[Any]]]:
    """Headers, and one row for each temperature and data source; "-" where there is no value."""
    found = {name: None for sources in report.means.values() for one in sources.values() for name in one}
    names = [name for name in found if name not in COUNTS]
    rows = [
        [temperature, source, *(values.get(name, "-") for name in names)]
        + [int(values[name]) for name in COUNTS]
        for temperature, sources in report.means.items()
        for source, values in sources.items()
    ]
    # Not "questions": the data sources' column has had that name, and the count has it now.
    return ["temperature", "data", *names, *COUNTS], rows


def markdown_table(report: Report, confidence: float) -> str:
    """A cell is ``0.775 [0.721, 0.826]``: the mean and its interval."""
    headers, rows = table_rows(report)
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    for temperature, source, *cells in rows:
        bounds = report.intervals.get(temperature, {}).get(source, {})
        shown = [_cell(cell, bounds.get(name)) for name, cell in zip(headers[2:], cells, strict=True)]
        lines.append("| " + " | ".join([temperature, source.replace("|", "\\|"), *shown]) + " |")
    if any(bounds for sources in report.intervals.values() for bounds in sources.values()):
        lines += ["", f"Means over questions; in brackets {100 * confidence:g}% bootstrap intervals."]
    return "\n".join(lines) + "\n"


def _cell(value: Any, bounds: tuple[float, float] | None) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def csv_table(report: Report) -> str:
    """Every metric has three columns, such as em, em_low and em_high; empty where there is no value."""
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
