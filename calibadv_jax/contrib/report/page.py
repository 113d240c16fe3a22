"""The report as one HTML page that loads nothing from outside itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from calibadv_jax.contrib.report.draw import DASHES, Place, draw, themed_svg
from calibadv_jax.contrib.report.gather import Chart, Gathered, Panel, mean_of_last, state
from calibadv_jax.contrib.report.runs import Run, Series, compare, one_metric, score_cell
from calibadv_jax.metrics.console import duration, number
from calibadv_jax.record.schema import short_name

HERE = Path(__file__).parent


def render(series: Sequence[Series], gathered: Gathered, port: int) -> str:
    """Return the whole page, whose points lead to the `port` of ``calibadv inspect``."""
    runs = [run for each in series for run in each.runs]
    settings = compare(series) if any(run.config for run in runs) else []
    evaluations = [(run.name, table) for run in runs for table in run.evaluations]
    names = [each.name for each in series]
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True)
    environment.filters |= {"number": number, "duration": duration}
    environment.globals |= {"state": state, "css_dashes": css_dashes, "mean_of_last": mean_of_last}
    return environment.get_template("page.html").render(
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        series=series,
        runs=runs,
        score="reward/mean" if runs[0].kind == "training run" else "sft/loss",
        inspect=_json({"port": port, "runs": [_kept(run) for run in runs if run.rollouts]}),
        gathered=gathered,
        kept=any(run.rollouts for run in runs),
        ended=[(each.name, run) for each in series for run in each.runs if run.steps[-1] < each.last_step],
        sections=[
            {**vars(each.section), "charts": [_chart(chart, names) for chart in each.charts]}
            | {"constant": each.constant}
            for each in gathered.sections
        ],
        evaluations=evaluations,
        score_cell=score_cell,
        f1=one_metric(evaluations, "f1"),
        confidences=sorted({table.confidence for _, table in evaluations if table.confidence}),
        settings=settings,
        different=[row for row in settings if row.is_different],
        without=", ".join(run.name for run in runs if not run.config),
    )


def css_dashes(index: int) -> str:
    """Return a series' stroke-dasharray: matplotlib's lengths × line width."""
    pattern = DASHES[index % len(DASHES)]
    return "none" if pattern == "-" else " ".join(f"{1.8 * length:g}" for length in pattern[1])


def _chart(chart: Chart, order: Sequence[str]) -> dict[str, Any]:
    figure = chart.figure
    drawing, places = draw(chart, order)
    numbers = []
    label = f"{figure.title} by step."
    for panel in chart.panels:
        for curve in panel.curves:
            name = ", ".join(part for part in (panel.title, curve.name) if part)
            finite = curve.mean[np.isfinite(curve.mean)]
            ends = [number(float(value)) for value in (finite[0], finite[-1], finite.min(), finite.max())]
            label += f" {name + ': ' if name else ''}from {ends[0]} to {ends[1]}."
            numbers.append([name or figure.title, *ends])
    data = _json([_panel_data(place, panel) for place, panel in zip(places, chart.panels, strict=True)])
    svg = Markup(themed_svg(drawing, figure.key, label))
    return {**vars(figure), "svg": svg, "numbers": numbers, "data": data}


def _kept(run: Run) -> dict[str, Any]:
    command = f"calibadv inspect {shlex.quote(str(run.folder))}"
    names = {"label": run.name, "name": short_name(run.folder)}
    return names | {"command": command, "steps": sorted(run.rollouts)}


def _json(value: Any) -> Markup:
    """Serialise for a script element, which "<" must not end; JSON has it in strings only."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _panel_data(place: Place, panel: Panel) -> dict[str, Any]:
    """Return the panel's place, steps and curves, from which the page's script reads values."""
    curves = [
        {"name": curve.name}
        | {name: list(map(_short, getattr(curve, name))) for name in ("steps", "mean", "low", "high")}
        for curve in panel.curves
    ]
    return {"title": panel.title, **vars(place), "curves": curves}


def _short(value: float) -> float | int | None:
    """Round to four digits, a whole number to an integer; None for NaN."""
    if not np.isfinite(value):
        return None
    short = float(f"{value:.4g}") if abs(value) < 1000 else round(float(value), 1)
    return int(short) if short == int(short) and abs(short) < 1e9 else short
