"""matplotlib's SVG made fit to stand in a page: its colours follow the page's theme, its names are unique."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from calibadv_jax.contrib.report.draw import COLOURS, GRID, INK, MUTED, SURFACE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
THEME = {
    **{colour: f"var(--series-{index})" for index, colour in enumerate(COLOURS)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    SURFACE: "var(--surface)",
}
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_REFERENCE = re.compile(r"#([^)\s\"]+)")


def themed_svg(figure: Figure, key: str, label: str) -> str:
    """The drawing as an <svg> element.

    Args:
        key: made part of every id, so that drawings in one page do not share any.
        label: what the drawing shows, for those who do not see it.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    ET.register_namespace("", SVG)
    root = ET.fromstring(text.getvalue())
    used = set(_REFERENCE.findall(text.getvalue()))
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        _clean(element, key, used)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


def _clean(element: ET.Element, key: str, used: set[str]) -> None:
    """Makes the ids that are referred to unique, drops the others; shortens numbers; themes colours."""
    name = element.attrib.pop("id", None)
    if name in used:
        element.set("id", f"{key}-{name}")
    link = element.attrib.pop(f"{{{XLINK}}}href", None)
    if link is not None:
        element.set("href", f"#{key}-{link.removeprefix('#')}")
    for attribute in ("clip-path", "style"):
        if attribute in element.attrib:
            element.set(attribute, element.attrib[attribute].replace("url(#", f"url(#{key}-"))
    for attribute in {"d", "x", "y", "transform"} & element.attrib.keys():
        element.set(attribute, " ".join(_NUMBER.sub(_rounded, element.attrib[attribute]).split()))
    if "style" in element.attrib:
        style = re.sub(r"font-family: [^;]*;? ?", "", element.attrib["style"])  # the page has its own
        element.set("style", re.sub(r"#[0-9a-f]{6}", lambda found: THEME.get(found[0], found[0]), style))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")
