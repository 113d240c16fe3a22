"""The drawings: names of curves, themed SVG, what the axes span."""

import re
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from calibadv_jax.contrib.report.curves import over_seeds
from calibadv_jax.contrib.report.draw import COLOURS, DASHES, UNIT, WIDTH, draw, place, themed_svg
from calibadv_jax.contrib.report.figures import Figure
from calibadv_jax.contrib.report.gather import Chart, Panel
from calibadv_jax.contrib.report.runs import LONGEST_NAME, MAX_SERIES


def chart_of(*panels, by_series=True, **options):
    """A chart with a panel for each mapping of name -> values at the steps 1, 2, …"""
    made = []
    for index, curves in enumerate(panels):
        lines = (over_seeds(name, [dict(enumerate(values, 1))]) for name, values in curves.items())
        made.append(Panel(f"panel {index}" if len(panels) > 1 else "", tuple(lines)))
    return Chart(Figure("key", "Title", "text", "unit", {}, **options), tuple(made), by_series)


def axes_of(*panels, **options):
    """The first axes of a drawing."""
    return draw(chart_of(*panels, **options), ["x"]).axes[0]


def test_panels_name_their_curves_in_drawn_order():
    names = [f"{number} is a name that is too long" for number in range(MAX_SERIES)]
    chart = chart_of({name: [1.0] for name in names}, {"b": [2.0]}, by_series=False)
    figure = draw(chart, ["x"])
    shown = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert shown == [[f"{name[: LONGEST_NAME - 1]}…" for name in names], ["b"]]
    figure.draw_without_rendering()  # lays it out
    for axes in figure.axes:
        box, there = axes.get_legend().get_window_extent(), place(figure, axes)
        assert there["right"] < box.x0 and box.x1 <= WIDTH and box.height <= there["bottom"] - there["top"]


def test_series_keeps_its_look_in_every_chart():
    for looks in (COLOURS, DASHES):
        assert len(set(map(str, looks))) == len(looks) == MAX_SERIES
    for names in ("c", "ac"):
        figure = draw(chart_of({name: [1.0, 2.0] for name in names}), ["a", "b", "c"])
        colours = [line.get_color() for line in figure.axes[0].lines[: len(names)]]
        assert colours == [COLOURS["abc".index(name)] for name in names]


def test_axis_starts_at_zero_unless_values_are_negative():
    assert axes_of({"": [5.0, 6.0]}).get_ylim()[0] == 0
    assert axes_of({"": [5.0, 6.0]}, from_zero=False).get_ylim()[0] > 4
    assert axes_of({"": [-5.0, 6.0]}).get_ylim()[0] < -5
    assert 2 < axes_of({"": [40.0] + [2.0] * 59}, cuts_spikes=True).get_ylim()[1] <= 4
    for values in ([0.0], [0.0, 0.0], [None, 1.0, None]):
        assert axes_of({"": values}).get_ylim()[1] > 0


def test_numbers_of_an_axis_differ():
    axes = axes_of({"": [1.0, 1.000001]}, from_zero=False)
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    numbers = [label.get_text() for label in axes.get_yticklabels()]
    assert high - low > 0.99e-4
    assert len(set(numbers)) == len(numbers) >= 3


def test_rare_spike_is_cut_only_where_the_figure_asks_for_it():
    values = [40.0] + [2.0] * 59
    assert axes_of({"": values}).get_ylim()[1] > 40
    assert axes_of({"": values}, cuts_spikes=True).get_ylim()[1] == 4


def test_places_are_where_the_axes_are():
    figure = draw(chart_of({"a": [1.0, 2.0]}, {"b": [2.0, 1.0]}, by_series=False), ["x", "y"])
    figure.draw_without_rendering()
    height = figure.get_figheight() * UNIT
    for axes in figure.axes:
        box = axes.get_window_extent()  # from the lower left corner; a pixel is a unit
        expected = {
            "left": box.x0,
            "right": box.x1,
            "top": height - box.y1,
            "bottom": height - box.y0,
            "first": 1,
            "last": 2,
        }
        assert place(figure, axes) == pytest.approx(expected, abs=0.06)


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


def test_svg_is_themed_and_refers_to_itself_only():
    chart = chart_of({"a $x_1$ <b>": [1.0, 2.0], "c": [2.0, 1.0]}, by_series=False)
    ids = []
    for key in ("mine", "other"):
        text = themed_svg(draw(chart, ["x"]), key, "what it shows <&>")
        root = ET.fromstring(text)
        names = [element.get("id") for element in root.iter() if element.get("id")]
        references = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
        assert {first or second for first, second in references} == set(names)
        ids += names
    assert len(set(ids)) == len(ids) > 0
    assert not re.findall(r"#[0-9a-f]{6}\b", text) and "a $x_1$ &lt;b&gt;" in text
    assert {"series-0", "series-1", "ink", "muted"} <= {*re.findall(r"var\(--([a-z0-9-]+)\)", text)}
    assert (root.get("role"), root.get("aria-label")) == ("img", "what it shows <&>")
    assert root.get("viewBox") == f"0 0 {WIDTH} 244"


def test_svg_holds_drawings_and_text_only():
    text = themed_svg(draw(chart_of({"a": [1.0, 2.0], "b": [3.0, 3.0]}, by_series=False), ["x"]), "key", "")
    elements = {element.tag.partition("}")[2] for element in ET.fromstring(text).iter()}
    assert elements <= {"svg", "defs", "style", "g", "path", "use", "text", "clipPath", "rect"}


def test_ids_of_an_svg_are_the_same_each_time():
    chart = chart_of({"a": [1.0, 2.0]})
    assert themed_svg(draw(chart, ["x"]), "key", "") == themed_svg(draw(chart, ["x"]), "key", "")
