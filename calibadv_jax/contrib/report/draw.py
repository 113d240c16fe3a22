"""Charts drawn by matplotlib: as PNG files, and as SVG in the page's theme."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from calibadv_jax.contrib.report.gather import MAX_MARKS, Chart, Curve, Panel
from calibadv_jax.contrib.report.runs import LONGEST_NAME
from calibadv_jax.metrics.console import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


UNIT = 72  # one unit of length is a pixel of the page where the chart has its natural width
WIDTH = 400
PANEL_HEIGHT, SMALL_PANEL_HEIGHT = 190, 125  # of the axes, in a chart with one panel and with several
LEFT, TOP, BOTTOM, GAP = 54, 24, 30, 30
SWATCH = 30  # room for a sample of a curve beside its name
SMALL_TEXT = 11.5
LINE_WIDTH = 1.8
# Where an axis may be cut: above values that are SPIKE times the percentile USUAL.
USUAL, SPIKE = 95, 2.0
LEAST_SPAN = 0.02  # of an axis, as a share of the value in its middle
# Told apart by dash pattern, by name and by colour; the colours by people who confuse red and green too.
COLOURS = ("#0060ae", "#b45309", "#007a5e", "#86389b", "#6b5c05", "#be185d", "#0f6f80", "#555b66")
_GAPS = ((5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1.2), (9, 3), (4, 1.5, 1, 1.5, 1, 1.5), (1, 3))
DASHES: tuple[Any, ...] = ("-", *((0, lengths) for lengths in _GAPS))
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")  # dots would take 150 kB each
STYLE: dict[Any, Any] = yaml.safe_load(Path(__file__).with_name("style.yaml").read_text(encoding="utf-8"))
INK, MUTED, GRID, SURFACE = (
    STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color", "figure.facecolor")
)


@dataclass(frozen=True)
class Place:
    """Position of a panel in its drawing, in units from the upper left corner, and its range of steps."""

    left: float
    right: float
    top: float
    bottom: float
    first: float
    last: float


def draw(chart: Chart, order: Sequence[str]) -> tuple[Figure, list[Place]]:
    """Return the drawing and the places of its panels; the colour and dashes of a series follow `order`."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = chart.panels
    axes_height = PANEL_HEIGHT if len(panels) == 1 else SMALL_PANEL_HEIGHT
    height = TOP + BOTTOM + len(panels) * axes_height + (len(panels) - 1) * GAP
    curve_names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    names = order if chart.is_by_series and len(order) > 1 else curve_names
    named = [name for name in curve_names if name]
    right = WIDTH - (SWATCH + _width(named) + 2 if named else 12.0)
    steps = np.concatenate([curve.steps for panel in panels for curve in panel.curves])
    span = float(steps.min()), float(steps.max())
    if span[0] == span[1]:
        span = span[0] - 0.5, span[1] + 0.5
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / UNIT, height / UNIT), dpi=UNIT)
        figure.subplots_adjust(
            LEFT / WIDTH, BOTTOM / height, right / WIDTH, 1 - TOP / height, 0, GAP / axes_height
        )
        column: list[Axes] = list(figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0])
        for axes, panel in zip(column, panels, strict=True):
            _panel(axes, panel, chart, names, span)
        corner: dict[str, Any] = {"textcoords": "offset points", "color": MUTED, "fontsize": SMALL_TEXT}
        column[0].annotate(chart.figure.unit, (0, 1), (4 - LEFT, 8), "axes fraction", **corner)
        column[-1].annotate("step", (0, 0), (4 - LEFT, -15), "axes fraction", **corner)
        _limits(list(column), chart)
    tops = [TOP + index * (axes_height + GAP) for index in range(len(panels))]
    return figure, [Place(LEFT, right, top, top + axes_height, *span) for top in tops]


def _width(names: Sequence[str]) -> float:
    """Return the width of the longest name in units, in matplotlib's font, which is wider than most."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=SMALL_TEXT)
    return max(text_to_path.get_text_width_height_descent(_short(name), font, False)[0] for name in names)


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
    if any(curve.name for curve in panel.curves):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=chart.figure.kind == "stack")


def _line(axes: Axes, curve: Curve, index: int, alpha: float) -> None:
    """Draw the mean, its band with the opacity `alpha`, and a mark at every point where there are few."""
    colour = COLOURS[index % len(COLOURS)]
    # A step that the metric was not logged at is bridged; a value that was not finite is a gap.
    if not curve.has_band and not np.array_equal(curve.trend, curve.mean, equal_nan=True):
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.8, alpha=0.4)
    look: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve.steps) <= MAX_MARKS else {}
    look |= {"color": colour, "linestyle": DASHES[index % len(DASHES)], "linewidth": LINE_WIDTH}
    axes.plot(curve.steps, curve.trend, label=_short(curve.name), **look)
    if curve.has_band:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=alpha, linewidth=0)


def _stack(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Draw areas on top of each other, edged by the background so that neighbours are told apart."""
    labels = [_short(curve.name) for curve in panel.curves]
    areas = axes.stackplot(*_stacked(panel), labels=labels)
    for area, curve in zip(areas, panel.curves, strict=True):
        index = names.index(curve.name)
        area.set(facecolor=COLOURS[index % len(COLOURS)], edgecolor=SURFACE, linewidth=0.8, alpha=0.75)
        area.set_hatch(HATCHES[index % len(HATCHES)])


def _stacked(panel: Panel) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return all steps of the panel, and each curve's mean at them: 0 where it has none."""
    steps = np.unique(np.concatenate([curve.steps for curve in panel.curves]))
    values = [np.zeros(len(steps)) for _ in panel.curves]
    for heights, curve in zip(values, panel.curves, strict=True):
        heights[np.searchsorted(steps, curve.steps)] = np.nan_to_num(curve.mean)
    return steps, values


def _limits(all_axes: Sequence[Axes], chart: Chart) -> None:
    """Start at 0 where nothing is negative; draw the guard's threshold where it is in view."""
    low, high = all_axes[0].get_ylim()
    tops = np.concatenate([_tops(chart, panel) for panel in chart.panels])
    lowest = min(float(np.nanmin(curve.low)) for panel in chart.panels for curve in panel.curves)
    if chart.figure.kind == "stack":
        low, high = 0.0, float(tops.max()) * 1.02
    elif chart.figure.from_zero and lowest >= 0:
        low = 0.0
    usual = float(np.percentile(tops, USUAL))
    if chart.figure.cuts_spikes and tops.max() > SPIKE * usual > 0:
        high = 1.2 * usual
        text = f"up to {number(float(tops.max()))}"
        _note(all_axes[0], text, (0.5, 1), ("axes fraction", "axes fraction"), -12)
    middle = (low + high) / 2
    least = abs(middle) * LEAST_SPAN / 2  # narrower, and its numbers of four digits would all be the same
    low, high = min(low, middle - least), max(high, middle + least)
    all_axes[0].set_ylim(low, high if high > low else low + 1)
    if chart.limit is not None and low <= chart.limit <= high:
        for axes in all_axes:
            axes.axhline(chart.limit, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
            _note(axes, "guard", (0, chart.limit), ("axes fraction", "data"), 2)


def _note(axes: Axes, text: str, place: tuple[float, float], system: tuple[str, str], lift: float) -> None:
    axes.annotate(text, place, (3, lift), system, "offset points", color=MUTED, fontsize=SMALL_TEXT)  # type: ignore[arg-type]


def _tops(chart: Chart, panel: Panel) -> np.ndarray:
    """Return the highest finite value of each step, float64 [N]."""
    if chart.figure.kind == "stack":
        return np.sum(_stacked(panel)[1], axis=0)
    highs = np.concatenate([curve.high for curve in panel.curves])
    return highs[np.isfinite(highs)]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
THEME = {colour: f"var(--series-{index})" for index, colour in enumerate(COLOURS)}
THEME |= {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", SURFACE: "var(--surface)"}
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_REFERENCE = re.compile(r"#([^)\s\"]+)")


def themed_svg(figure: Figure, key: str, label: str) -> str:
    """Return an <svg> in the theme's colours, with `key` in its ids and a label for screen readers."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    ET.register_namespace("", SVG)
    root = ET.fromstring(text.getvalue())
    used = set(_REFERENCE.findall(text.getvalue()))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        _clean(element, key, used)
    del root.attrib["width"], root.attrib["height"]
    root.attrib.update({"role": "img", "aria-label": label})
    return ET.tostring(root, encoding="unicode")


def _clean(element: ET.Element, key: str, used: set[str]) -> None:
    """Make referenced ids unique, drop the others; shorten numbers; replace colours by the theme's."""
    if (name := element.attrib.pop("id", None)) in used:
        element.set("id", f"{key}-{name}")
    if link := element.attrib.pop(f"{{{XLINK}}}href", None):
        element.set("href", f"#{key}-{link.removeprefix('#')}")
    for attribute in ("clip-path", "style"):
        if attribute in element.attrib:
            element.set(attribute, element.attrib[attribute].replace("url(#", f"url(#{key}-"))
    for attribute in {"d", "x", "y", "transform"} & element.attrib.keys():
        rounded = _NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), element.attrib[attribute])
        element.set(attribute, " ".join(rounded.split()))
    if "style" in element.attrib:
        style = re.sub(r"font-family: [^;]*;? ?", "", element.attrib["style"])  # the page has its own
        element.set("style", re.sub(r"#[0-9a-f]{6}", lambda match: THEME.get(match[0], match[0]), style))
