"""Charts drawn by matplotlib: as PNG files, and as SVG in the page's theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibadv_jax.contrib.report.curves import Curve
from calibadv_jax.contrib.report.gather import MAX_MARKS, Chart, Panel
from calibadv_jax.contrib.report.runs import LONGEST_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Units of length in an inch. One unit is a pixel of the page where the chart has its natural width.
UNIT = 72
WIDTH = 400  # width of a chart, in units
PANEL_HEIGHT = 190  # height of the panel in a chart with one panel, in units
SMALL_PANEL_HEIGHT = 155  # height of a panel in a chart with several panels, in units
MARGIN = 54  # height of title and labels of a chart, in units
SMALL_TEXT = 11.5  # size of labels, in units
LINE_WIDTH = 1.8  # in units
LEAST_SPAN = 1e-4  # of an axis, as a share of its middle: the numbers of a narrower one would all be the same

# Series are told apart by name, by dash pattern and by colour. People who confuse red and green can tell the
# colours apart too.
COLOURS = ("#0060ae", "#b45309", "#007a5e", "#86389b", "#6b5c05", "#be185d", "#0f6f80", "#555b66")
# matplotlib's line styles, one for each of COLOURS. Dashes are (offset, lengths of dash and gap …).
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

# The page's light colours.
INK = "#1b1f24"
MUTED = "#59616c"
GRID = "#d9dde3"
SURFACE = "#fefefe"
# Colour of a drawing -> the page's variable, which follows the reader's light or dark theme.
THEME = {
    **{colour: f"var(--series-{index})" for index, colour in enumerate(COLOURS)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    SURFACE: "var(--surface)",
}
# matplotlib's settings of the drawings.
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
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.labelsize": SMALL_TEXT,
    "ytick.labelsize": SMALL_TEXT,
    "legend.frameon": False,
    "legend.fontsize": SMALL_TEXT,
    "legend.handlelength": 1.3,
    "legend.handletextpad": 0.4,
    "legend.labelspacing": 0.2,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.4,
    "figure.facecolor": SURFACE,
    "savefig.facecolor": SURFACE,
}
SMALL: dict[str, Any] = {"color": MUTED, "fontsize": SMALL_TEXT}  # options of a label


def draw(chart: Chart, order: Sequence[str]) -> Figure:
    """Draw a chart, with axes for each panel.

    Args:
        chart: what to draw.
        order: names of all series of the report, which determine the colour and dashes of each.
    """
    import matplotlib
    from matplotlib.figure import Figure

    num_panels = len(chart.panels)
    height = MARGIN + (PANEL_HEIGHT if num_panels == 1 else SMALL_PANEL_HEIGHT * num_panels)
    names = order
    if not chart.is_by_series or len(order) <= 1:
        names = list(dict.fromkeys(curve.name for curve in chart.curves))
    steps = np.concatenate([curve.steps for curve in chart.curves])
    margin = 0.5 if steps.min() == steps.max() else 0  # a single step needs an axis of some width
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / UNIT, height / UNIT), dpi=UNIT, layout="constrained")
        grid = figure.subplots(num_panels, sharex=True, sharey=True, squeeze=False)
        column: list[Axes] = list(grid[:, 0])
        for axes, panel in zip(column, chart.panels, strict=True):
            _draw_panel(axes, panel, names)
        column[0].set_xlim(steps.min() - margin, steps.max() + margin)
        column[0].set_title(chart.figure.unit, loc="left", **SMALL)
        column[-1].set_xlabel("step", loc="left", labelpad=0, **SMALL)
        _set_limits(column[0], chart)
    return figure


def place(figure: Figure, axes: Axes) -> dict[str, float]:
    """Return the position of a drawn panel, in units from the upper left corner, and its range of steps."""
    box = axes.get_position()  # shares of the drawing, from the lower left corner
    first, last = axes.get_xlim()
    width, height = figure.get_size_inches() * UNIT
    return {
        "left": round(float(box.x0 * width), 1),
        "right": round(float(box.x1 * width), 1),
        "top": round(float((1 - box.y1) * height), 1),
        "bottom": round(float((1 - box.y0) * height), 1),
        "first": first,
        "last": last,
    }


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    band_opacity = min(0.18, 0.5 / len(panel.curves))
    for curve in panel.curves:
        _draw_line(axes, curve, names.index(curve.name), band_opacity)
    axes.margins(y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.set_title(panel.title, loc="right", fontsize=12, pad=6, color=INK, fontweight="bold")
    if any(curve.name for curve in panel.curves):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_line(axes: Axes, curve: Curve, index: int, alpha: float) -> None:
    """Draw the trend, its band with the opacity `alpha`, and a mark at every point where there are few."""
    colour = COLOURS[index % len(COLOURS)]
    dashes = DASHES[index % len(DASHES)]
    marker = "o" if len(curve.steps) <= MAX_MARKS else ""
    name = curve.name
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 1]}…"
    # A step that the metric was not logged at is bridged; a value that was not finite is a gap.
    style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": LINE_WIDTH}
    axes.plot(curve.steps, curve.trend, label=name, marker=marker, markersize=3, **style)
    if curve.has_band:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=alpha, linewidth=0)
    elif not np.array_equal(curve.trend, curve.mean, equal_nan=True):
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.8, alpha=0.4)


def _set_limits(axes: Axes, chart: Chart) -> None:
    """Start at 0 where nothing is negative, and end above the usual values; as the figure asks."""
    low, high = axes.get_ylim()
    if chart.figure.from_zero:
        smallest = min(np.nanmin(curve.low) for curve in chart.curves)
        if smallest >= 0:
            low = 0.0
    if chart.figure.cuts_spikes:
        values = np.concatenate([curve.high for curve in chart.curves])
        high = min(high, 2 * float(np.nanpercentile(values, 95)))
    middle = (low + high) / 2
    half_span = abs(middle) * LEAST_SPAN / 2
    low = min(low, middle - half_span)
    high = max(high, middle + half_span)
    axes.set_ylim(low, high if high > low else low + 1)


def themed_svg(figure: Figure, key: str, label: str) -> str:
    """Return an <svg> in the theme's colours, with ids of its own `key` and a label for screen readers."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", metadata=no_metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]  # drop the head of an XML file
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # drop the ids of groups: nothing refers to them
    svg = re.sub(r"#[0-9a-f]{6}", lambda match: THEME.get(match[0], match[0]), svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
