"""Charts drawn by matplotlib: one style, for the page and for PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibadv_jax.metrics.console import number
from calibadv_jax.report.curves import Curve
from calibadv_jax.report.gather import MAX_MARKS, Chart, Panel
from calibadv_jax.report.settings import LONGEST_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT = 72  # one unit of length is a pixel of the page where the chart has its natural width
WIDTH = 400
PANEL_HEIGHT, SMALL_PANEL_HEIGHT = 190, 125  # of the axes, in a chart with one panel and with several
LEFT, TOP, BOTTOM, GAP = 54, 24, 30, 30
SWATCH = 22  # of a curve's name, its sample included
SMALL_TEXT = 11.5
LINE_WIDTH = 1.8
LINE = 15  # height of a curve's name
# Where an axis may be cut: above values that are SPIKE times the percentile USUAL.
USUAL, SPIKE = 95, 2.0
LEAST_SPAN = 0.02  # of an axis, as a share of the value in its middle
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
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")  # dots would take 150 kB each
INK, MUTED, GRID, SURFACE = "#1b1f24", "#59616c", "#d9dde3", "#fefefe"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched, and takes the page's font
    "text.parse_math": False,  # names of runs and data sources may hold dollar signs
    "font.size": 12,
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
    "xtick.labelsize": SMALL_TEXT,
    "ytick.labelsize": SMALL_TEXT,
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
    names = order if chart.is_by_series and len(order) > 1 else _names(panels)
    longest = max(_width(_short(curve.name)) for panel in panels for curve in panel.curves)
    right = SWATCH + longest + 2 if longest else 12.0
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
            is_last = index == len(panels) - 1
            _axis_names(axes, chart.figure.unit, index == 0, is_last)
            axes.tick_params(labelbottom=is_last)
            places.append(Place(LEFT, WIDTH - right, top, top + axes_height, *span))
        if top_axes is not None:
            _limits(figure.axes, chart)
        for axes, panel in zip(figure.axes, panels, strict=True):
            _name_curves(axes, panel, chart, names, (WIDTH - LEFT - right, axes_height))
    return figure, places


def _names(panels: Sequence[Panel]) -> list[str]:
    return list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))


def _width(text: str) -> float:
    """Of a curve's name in units, in matplotlib's own font, which is wider than most that a page may have."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(
        text or " ", FontProperties(size=SMALL_TEXT), ismath=False
    )
    return width if text else 0.0


def _span(panels: Sequence[Panel]) -> tuple[float, float]:
    steps = np.concatenate([curve.steps for panel in panels for curve in panel.curves])
    first, last = float(steps.min()), float(steps.max())
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _panel(axes: Axes, panel: Panel, chart: Chart, names: Sequence[str], span: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if chart.figure.kind == "stack":
        _stack(axes, panel, names)
    else:
        alpha = min(0.18, 0.5 / len(panel.curves))
        for curve in panel.curves:
            _line(axes, curve, names.index(curve.name), alpha)
    axes.set_xlim(*span)
    axes.margins(y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if panel.title:
        axes.set_title(panel.title, loc="center", fontsize=12, pad=6, color=INK, fontweight="bold")


def _line(axes: Axes, curve: Curve, index: int, alpha: float) -> None:
    """The mean, its band with the opacity `alpha`, and a mark at every point where there are few."""
    colour = COLOURS[index % len(COLOURS)]
    # A step that the metric was not logged at is bridged; a value that was not finite is a gap.
    if not curve.has_band and not np.array_equal(curve.trend, curve.mean, equal_nan=True):
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.8, alpha=0.4)
    axes.plot(
        curve.steps,
        curve.trend,
        color=colour,
        linestyle=DASHES[index % len(DASHES)],
        linewidth=LINE_WIDTH,
        marker="o" if len(curve.steps) <= MAX_MARKS else None,
        markersize=3,
        label=curve.name,
    )
    if curve.has_band:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=alpha, linewidth=0)


def _stack(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Areas on top of each other, edged by the background so that neighbours are told apart."""
    steps = _steps(panel)
    areas = axes.stackplot(steps, [_at(curve, steps) for curve in panel.curves])
    for area, curve in zip(areas, panel.curves, strict=True):
        _shade(area, names.index(curve.name))


def _at(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """The curve's means at other steps: 0 where it has none."""
    known = dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True))
    return np.nan_to_num(np.array([known.get(step, 0.0) for step in steps.tolist()]))


def _axis_names(axes: Axes, unit: str, is_first: bool, is_last: bool) -> None:
    """The unit above the upper left corner of the first panel, "step" below the lower left of the last."""
    if is_first:
        axes.annotate(
            unit, (0, 1), (4 - LEFT, 8), "axes fraction", "offset points", color=MUTED, fontsize=SMALL_TEXT
        )
    if is_last:
        axes.annotate(
            "step",
            (0, 0),
            (4 - LEFT, -15),
            "axes fraction",
            "offset points",
            color=MUTED,
            fontsize=SMALL_TEXT,
        )


def _limits(all_axes: Sequence[Axes], chart: Chart) -> None:
    """From 0 where nothing is negative; the guard's threshold where it lies within what is shown."""
    low, high = all_axes[0].get_ylim()
    tops = np.concatenate([_tops(chart, panel) for panel in chart.panels])
    lowest = min(float(np.nanmin(curve.low)) for panel in chart.panels for curve in panel.curves)
    if chart.figure.kind == "stack" or (chart.figure.from_zero and lowest >= 0):
        low = 0.0
    if chart.figure.kind == "stack":
        high = float(tops.max()) * 1.02
    usual = float(np.percentile(tops, USUAL))
    if chart.figure.cuts_spikes and tops.max() > SPIKE * usual > 0:
        high = 1.2 * usual
        _note(
            all_axes[0],
            f"up to {number(float(tops.max()))}",
            (0.5, 1),
            ("axes fraction", "axes fraction"),
            -12,
        )
    middle = (low + high) / 2
    least = abs(middle) * LEAST_SPAN / 2  # narrower, and its numbers of four digits would all be the same
    low, high = min(low, middle - least), max(high, middle + least)
    all_axes[0].set_ylim(low, high if high > low else low + 1)
    if chart.limit is not None and low <= chart.limit <= high:
        for axes in all_axes:
            axes.axhline(chart.limit, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
            _note(axes, "guard", (0, chart.limit), ("axes fraction", "data"), 2)


def _note(axes: Axes, text: str, at: tuple[float, float], system: tuple[str, str], lift: float) -> None:
    axes.annotate(text, at, (3, lift), system, "offset points", color=MUTED, fontsize=SMALL_TEXT)  # type: ignore[arg-type]


def _tops(chart: Chart, panel: Panel) -> np.ndarray:
    """float64 [N]: the highest finite value of each step."""
    if chart.figure.kind == "stack":
        return np.sum([_at(curve, _steps(panel)) for curve in panel.curves], axis=0)
    highs = np.concatenate([curve.high for curve in panel.curves])
    return highs[np.isfinite(highs)]


def _steps(panel: Panel) -> np.ndarray:
    return np.array(sorted({step for curve in panel.curves for step in curve.steps.tolist()}))


def _name_curves(
    axes: Axes, panel: Panel, chart: Chart, names: Sequence[str], size: tuple[float, float]
) -> None:
    """Each curve's name with a sample of it, to the right of its end, as near as the others allow.

    Args:
        size: width and height of the axes in units.
    """
    width, height = size
    for curve, at in zip(panel.curves, spread(_ends(axes, panel, chart, height), LINE, height), strict=True):
        if not curve.name:
            continue
        index = names.index(curve.name)
        colour, middle = COLOURS[index % len(COLOURS)], at / height
        if chart.figure.kind == "stack":
            left, right = 1 + 5 / width, 1 + 17 / width
            top, bottom = middle + 4.5 / height, middle - 4.5 / height
            (area,) = axes.fill(
                [left, right, right, left],
                [bottom, bottom, top, top],
                transform=axes.transAxes,
                clip_on=False,
            )
            _shade(area, index)
        else:
            axes.plot(
                [1 + 3 / width, 1 + 18 / width],
                [middle, middle],
                color=colour,
                linewidth=LINE_WIDTH,
                linestyle=DASHES[index % len(DASHES)],
                transform=axes.transAxes,
                clip_on=False,
            )
        axes.annotate(
            _short(curve.name),
            (1, middle),
            (SWATCH, -4),
            "axes fraction",
            "offset points",
            fontsize=SMALL_TEXT,
            annotation_clip=False,
        )


def _shade(area: Any, index: int) -> None:
    area.set(facecolor=COLOURS[index % len(COLOURS)], edgecolor=SURFACE, linewidth=0.8, alpha=0.75)
    area.set_hatch(HATCHES[index % len(HATCHES)])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _ends(axes: Axes, panel: Panel, chart: Chart, height: float) -> list[float]:
    """Height of each curve's last value above the axes' lower edge; of its area's middle in a stack."""
    low, high = axes.get_ylim()
    ends, below = [], 0.0
    for curve in panel.curves:
        if chart.figure.kind == "stack":
            value = float(_at(curve, _steps(panel))[-1])
            ends.append(below + value / 2)
            below += value
        else:
            ends.append(float(curve.trend[np.isfinite(curve.trend)][-1]))
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
