"""The report as one HTML page that asks for nothing outside itself."""

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
from calibadv_jax.contrib.report.gather import Chart, Curve, Gathered, mean_of_last, state
from calibadv_jax.contrib.report.runs import Run, Series, cell, compare, in_one
from calibadv_jax.metrics.console import number
from calibadv_jax.record.schema import short_name

HERE = Path(__file__).parent


def render(series: Sequence[Series], gathered: Gathered, port: int) -> str:
    """The whole page.

    Args:
        port: of ``calibadv inspect``, to which points lead.
    """
    runs = [run for one in series for run in one.runs]
    settings = compare(series) if any(run.config for run in runs) else []
    evaluations = [(run.name, table) for run in runs for table in run.evaluations]
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True)
    return environment.get_template("page.html").render(
        title=_title(series),
        summary=_summary(series),
        style=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
        scores=["reward"] if runs[0].kind == "training run" else ["loss"],
        runs=_run_rows(series),
        inspect=_json({"port": port, "runs": [_kept(run) for run in runs if run.rollouts]}),
        notes=_notes(series, gathered),
        sections=[
            {
                "key": one.section.key,
                "title": one.section.title,
                "text": one.section.text,
                "charts": [_chart(chart, [named.name for named in series]) for chart in one.charts],
                "constant": "; ".join(f"{title} {number(value)}" for title, value in one.constant.items()),
            }
            for one in gathered.sections
        ],
        evaluations=[
            {
                "run": run,
                "title": table.title,
                "metrics": table.metrics,
                "rows": [
                    (name, [cell(metric, scores.get(metric)) for metric in table.metrics])
                    for name, scores in table.rows.items()
                ],
            }
            for run, table in evaluations
        ],
        f1=in_one(evaluations, "f1"),
        confidences=sorted({table.confidence for _, table in evaluations if table.confidence}),
        series=[one.name for one in series],
        settings=settings,
        different=[row for row in settings if row.is_different],
        settings_text=_settings_text(runs),
    )


def _title(series: Sequence[Series]) -> str:
    if len(series) > 2:
        return f"Report: {len(series)} configs"
    return "Report: " + " and ".join(one.name for one in series)


def _summary(series: Sequence[Series]) -> str:
    number_of_runs = sum(len(one.runs) for one in series)
    if number_of_runs == 1:
        return f"One run: {series[0].runs[0].folder}"
    if len(series) == 1:
        return f"{number_of_runs} runs of one config with the seeds {series[0].seeds}."
    parts = [f"{one.name} ({len(one.runs)} run{'s' if len(one.runs) > 1 else ''})" for one in series]
    return f"{number_of_runs} runs of {len(series)} configs: {', '.join(parts)}."


def _run_rows(series: Sequence[Series]) -> list[dict[str, Any]]:
    metric = "reward/mean" if series[0].runs[0].kind == "training run" else "sft/loss"
    rows = []
    for index, one in enumerate(series):
        for run in one.runs:
            values = run.values(metric)
            first = mean_of_last(dict(sorted(values.items())[:10]))
            seconds = sum(value or 0.0 for value in run.values("timing_s/step").values())
            seed = run.setting("run.seed")
            rows.append(
                {
                    "index": index,
                    "dashes": css_dashes(index),
                    "series": one.name,
                    "name": run.name,
                    "seed": "?" if seed is None else seed,
                    "state": state(run),
                    "starts": run.num_starts or "?",
                    "time": _duration(seconds),
                    "scores": [_plain(first), _plain(mean_of_last(values))],
                    "kept": f"{len(run.rollouts)} steps" if run.rollouts else "none",
                }
            )
    return rows


def css_dashes(index: int) -> str:
    """The dash pattern of a series for stroke-dasharray; the lengths are those of matplotlib × line width."""
    pattern = DASHES[index % len(DASHES)]
    return "none" if pattern == "-" else " ".join(f"{1.8 * length:g}" for length in pattern[1])


def _notes(series: Sequence[Series], gathered: Gathered) -> list[str]:
    notes = ["Point at a figure, or press the arrow keys on it, to read its values."]
    if any(run.rollouts for one in series for run in one.runs):
        notes.append(
            "Click a point, or press Enter on it, to open the trajectories of its step in calibadv inspect."
        )
    if any(len(one.runs) > 1 for one in series):
        notes.append("Curves are means over seeds; the band spans from the lowest to the highest of them.")
    for one in series:
        ends = {run.name: run.steps[-1] for run in one.runs}
        longest = max(ends.values())
        notes += [
            f"The curve {one.name} is without {name} after step {end}, where that ends."
            for name, end in ends.items()
            if end < longest
        ]
    if gathered.smooth > 1:
        notes.append(
            f"Strong lines are means of {gathered.smooth} steps; numbers, bands and faint lines are not"
            " smoothed."
        )
    if gathered.steps_per_point > 1:
        notes.append(
            f"A point is the mean of up to {gathered.steps_per_point} steps; the band spans all their values."
        )
    if gathered.left_out:
        titles = ", ".join(figure.title for figure in gathered.left_out)
        is_kept = any(run.rollouts for one in series for run in one.runs)
        why = "the kept trajectories do not hold what they show" if is_kept else "no trajectories were kept"
        notes.append(f"Left out, because {why}: {titles}.")
    return notes


def _chart(chart: Chart, order: Sequence[str]) -> dict[str, Any]:
    figure = chart.figure
    drawing, places = draw(chart, order)
    curves = [(panel.title, curve) for panel in chart.panels for curve in panel.curves]
    label = f"{figure.title} by step. " + " ".join(_in_words(*one) for one in curves)
    data = [_panel_data(place, chart, index) for index, place in enumerate(places)]
    return {
        "key": figure.key,
        "title": figure.title,
        "text": figure.text,
        "svg": Markup(themed_svg(drawing, figure.key, label)),
        "numbers": [[_full_name(*one) or figure.title, *_ends(one[1])] for one in curves],
        "data": _json(data),
    }


def _kept(run: Run) -> dict[str, Any]:
    """What the page's script needs to lead to a run's trajectories."""
    command = f"calibadv inspect {shlex.quote(str(run.folder))}"
    return {
        "label": run.name,
        "name": short_name(run.folder),
        "command": command,
        "steps": sorted(run.rollouts),
    }


def _json(value: Any) -> Markup:
    """For a script element, which "<" must not end; JSON has it in strings only."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _panel_data(place: Place, chart: Chart, index: int) -> dict[str, Any]:
    """What the page's script needs to read values: the panel's place, its steps and curves."""
    panel = chart.panels[index]
    return {
        "title": panel.title,
        "left": place.left,
        "right": place.right,
        "top": place.top,
        "bottom": place.bottom,
        "first": place.first_step,
        "last": place.last_step,
        "curves": [
            {
                "name": curve.name,
                "steps": [_short(step) for step in curve.steps],
                "mean": [_short(value) for value in curve.mean],
                "low": [_short(value) for value in curve.low],
                "high": [_short(value) for value in curve.high],
            }
            for curve in panel.curves
        ],
    }


def _in_words(panel: str, curve: Curve) -> str:
    first, last, *_ = _ends(curve)
    name = _full_name(panel, curve)
    return f"{name + ': ' if name else ''}from {first} to {last}."


def _full_name(panel: str, curve: Curve) -> str:
    return ", ".join(part for part in (panel, curve.name) if part)


def _ends(curve: Curve) -> list[str]:
    """First, last, smallest and largest finite mean."""
    finite = curve.mean[np.isfinite(curve.mean)]
    return [_plain(float(value)) for value in (finite[0], finite[-1], finite.min(), finite.max())]


def _settings_text(runs: Sequence[Run]) -> str:
    text = "As resolved at each run's last start. Paths in the run's folder start with ${run.dir}."
    without = [run.name for run in runs if not run.config]
    return f"{text} Without a kept config: {', '.join(without)}." if without else text


def _short(value: float) -> float | int | None:
    """Four digits, a whole number as an integer; None for NaN."""
    if not np.isfinite(value):
        return None
    short = float(f"{value:.4g}") if abs(value) < 1000 else round(float(value), 1)
    return int(short) if short == int(short) and abs(short) < 1e9 else short


def _plain(value: float | None) -> str:
    return "-" if value is None else number(value)


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
