"""Charts drawn by matplotlib: one style, for the page and for PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibadv_jax.metrics.console import number
from calibadv_jax.report.curves import Curve
from calibadv_jax.report.gather import Chart, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT = 72  # one unit of length is a pixel of the page where the chart has its natural width
WIDTH = 400
PANEL_HEIGHT, SMALL_PANEL_HEIGHT = 180, 120  # of the axes, in a chart with one panel and with several
LEFT, TOP, BOTTOM, GAP = 54, 24, 30, 30
SWATCH = 22  # of a curve's name, its sample included
LETTER = 6.4  # width of a letter of a curve's name
LINE = 14  # height of a curve's name
# Told apart by dash pattern, by name and by colour; the colours by people who confuse red and green too.
COLOURS = ("#0060ae", "#b45309", "#007a5e", "#86389b", "#6b5c05", "#be185d", "#0f6f80", "#555b66")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (3, 1.2)),
    (0, (9, 3)),
    (0, (4, 1.5, 1, 1.5, 1, 1.5)),
    (0, (1, 3)),
)
INK, MUTED, GRID, SURFACE = "#1b1f24", "#59616c", "#d9dde3", "#fefefe"
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched, and takes the page's font
    "font.size": 11,
    "path.simplify_threshold": 0.4,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "figure.facecolor": SURFACE,
    "axes.facecolor": "none",
    "savefig.facecolor": SURFACE,
}


@dataclass(frozen=True)
class Place:
    """Where a panel lies in its drawing, in units from the upper left corner, and the steps it spans."""

    left: float
    right: float
    top: float
    bottom: float
    first_step: float
    last_step: float


def draw(chart: Chart, order: Sequence[str]) -> tuple[Figure, list[Place]]:
    """The drawing and the places of its panels.

    Args:
        order: names of all series; a series has its colour and dashes by its place here.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = chart.panels
    axes_height = PANEL_HEIGHT if len(panels) == 1 else SMALL_PANEL_HEIGHT
    height = TOP + BOTTOM + len(panels) * axes_height + (len(panels) - 1) * GAP
    names = order if chart.is_by_series else _names(panels)
    right = min(170.0, SWATCH + LETTER * max(len(c.name) for p in panels for c in p.curves))
    span = _span(panels)
    places = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / UNIT, height / UNIT), dpi=UNIT)
        top_axes: Axes | None = None
        for index, panel in enumerate(panels):
            top = TOP + index * (axes_height + GAP)
            box = (
                LEFT / WIDTH,
                1 - (top + axes_height) / height,
                1 - (LEFT + right) / WIDTH,
                axes_height / height,
            )
            axes = figure.add_axes(box, sharey=top_axes)
            top_axes = top_axes or axes
            _panel(axes, panel, chart, names, span)
            if index == 0:
                _unit(axes, chart.figure.unit)
            axes.tick_params(labelbottom=index == len(panels) - 1)
            places.append(Place(LEFT, WIDTH - right, top, top + axes_height, *span))
        if top_axes is not None:
            _limits(figure.axes, chart)
        for axes, panel in zip(figure.axes, panels, strict=True):
            _name_curves(axes, panel, chart, names, axes_height)
    return figure, places


def _names(panels: Sequence[Panel]) -> list[str]:
    return list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))


def _span(panels: Sequence[Panel]) -> tuple[float, float]:
    steps = np.concatenate([curve.steps for panel in panels for curve in panel.curves])
    first, last = float(steps.min()), float(steps.max())
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _panel(axes: Axes, panel: Panel, chart: Chart, names: Sequence[str], span: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if chart.figure.kind == "stack":
        _stack(axes, panel, names)
    else:
        for curve in panel.curves:
            _line(axes, curve, names.index(curve.name))
    axes.set_xlim(*span)
    axes.margins(y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if panel.title:
        axes.set_title(panel.title, loc="right", fontsize=11, pad=6, color=INK, fontweight="bold")


def _line(axes: Axes, curve: Curve, index: int) -> None:
    """The mean, its band, and a mark at every point where there are few."""
    colour = COLOURS[index % len(COLOURS)]
    # A step that the metric was not logged at is bridged; a value that was not finite is a gap.
    axes.plot(
        curve.steps,
        curve.mean,
        color=colour,
        linestyle=DASHES[index % len(DASHES)],
        linewidth=1.8,
        marker="o" if len(curve.steps) <= 25 else None,
        markersize=3,
        label=curve.name,
    )
    if curve.has_band:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _stack(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Areas on top of each other, edged by the background so that neighbours are told apart."""
    steps = np.array(sorted({step for curve in panel.curves for step in curve.steps}))
    rows = [_at(curve, steps) for curve in panel.curves]
    shades = [COLOURS[names.index(curve.name) % len(COLOURS)] for curve in panel.curves]
    areas = axes.stackplot(steps, rows, colors=shades)
    for area, curve in zip(areas, panel.curves, strict=True):
        area.set(edgecolor=SURFACE, linewidth=0.8, alpha=0.75)
        area.set_hatch(HATCHES[names.index(curve.name) % len(HATCHES)])


HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "++++", "oooo")


def _at(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """The curve's means at other steps: 0 where it has none."""
    known = dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True))
    return np.nan_to_num(np.array([known.get(step, 0.0) for step in steps.tolist()]))


def _unit(axes: Axes, unit: str) -> None:
    axes.annotate(unit, (0, 1), xytext=(4 - LEFT, 8), xycoords="axes fraction", textcoords="offset points",
                  color=MUTED, fontsize=10.5)  # fmt: skip


def _limits(all_axes: Sequence[Axes], chart: Chart) -> None:
    """From 0 where nothing is negative; the guard's threshold where it lies within what is shown."""
    shared = all_axes[0]
    low, high = shared.get_ylim()
    if chart.figure.kind == "stack":
        low = 0.0
        high = max(float(_top(panel)) for panel in chart.panels) * 1.02 or 1.0
    elif chart.figure.from_zero and _lowest(chart.panels) >= 0:
        low = 0.0
        high = high if high > 0 else 1.0
    if low == 0 and _highest(chart.panels) == 0:
        high = 1.0  # all values are 0: an axis around 0 would show digits of nothing
    shared.set_ylim(low, high)
    if chart.limit is not None and low <= chart.limit <= high:
        for axes in all_axes:
            axes.axhline(chart.limit, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
            axes.annotate("guard", (0, chart.limit), xytext=(3, 2), color=MUTED, fontsize=10,
                          xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip


def _top(panel: Panel) -> float:
    steps = np.array(sorted({step for curve in panel.curves for step in curve.steps}))
    return float(np.sum([_at(curve, steps) for curve in panel.curves], axis=0).max())


def _lowest(panels: Sequence[Panel]) -> float:
    return min(float(np.nanmin(curve.low)) for panel in panels for curve in panel.curves)


def _highest(panels: Sequence[Panel]) -> float:
    return max(float(np.nanmax(curve.high)) for panel in panels for curve in panel.curves)


def _name_curves(axes: Axes, panel: Panel, chart: Chart, names: Sequence[str], height: float) -> None:
    """Each curve's name with a sample of it, to the right of its end, as near as the others allow."""
    curves = [curve for curve in panel.curves if curve.name]
    wanted = _ends(axes, panel, chart, height)
    for curve, at in zip(curves, spread(wanted, LINE, height), strict=True):
        index = names.index(curve.name)
        colour = COLOURS[index % len(COLOURS)]
        arguments = {"xycoords": ("axes fraction", "axes fraction"), "annotation_clip": False}
        if chart.figure.kind == "stack":
            from matplotlib.patches import Rectangle

            width = (axes.get_window_extent().width) or 1.0
            axes.add_patch(
                Rectangle(
                    (1 + 5 / width, at / height - 4 / height),
                    12 / width,
                    9 / height,
                    facecolor=colour,
                    edgecolor=SURFACE,
                    linewidth=0,
                    alpha=0.75,
                    clip_on=False,
                    hatch=HATCHES[index % len(HATCHES)],
                    transform=axes.transAxes,
                )  # fmt: skip
            )
        else:
            width = (axes.get_window_extent().width) or 1.0
            axes.plot([1 + 3 / width, 1 + 18 / width], [at / height] * 2, color=colour, linewidth=1.8,
                      linestyle=DASHES[index % len(DASHES)], clip_on=False, transform=axes.transAxes)  # fmt: skip
        axes.annotate(_short(curve.name), (1, at / height), xytext=(SWATCH, -4), textcoords="offset points",
                      fontsize=10.5, color=INK, **arguments)  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"


def _ends(axes: Axes, panel: Panel, chart: Chart, height: float) -> list[float]:
    """Height of each named curve's last value above the axes' lower edge; of its area's middle in a stack."""
    low, high = axes.get_ylim()
    ends, below = [], 0.0
    for curve in panel.curves:
        finite = curve.mean[np.isfinite(curve.mean)]
        value = float(finite[-1])
        if chart.figure.kind == "stack":
            ends.append(below + value / 2)
            below += value
        elif curve.name:
            ends.append(value)
    return [min(max((value - low) / (high - low), 0.0), 1.0) * height for value in ends]


def spread(wanted: Sequence[float], distance: float, height: float) -> list[float]:
    """Places as near as wanted that are at least `distance` apart and lie within the height if they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    floor = -np.inf
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + distance
    ceiling = height
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - distance
    return placed
