"""The report as one HTML page that loads nothing from outside itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from calibadv_jax.config.keys import is_among
from calibadv_jax.contrib.report.curves import Curve
from calibadv_jax.contrib.report.draw import draw, place, themed_svg
from calibadv_jax.contrib.report.gather import Chart, Gathered
from calibadv_jax.contrib.report.results import results, title
from calibadv_jax.contrib.report.runs import IGNORED, Run, Series, compare
from calibadv_jax.metrics.console import duration, number
from calibadv_jax.rollout_store.schema import run_name

LAST_VALUES = 10  # values that `mean_of_last` averages


def render(gathered: Gathered, port: int) -> str:
    """Return the whole page.

    Args:
        gathered: the charts.
        port: port of ``calibadv inspect``, to which the points of the charts lead.
    """
    runs = [run for series in gathered.series for run in series.runs]
    order = [series.name for series in gathered.series]
    settings = compare(gathered.series)
    differing, other_differences = differences(settings)
    series_results = results(gathered.series)
    evaluations = [(run.name, row) for run in runs for row in run.evaluations]
    # Names of the scores of all evaluations, each once.
    scores = dict.fromkeys(name for _, row in evaluations for name in row.cells)
    has_rewards = any(run.values("reward/mean") for run in runs)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["number"] = number
    environment.filters["duration"] = duration
    environment.filters["rounded"] = rounded
    environment.globals["mean_of_last"] = mean_of_last
    return environment.get_template("page.html").render(
        series=gathered.series,
        runs=runs,
        score="reward/mean" if has_rewards else "sft/loss",
        inspect={"port": port, "runs": [_inspected(run) for run in runs if run.rollouts]},
        gathered=gathered,
        early_ends=early_ends(gathered.series),
        drawings={chart.figure.key: _drawn(chart, order) for chart in gathered.charts},
        evaluations=sorted(evaluations, key=lambda pair: pair[1].questions),
        scores=scores,
        settings=settings,
        differing=differing,
        other_differences=other_differences,
        results=series_results,
        title=title(series_results),
    )


def rounded(value: float) -> str:
    """Format with three places, or four significant digits above 10."""
    return number(value) if abs(value) >= 10 else f"{value:.3f}"


def differences(settings: Mapping[str, Sequence[Sequence[str]]]) -> tuple[list[str], list[str]]:
    """Return the keys whose values differ: those that make another experiment, and the others.

    Args:
        settings: result of `compare`.

    Returns:
        Keys that tell the series apart; and keys such as seeds and paths, which may differ between the runs
        of one series too.
    """
    differing = []
    others = []
    for key, values_by_series in settings.items():
        distinct_values = {value for values in values_by_series for value in values}
        if len(distinct_values) < 2:
            continue
        if is_among(IGNORED, key):
            others.append(key)
        else:
            differing.append(key)
    return differing, others


def mean_of_last(values: Mapping[int, float | None]) -> float | None:
    """Return the mean of the last finite values; None where there is none."""
    finite = [value for _, value in sorted(values.items()) if value is not None]
    last = finite[-LAST_VALUES:]
    return sum(last) / len(last) if last else None


def early_ends(series: Sequence[Series]) -> list[str]:
    """Return a sentence for each run that has fewer steps than another run of its curve."""
    sentences = []
    for group in series:
        last_steps = {run.name: max(run.rows) for run in group.runs}
        longest = max(last_steps.values())
        for name, last_step in last_steps.items():
            if last_step < longest:
                sentences.append(
                    f"Run {name} ends at step {last_step}; after it, its curve shows only the runs that go"
                    " on."
                )
    return sentences


def _drawn(chart: Chart, order: Sequence[str]) -> dict[str, Any]:
    """Return the drawing, the rows of its table, and the values that the page's script reads."""
    title = chart.figure.title
    numbers = []
    for panel in chart.panels:
        for curve in panel.curves:
            finite = curve.mean[np.isfinite(curve.mean)].tolist()
            name = ", ".join(part for part in (panel.title, curve.name) if part)
            numbers.append(
                [
                    name or title,
                    number(finite[0]),
                    number(finite[-1]),
                    number(min(finite)),
                    number(max(finite)),
                ]
            )
    drawing = draw(chart, order)
    # Saving the drawing also lays the panels out, which `place` needs.
    svg = Markup(themed_svg(drawing, chart.figure.key, f"{title} by step"))
    data = []
    for axes, panel in zip(drawing.axes, chart.panels, strict=True):
        curves = [_points(curve) for curve in panel.curves]
        data.append({"title": panel.title, **place(drawing, axes), "curves": curves})
    return {"svg": svg, "numbers": numbers, "data": data}


def _inspected(run: Run) -> dict[str, Any]:
    """Return what the page's script needs to open a kept step of a run in ``calibadv inspect``."""
    return {
        "label": run.name,
        "name": run_name(run.folder),
        "command": f"calibadv inspect {shlex.quote(str(run.folder))}",
        "steps": sorted(run.rollouts),
    }


def _points(curve: Curve) -> dict[str, Any]:
    """Return the arrays as lists, rounded as in the table of numbers; None for NaN."""
    points: dict[str, Any] = {"name": curve.name, "steps": curve.steps.tolist()}
    for name in ("mean", "low", "high"):
        values = getattr(curve, name).tolist()
        points[name] = [float(number(value)) if np.isfinite(value) else None for value in values]
    return points
