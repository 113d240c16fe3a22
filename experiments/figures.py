"""The figures of experiments/evidence.md, drawn in the style of `calibadv report`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibadv_jax.contrib.report.curves import over_seeds
from calibadv_jax.contrib.report.draw import COLOURS, DASHES, LINE_WIDTH, MUTED, SMALL_TEXT, STYLE, UNIT, draw
from calibadv_jax.contrib.report.figures import Figure as Description
from calibadv_jax.contrib.report.gather import Chart, Panel
from experiments.arms import FOUR, METHODS, Arm
from experiments.measures import REWARD, SEARCHES, WINDOW, finite, mean_interval
from experiments.results import Result, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, ROW = 300, 170  # of a sweep's panel, in units of `draw`
MARKERS = "osD^vPX*<>p"  # of a scatter
DODGE = 0.006  # share of the axis by which neighbouring intervals are moved apart
CURVES = {"rewards": (REWARD, "reward"), "searches": (SEARCHES, "searches")}  # name -> metric, unit
UPDATE_TITLES = {"": "5 updates a step", "-1update": "1 update a step"}

Points = Mapping[float, Sequence[Result]]  # place on the x axis -> the seeds there


def figures(results: Results) -> dict[str, Figure]:
    """Draw all figures by name; one without results is left out."""
    figures: dict[str, Figure] = {}
    columns = {}
    for updates, title in UPDATE_TITLES.items():
        lines = {method: _by_rate(results, method, updates) for method in FOUR}
        lines = {method: points for method, points in lines.items() if points}
        if lines:
            columns[title] = lines
    if columns:
        figures["frontier"] = sweep(columns, "learning rate in 1e-3")
    usual = {arm: runs for arm, runs in results.items() if not arm.updates}
    for name, panels in (("rewards", _of_rates(_pair(usual))), ("searches", _families(usual))):
        metric = CURVES[name][0]
        if any(finite(result.run.values(metric)) for runs in usual.values() for result in runs):
            figures[name] = curves(panels, name)
    lambdas = _by_lambda(results)
    if lambdas:
        figures["lambda"] = sweep(lambdas, "λ")
    return figures


def _by_rate(results: Results, method: str, updates: str) -> Points:
    arms = [arm for arm in results if arm.method == method and arm.updates == updates]
    return {1000 * float(arm.lr): results[arm] for arm in sorted(arms, key=lambda arm: float(arm.lr))}


def _by_lambda(results: Results) -> dict[str, dict[str, Points]]:
    """Return a column for each learning rate at which λ was varied, GRPO of that rate beside it."""
    columns: dict[str, dict[str, Points]] = {}
    for rate in dict.fromkeys(arm.lr for arm in results if "lambda" in arm.method):
        arms = [
            arm for arm in results if arm.lr == rate and arm.method.startswith("calibadv") and not arm.updates
        ]
        points = {float(arm.method.partition("lambda")[2] or 1): results[arm] for arm in arms}
        lines: dict[str, Points] = {"calibadv": dict(sorted(points.items()))}
        plain = results.get(Arm("grpo", rate))
        if plain:
            lines["grpo"] = dict.fromkeys((min(points), max(points)), plain)
        columns[f"learning rate {rate}"] = lines
    return columns


def _pair(results: Results) -> dict[Arm, Sequence[Result]]:
    return {arm: runs for arm, runs in results.items() if arm.method in ("grpo", "calibadv")}


def _of_rates(results: Results) -> dict[str, Results]:
    rates = sorted({arm.lr for arm in results}, key=float)
    return {
        f"learning rate {rate}": {arm: runs for arm, runs in results.items() if arm.lr == rate}
        for rate in rates
    }


def _families(results: Results) -> dict[str, Results]:
    """Return title -> GRPO, CalibAdv and its halves; and where λ was varied, GRPO and every λ."""
    panels: dict[str, Results] = {}
    for title, arms in _of_rates(results).items():
        panels[title] = {arm: runs for arm, runs in arms.items() if arm.method in FOUR}
        lambdas = {arm: runs for arm, runs in arms.items() if "lambda" in arm.method}
        if lambdas:
            panels[f"{title}: λ"] = _pair(arms) | lambdas
    return {title: arms for title, arms in panels.items() if arms}


def curves(panels: Mapping[str, Results], name: str) -> Figure:
    """Draw one of CURVES by step, in panels: mean of the seeds, band over all of them.

    Args:
        panels: title -> what is shown there.
    """
    metric, unit = CURVES[name]
    drawn = []
    for title, arms in panels.items():
        lines = [
            over_seeds(arm.method, [result.run.values(metric) for result in runs], WINDOW)
            for arm, runs in arms.items()
        ]
        lines = [line for line in lines if np.isfinite(line.mean).any()]
        if lines:
            drawn.append(Panel(title, tuple(lines)))
    there = {arm.method for arms in panels.values() for arm in arms}
    order = [method for method in dict.fromkeys((*FOUR, *METHODS)) if method in there]
    description = Description(name, "", "", unit, {metric: ""})
    return draw(Chart(description, tuple(drawn)), order)


def sweep(columns: Mapping[str, Mapping[str, Points]], x_name: str) -> Figure:
    """Draw the share of seeds that collapsed, and final F1 with its interval, over a setting.

    Args:
        columns: title -> method -> points.
    """
    import matplotlib
    from matplotlib.figure import Figure

    order = [*FOUR, *(name for lines in columns.values() for name in lines if name not in FOUR)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(COLUMN * len(columns) / UNIT + 1, 2 * ROW / UNIT + 1), dpi=UNIT, layout="tight"
        )
        axes = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
        for column, (title, lines) in enumerate(columns.items()):
            top, bottom = axes[:, column]
            top.set_title(title, fontsize=12, fontweight="bold")
            places = sorted({x for points in lines.values() for x in points})
            for index, (method, points) in enumerate(lines.items()):
                style = _line_style(order.index(method), method)
                reach = places[-1] - places[0] or 1.0
                xs = [x + DODGE * reach * (2 * index - len(lines) + 1) for x in points]
                top.plot(xs, [_collapsed(runs) for runs in points.values()], **style)
                _with_intervals(bottom, xs, list(points.values()), style)
            top.set_ylim(-0.05, 1.05)
            bottom.set_ylim(0, 1)
            bottom.set_xticks(places, [f"{x:g}" for x in places])
            bottom.set_xlabel(x_name, color=MUTED, fontsize=SMALL_TEXT)
        axes[0, 0].set_ylabel("share of seeds\nthat collapsed", color=MUTED, fontsize=SMALL_TEXT)
        axes[1, 0].set_ylabel("final held-out F1", color=MUTED, fontsize=SMALL_TEXT)
        axes[0, 0].legend(fontsize=SMALL_TEXT, frameon=False)
    return figure


def scatter(points: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> Figure:
    """Draw one mark for each run, with a line where x is 0.

    Args:
        points: method -> (x, y) of its runs.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * COLUMN / UNIT, 2 * ROW / UNIT), dpi=UNIT, layout="tight")
        axes = figure.subplots()
        axes.axvline(0, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        for index, (method, places) in enumerate(points.items()):
            xs, ys = zip(*places, strict=True)
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            axes.scatter(xs, ys, s=50, alpha=0.85, color=colour, marker=marker, label=method)
        axes.set_xlabel(x_name, color=MUTED, fontsize=SMALL_TEXT)
        axes.set_ylabel(y_name, color=MUTED, fontsize=SMALL_TEXT)
        axes.legend(fontsize=SMALL_TEXT, frameon=False)
    return figure


def _line_style(index: int, name: str) -> dict[str, Any]:
    style = {"color": COLOURS[index], "linestyle": DASHES[index], "linewidth": LINE_WIDTH}
    return style | {"marker": "o", "markersize": 4, "label": name}


def _collapsed(runs: Sequence[Result]) -> float:
    return statistics.fmean(result.collapse is not None for result in runs)


def _with_intervals(
    axes: Any, xs: Sequence[float], points: Sequence[Sequence[Result]], style: dict[str, Any]
) -> None:
    """Draw means over the seeds, and Student's t intervals where there are several."""
    axes.plot(xs, [statistics.fmean(result.final_f1 for result in runs) for runs in points], **style)
    for x, runs in zip(xs, points, strict=True):
        interval = mean_interval([result.final_f1 for result in runs])
        if interval:
            axes.plot([x, x], interval, color=style["color"], linewidth=1)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG with text as text; the same figure gives the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, format="svg", metadata={"Date": None})
