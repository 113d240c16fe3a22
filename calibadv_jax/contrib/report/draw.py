"""Charts drawn by matplotlib: as PNG files, and as SVG in the page's theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from calibadv_jax.contrib.report.gather import MAX_MARKS, Chart, Curve, Panel
from calibadv_jax.contrib.report.runs import LONGEST_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


UNIT = 72  # one unit of length is a pixel of the page where the chart has its natural width
WIDTH = 400
PANEL_HEIGHT, SMALL_PANEL_HEIGHT, MARGIN = 190, 155, 54  # in a chart with one panel and with several
SMALL_TEXT = 11.5
LINE_WIDTH = 1.8
# Told apart by dash pattern, by name and by colour; the colours by people who confuse red and green too.
COLOURS = ("#0060ae", "#b45309", "#007a5e", "#86389b", "#6b5c05", "#be185d", "#0f6f80", "#555b66")
_GAPS = ((5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1.2), (9, 3), (4, 1.5, 1, 1.5, 1, 1.5), (1, 3))
DASHES: tuple[Any, ...] = ("-", *((0, lengths) for lengths in _GAPS))
STYLE: dict[Any, Any] = yaml.safe_load(Path(__file__).with_name("style.yaml").read_text(encoding="utf-8"))
INK, MUTED, GRID, SURFACE = (
    STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color", "figure.facecolor")
)
SMALL: dict[str, Any] = {"color": MUTED, "fontsize": SMALL_TEXT}
THEME = {colour: f"var(--series-{index})" for index, colour in enumerate(COLOURS)}
THEME |= {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", SURFACE: "var(--surface)"}


def draw(chart: Chart, order: Sequence[str]) -> Figure:
    """Return the drawing, with axes for each panel; the colour and dashes of a series follow `order`."""
    import matplotlib
    from matplotlib.figure import Figure

    panels, curves = chart.panels, chart.curves
    height = MARGIN + (PANEL_HEIGHT if len(panels) == 1 else SMALL_PANEL_HEIGHT * len(panels))
    is_by_series = chart.is_by_series and len(order) > 1
    names = order if is_by_series else list(dict.fromkeys(curve.name for curve in curves))
    steps = np.concatenate([curve.steps for curve in curves])
    margin = 0.5 if steps.min() == steps.max() else 0
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / UNIT, height / UNIT), dpi=UNIT, layout="constrained")
        column: list[Axes] = list(figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0])
        for axes, panel in zip(column, panels, strict=True):
            _draw_panel(axes, panel, names)
        column[0].set_xlim(steps.min() - margin, steps.max() + margin)
        column[0].set_title(chart.figure.unit, loc="left", **SMALL)
        column[-1].set_xlabel("step", loc="left", labelpad=0, **SMALL)
        _set_limits(column[0], chart)
    return figure


def place(figure: Figure, axes: Axes) -> dict[str, float]:
    """Return the position of a drawn panel, in units from the upper left corner, and its range of steps."""
    box, (first, last) = axes.get_position(), axes.get_xlim()
    width, height = figure.get_size_inches() * UNIT
    edges = {"left": box.x0 * width, "right": box.x1 * width}
    edges |= {"top": (1 - box.y1) * height, "bottom": (1 - box.y0) * height}
    return {name: round(float(edge), 1) for name, edge in edges.items()} | {"first": first, "last": last}


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for curve in panel.curves:
        _draw_line(axes, curve, names.index(curve.name), min(0.18, 0.5 / len(panel.curves)))
    axes.margins(y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.set_title(panel.title, loc="right", fontsize=12, pad=6, color=INK, fontweight="bold")
    if any(curve.name for curve in panel.curves):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_line(axes: Axes, curve: Curve, index: int, alpha: float) -> None:
    """Draw the mean, its band with the opacity `alpha`, and a mark at every point where there are few."""
    colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    marker = "o" if len(curve.steps) <= MAX_MARKS else ""
    name = curve.name if len(curve.name) <= LONGEST_NAME else f"{curve.name[: LONGEST_NAME - 1]}…"
    # A step that the metric was not logged at is bridged; a value that was not finite is a gap.
    style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": LINE_WIDTH}
    axes.plot(curve.steps, curve.trend, label=name, marker=marker, markersize=3, **style)
    if curve.has_band:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=alpha, linewidth=0)
    elif not np.array_equal(curve.trend, curve.mean, equal_nan=True):
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.8, alpha=0.4)


def _set_limits(axes: Axes, chart: Chart) -> None:
    """Start at 0 where nothing is negative."""
    low, high = axes.get_ylim()
    if chart.figure.from_zero and min(np.nanmin(curve.low) for curve in chart.curves) >= 0:
        low = 0.0
    if chart.figure.cuts_spikes:
        usual = np.nanpercentile(np.concatenate([curve.high for curve in chart.curves]), 95)
        high = min(high, 2 * float(usual))
    axes.set_ylim(low, high if high > low else low + 1)


def themed_svg(figure: Figure, key: str, label: str) -> str:
    """Return an <svg> in the theme's colours, with ids of its own `key` and a label for screen readers."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]  # without the head of an XML file
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # of groups: nothing refers to them
    svg = re.sub(r"#[0-9a-f]{6}", lambda match: THEME.get(match[0], match[0]), svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
