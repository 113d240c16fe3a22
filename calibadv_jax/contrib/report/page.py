"""The report as one HTML page that loads nothing from outside itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from calibadv_jax.contrib.report.draw import DASHES, LINE_WIDTH, draw, place, themed_svg
from calibadv_jax.contrib.report.gather import Chart, Curve, Gathered
from calibadv_jax.contrib.report.runs import Run, compare, one_metric
from calibadv_jax.metrics.console import duration, number
from calibadv_jax.record.schema import short_name


def render(gathered: Gathered, port: int) -> str:
    """Return the whole page, whose points lead to the `port` of ``calibadv inspect``."""
    series = gathered.series
    runs = [run for each in series for run in each.runs]
    settings = compare(series) if any(run.config for run in runs) else []
    evaluations = [(run.name, table) for run in runs for table in run.evaluations]
    order = [each.name for each in series]
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {"number": number, "duration": duration}
    environment.globals |= {"state": state, "css_dashes": css_dashes, "mean_of_last": mean_of_last}
    return environment.get_template("page.html").render(
        series=series,
        runs=runs,
        score="reward/mean" if runs[0].kind == "training run" else "sft/loss",
        inspect=_json({"port": port, "runs": [_kept(run) for run in runs if run.rollouts]}),
        gathered=gathered,
        kept=any(run.rollouts for run in runs),
        ended=[(each.name, run) for each in series for run in each.runs if run.steps[-1] < each.last_step],
        drawings={chart.figure.key: _drawn(chart, order) for chart in gathered.charts},
        evaluations=evaluations,
        f1=one_metric(evaluations, "f1"),
        confidences=sorted({table.confidence for _, table in evaluations if table.confidence}),
        settings=settings,
        different=[row for row in settings if row.is_different],
        without=", ".join(run.name for run in runs if not run.config),
    )


def state(run: Run) -> str:
    planned = run.setting("sft.steps" if run.kind == "cold start" else "learner.steps")
    last = run.steps[-1]
    if not isinstance(planned, int):
        return f"{last} step{'s' if last > 1 else ''}"
    return f"{last} of {planned} steps{'' if last >= planned else ': still running, or stopped early'}"


def mean_of_last(values: Mapping[int, float | None]) -> float | None:
    last = [value for _, value in sorted(values.items()) if value is not None][-10:]
    return sum(last) / len(last) if last else None


def css_dashes(index: int) -> str:
    """Return a series' stroke-dasharray: matplotlib's lengths × line width."""
    pattern = DASHES[index % len(DASHES)]
    return "none" if pattern == "-" else " ".join(f"{LINE_WIDTH * length:g}" for length in pattern[1])


def _drawn(chart: Chart, order: Sequence[str]) -> dict[str, Any]:
    """Return the drawing, the rows of its table, and the values that the page's script reads."""
    title, drawing = chart.figure.title, draw(chart, order)
    numbers, label = [], f"{title} by step."
    for panel in chart.panels:
        for curve in panel.curves:
            name = ", ".join(part for part in (panel.title, curve.name) if part)
            finite = curve.mean[np.isfinite(curve.mean)]
            ends = [number(float(value)) for value in (finite[0], finite[-1], finite.min(), finite.max())]
            label += f" {name + ': ' if name else ''}from {ends[0]} to {ends[1]}."
            numbers.append([name or title, *ends])
    svg = Markup(themed_svg(drawing, chart.figure.key, label))  # which also lays the panels out
    data = [
        {"title": panel.title, **place(drawing, axes), "curves": list(map(_points, panel.curves))}
        for axes, panel in zip(drawing.axes, chart.panels, strict=True)
    ]
    return {"svg": svg, "numbers": numbers, "data": _json(data)}


def _kept(run: Run) -> dict[str, Any]:
    command = f"calibadv inspect {shlex.quote(str(run.folder))}"
    name = short_name(run.folder)
    return {"label": run.name, "name": name, "command": command, "steps": sorted(run.rollouts)}


def _json(value: Any) -> Markup:
    """Serialise for a script element, which "<" must not end; JSON has it in strings only."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _points(curve: Curve) -> dict[str, Any]:
    arrays = {name: getattr(curve, name) for name in ("steps", "mean", "low", "high")}
    return {"name": curve.name} | {name: list(map(_short, values)) for name, values in arrays.items()}


def _short(value: float) -> float | int | None:
    """Round to four digits, a whole number to an integer; None for NaN."""
    if not np.isfinite(value):
        return None
    short = float(f"{value:.4g}") if abs(value) < 1000 else round(float(value), 1)
    return int(short) if short == int(short) and abs(short) < 1e9 else short
