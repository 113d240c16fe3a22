"""The drawings: names of curves, themed SVG, what the axes span."""

import re
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from calibadv_jax.contrib.report.draw import COLOURS, DASHES, HATCHES, WIDTH, draw, place, themed_svg
from calibadv_jax.contrib.report.gather import Chart, Figure, Panel, over_seeds
from calibadv_jax.contrib.report.page import css_dashes
from calibadv_jax.contrib.report.runs import LONGEST_NAME, MAX_SERIES

SVG = "http://www.w3.org/2000/svg"


def chart_of(*panels, by_series=True, limit=None, **options):
    """A chart with a panel for each mapping of name -> values at the steps 1, 2, …"""
    made = []
    for index, curves in enumerate(panels):
        lines = (over_seeds(name, [dict(enumerate(values, 1))]) for name, values in curves.items())
        made.append(Panel(f"panel {index}" if len(panels) > 1 else "", tuple(lines)))
    return Chart(Figure("key", "Title", "text", "unit", {}, **options), tuple(made), limit, by_series)


def axes_of(*panels, **options):
    """The first axes of a drawing."""
    return draw(chart_of(*panels, **options), ["x"]).axes[0]


@pytest.mark.parametrize("kind", ["lines", "stack"])
def test_panels_name_their_curves_in_drawn_order(kind):
    names = [f"{number} is a name that is too long" for number in range(MAX_SERIES)]
    chart = chart_of({name: [1.0] for name in names}, {"b": [2.0]}, by_series=False, kind=kind)
    figure = draw(chart, ["x"])
    shown = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert shown[0][:: -1 if kind == "stack" else 1] == [f"{name[: LONGEST_NAME - 1]}…" for name in names]
    assert shown[1] == ["b"]
    figure.draw_without_rendering()  # lays it out
    for axes in figure.axes:
        box, there = axes.get_legend().get_window_extent(), place(figure, axes)
        assert there["right"] < box.x0 and box.x1 <= WIDTH and box.height <= there["bottom"] - there["top"]


def test_series_keeps_its_look_in_every_chart():
    for looks in (COLOURS, DASHES, HATCHES):
        assert len(set(map(str, looks))) == len(looks) == MAX_SERIES
    for names in ("c", "ac"):
        figure = draw(chart_of({name: [1.0, 2.0] for name in names}), ["a", "b", "c"])
        colours = [line.get_color() for line in figure.axes[0].lines[: len(names)]]
        assert colours == [COLOURS["abc".index(name)] for name in names]


def test_series_has_its_dashes_in_drawing_and_table():
    order = [str(number) for number in range(MAX_SERIES)]
    text = themed_svg(draw(chart_of({name: [1.0, 2.0] * 20 for name in order}), order), "key", "")
    for index in range(MAX_SERIES):
        styles = re.findall(rf'style="([^"]*stroke: var\(--series-{index}\)[^"]*)"', text)
        drawn = {tuple(re.findall(r"stroke-dasharray: ([^;]+)", style)) for style in styles}
        assert len(drawn) == 1
        dashes = ["".join(*drawn) or "0", css_dashes(index).replace("none", "0").replace(" ", ",")]
        first, second = ([float(length) for length in each.split(",")] for each in dashes)
        assert first == pytest.approx(second)


def test_axis_starts_at_zero_unless_values_are_negative():
    assert axes_of({"": [5.0, 6.0]}).get_ylim()[0] == 0
    assert axes_of({"": [5.0, 6.0]}, from_zero=False).get_ylim()[0] > 4
    assert axes_of({"": [-5.0, 6.0]}).get_ylim()[0] < -5
    for values in ([0.0], [0.0, 0.0], [None, 1.0, None]):
        assert axes_of({"": values}).get_ylim()[1] > 0


def test_numbers_of_an_axis_differ():
    axes = axes_of({"": [1.0, 1.000001]}, from_zero=False)
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert low <= 0.991 and high >= 1.009 and len(set(shown)) == len(shown) >= 3


def test_panels_share_their_axes():
    figure = draw(chart_of({"a": [1.0] * 5}, {"a": [3.0] * 9}, by_series=False), ["x", "y"])
    assert {axes.get_ylim() for axes in figure.axes} == {figure.axes[0].get_ylim()}
    assert {axes.get_xlim() for axes in figure.axes} == {(1, 9)}
    assert [axes.get_title("right") for axes in figure.axes] == ["panel 0", "panel 1"]
    figure.draw_without_rendering()
    first, second = (place(figure, axes) for axes in figure.axes)
    assert (first["first"], first["last"]) == (1, 9)
    assert 10 < first["left"] == second["left"] < 60 and first["left"] + 200 < first["right"] < WIDTH
    assert 10 < first["top"] < first["bottom"] - 100 and first["bottom"] < second["top"] < 200


def test_rare_spike_is_cut_and_named():
    values = [40.0] + [2.0] * 59
    assert axes_of({"": values}).get_ylim()[1] > 40
    cut = axes_of({"": values}, cuts_spikes=True)
    assert 2 < cut.get_ylim()[1] < 3 and "up to 40" in [text.get_text() for text in cut.texts]


def test_threshold_is_drawn_where_it_is_in_view():
    for limit, is_drawn in ((0.25, True), (5.0, False)):
        texts = axes_of({"": [0.5, 1.0]}, limit=limit).texts
        assert ("guard" in [text.get_text() for text in texts]) == is_drawn


def test_stack_reaches_the_sum():
    axes = axes_of({"a": [1.0, 2.0], "b": [3.0, 3.0]}, by_series=False, kind="stack")
    assert [collection.get_datalim(axes.transData).y1 for collection in axes.collections] == [2, 5]


def svg_of(chart, key="key"):
    return ET.fromstring(themed_svg(draw(chart, ["x"]), key, "what it shows <&>"))


def test_svg_scales_and_has_the_pages_colours():
    chart = chart_of({"a $x_1$ <b>": [1.0, 2.0], "c": [2.0, 1.0]}, by_series=False)
    root = svg_of(chart)
    text = ET.tostring(root, encoding="unicode")
    assert not re.findall(r"#[0-9a-f]{6}", text)
    assert {"series-0", "series-1", "ink", "muted"} <= {*re.findall(r"var\(--([a-z0-9-]+)\)", text)}
    assert "font-family" not in text and "<style" not in text and "a $x_1$ &lt;b&gt;" in text
    assert (root.get("role"), root.get("aria-label")) == ("img", "what it shows <&>")
    assert root.get("viewBox") == f"0 0 {WIDTH} 244" and root.get("width") is None


def test_every_reference_of_svg_is_met_within_it():
    chart = chart_of({"a": [1.0, 2.0], "b": [3.0, 3.0]}, by_series=False, kind="stack")
    ids = {}
    for key in ("mine", "other"):
        root = svg_of(chart, key)
        ids[key] = [element.get("id") for element in root.iter() if element.get("id")]
        expected = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', ET.tostring(root, encoding="unicode"))
        assert {first or second for first, second in expected} == set(ids[key])
        names = ["svg", "defs", "g", "path", "use", "text", "clipPath", "rect", "pattern"]
        assert {element.tag for element in root.iter()} <= {f"{{{SVG}}}{name}" for name in names}
    assert len({*ids["mine"], *ids["other"]}) == len(ids["mine"] + ids["other"]) > 0
