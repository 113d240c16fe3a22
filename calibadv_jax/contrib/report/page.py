"""The report as one HTML page that loads nothing from outside itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from calibadv_jax.contrib.report.draw import draw, place, themed_svg
from calibadv_jax.contrib.report.gather import Chart, Curve, Gathered
from calibadv_jax.contrib.report.runs import Run, compare
from calibadv_jax.metrics.console import duration, number
from calibadv_jax.rollout_store.schema import short_name


def render(gathered: Gathered, port: int) -> str:
    """Return the whole page, whose points lead to the `port` of ``calibadv inspect``."""
    series = gathered.series
    runs = [run for each in series for run in each.runs]
    settings = compare(series)
    evaluations = [(run.name, row) for run in runs for row in run.evaluations]
    order = [each.name for each in series]
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {"number": number, "duration": duration}
    environment.globals |= {"mean_of_last": mean_of_last}
    return environment.get_template("page.html").render(
        series=series,
        runs=runs,
        score="reward/mean" if any(run.values("reward/mean") for run in runs) else "sft/loss",
        inspect={"port": port, "runs": [_kept(run) for run in runs if run.rollouts]},
        gathered=gathered,
        drawings={chart.figure.key: _drawn(chart, order) for chart in gathered.charts},
        evaluations=sorted(evaluations, key=lambda pair: pair[1].questions),
        scores=dict.fromkeys(name for _, row in evaluations for name in row.cells),
        settings=settings,
        different=[key for key, values in settings.items() if len({*chain.from_iterable(values)}) > 1],
    )


def mean_of_last(values: Mapping[int, float | None]) -> float | None:
    last = [value for _, value in sorted(values.items()) if value is not None][-10:]
    return sum(last) / len(last) if last else None


def _drawn(chart: Chart, order: Sequence[str]) -> dict[str, Any]:
    """Return the drawing, the rows of its table, and the values that the page's script reads."""
    title, drawing, numbers = chart.figure.title, draw(chart, order), []
    for panel in chart.panels:
        for curve in panel.curves:
            finite = curve.mean[np.isfinite(curve.mean)].tolist()
            ends = [number(value) for value in (finite[0], finite[-1], min(finite), max(finite))]
            name = ", ".join(part for part in (panel.title, curve.name) if part)
            numbers.append([name or title, *ends])
    svg = Markup(themed_svg(drawing, chart.figure.key, f"{title} by step"))  # which also lays the panels out
    data = [
        {"title": panel.title, **place(drawing, axes), "curves": list(map(_points, panel.curves))}
        for axes, panel in zip(drawing.axes, chart.panels, strict=True)
    ]
    return {"svg": svg, "numbers": numbers, "data": data}


def _kept(run: Run) -> dict[str, Any]:
    name, command = short_name(run.folder), f"calibadv inspect {shlex.quote(str(run.folder))}"
    return {"label": run.name, "name": name, "command": command, "steps": sorted(run.rollouts)}


def _points(curve: Curve) -> dict[str, Any]:
    """Return the arrays as lists, rounded as in the table of numbers; None for NaN."""
    points: dict[str, Any] = {"name": curve.name, "steps": curve.steps.tolist()}
    for name in ("mean", "low", "high"):
        values = getattr(curve, name).tolist()
        points[name] = [float(number(value)) if np.isfinite(value) else None for value in values]
    return points
