"""The page in a browser: figures are there, values can be read, nothing leaves the page."""

import itertools
import json
import shlex
import threading

import numpy as np
import pytest
from report_rig import keep_step, learning_curve, make_run, two_configs

from benchmarks.generated_run import make_group, make_tokenizer, write_run
from calibadv_jax import cli
from calibadv_jax.config import Config
from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.contrib.report.gather import Gathered
from calibadv_jax.contrib.report.page import render
from calibadv_jax.contrib.report.runs import group_runs, read_runs

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of two configs, one with two seeds, with kept trajectories."""
    folder = tmp_path_factory.mktemp("report")
    runs = two_configs(folder, 40)
    for index, step in itertools.product(range(3), range(1, 41)):
        sources = [("nq", 0.01 * step), ("a <b>&", 0.5 + 0.002 * step * index)]
        rows = [{"data_source": name, "metrics": {"f1": f1}} for name, f1 in sources]
        keep_step(runs[index], step, rows)
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["report", *map(str, runs), "--output", str(folder / "report.html"), "--smooth", "1"])
    assert end.value.code == 0
    return folder / "report.html"


@pytest.fixture
def opened(page, report):
    """The page, opened; the test fails where it asked for anything but itself."""
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    yield page
    assert requests == [report.as_uri()]


def test_every_figure_is_drawn(opened):
    figures = opened.locator("figure")
    keys = figures.evaluate_all("all => all.map((one) => one.id)")
    expected = {"reward", "f1", "f1_by_source", "format", "entropy", "mass_before", "correctness", "phases"}
    assert expected <= set(keys)
    for key in keys:
        box = opened.locator(f"#{key} .drawing svg").bounding_box()
        assert box["width"] > 300 and box["height"] > 150
    count = "all => all.map((one) => one.querySelectorAll('path[style*=\"var(--series-\"]').length)"
    assert min(opened.locator("figure .drawing").evaluate_all(count)) >= 1


def test_colours_come_from_the_theme(opened):
    def colours():
        """Of the page, and of the lines of a figure."""
        return opened.evaluate(
            """() => {
              const paths = [...document.querySelectorAll('#reward .drawing path')];
              const page = getComputedStyle(document.body).backgroundColor;
              return [page, ...paths.map((one) => getComputedStyle(one).stroke)];
            }"""
        )

    opened.emulate_media(color_scheme="light")
    light = colours()
    opened.emulate_media(color_scheme="dark")
    dark = colours()
    assert light[0] != dark[0]
    assert "rgb(0, 96, 174)" in light and "rgb(108, 178, 255)" in dark


def test_pointer_reads_values(opened):
    drawing = opened.locator("#reward .drawing svg")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    left = json.loads(opened.locator("#reward script").text_content())[0]["left"]
    opened.mouse.move(box["x"] + box["width"] * (left + 0.5) / 400, box["y"] + box["height"] / 2)
    read = opened.locator("#reward output").inner_text()
    seeds = [learning_curve(40, index)["reward/mean"][0] for index in (0, 1)]
    low, high = (f"{value:.4g}" for value in (min(seeds), max(seeds)))
    assert read.startswith(f"step 1: calibadv {sum(seeds) / 2:.4g} ({low} to {high}), grpo ")
    assert opened.locator("#reward .cursor").count() == 1
    opened.mouse.move(5, 5)
    assert opened.locator("#reward output").inner_text() == ""
    assert opened.locator("#reward .cursor").count() == 0


def test_touch_reads_values_that_stay(browser, report):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    touched = context.new_page()
    touched.goto(report.as_uri())
    for key in ("reward", "f1"):
        touched.locator(f"#{key} .drawing svg").tap()
        assert touched.locator(f"#{key} output").inner_text().startswith("step ")
    context.close()


def test_keyboard_reads_values(opened):
    figure, read = opened.locator("#f1_by_source"), opened.locator("#f1_by_source output")
    figure.focus()
    for move in ["ArrowLeft 40", "ArrowLeft 39", "Home 1", "ArrowLeft 1", "PageDown 11", "End 40"]:
        key, step = move.split()[0], int(move.split()[1])
        opened.keyboard.press(key)
        text = read.inner_text()
        assert text.startswith(f"step {step}: calibadv: a <b>& ")
        assert text.endswith(f", nq {0.01 * step:.4g}") and text.count(" nq ") == 2
    assert opened.locator("#f1_by_source .cursor").count() == 2
    opened.keyboard.press("Escape")
    assert read.inner_text() == ""


def test_point_leads_to_the_trajectories_of_its_step(page, tmp_path):
    run, tokenizer = tmp_path / "runs/<b>it's", make_tokenizer()
    groups = [make_group(tokenizer, number, np.random.default_rng(number)) for number in range(3)]
    write_run(run, [groups[:1], groups[1:]], Config(), tokenizer)
    (run / "rollouts/step_1.parquet").unlink()
    make_run(run, learning_curve(3, 0))
    with make_server(Site(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        gathered = Gathered(group_runs(read_runs([run])))
        (tmp_path / "report.html").write_text(render(gathered, server.server_port))
        page.goto((tmp_path / "report.html").as_uri())
        lead = page.locator("#reward .lead")
        page.locator("#reward").focus()
        page.keyboard.press("Enter")
        assert lead.inner_text() == ""  # no point is chosen
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert lead.locator("a").inner_text() == "<b>it's, step 2 (the nearest that is kept)"
        assert shlex.split(lead.locator("code").inner_text()) == ["calibadv", "inspect", str(run)]
        with page.expect_popup() as popup:
            page.keyboard.press("Enter")  # the link has the focus
        popup.value.wait_for_selector("#list[data-ready]", state="attached")
        assert popup.value.inner_text("#count") == "10 trajectories in 2 groups"
        assert not popup.value.locator("#notice").is_visible()
        page.locator("#reward").focus()
        page.keyboard.press("Escape")
        assert lead.inner_text() == ""
        server.shutdown()
        thread.join()


def test_nothing_is_wider_than_the_screen(opened):
    opened.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for width in (320, 390, 1280):
        opened.set_viewport_size({"width": width, "height": 844})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_every_link_of_the_contents_leads_somewhere(opened):
    links = opened.locator("nav a")
    assert links.count() >= 6
    for index in range(links.count()):
        links.nth(index).click()
        target = opened.url.partition("#")[2]
        assert opened.locator(f"#{target}").is_visible()


def test_names_of_curves_stay_within_their_drawing(opened):
    beyond = opened.locator("figure .drawing svg").evaluate_all(
        """all => all.flatMap((svg) => {
          const right = svg.getBoundingClientRect().right + 1;
          return [...svg.querySelectorAll('text')].filter((one) => one.getBoundingClientRect().right > right)
            .map((one) => svg.closest('figure').id + ': ' + one.textContent);
        })"""
    )
    assert beyond == []


def test_tables_of_runs_settings_and_numbers(opened):
    assert opened.locator("#runs tbody tr").count() == 3
    differing = opened.locator("#settings tr.different th").all_text_contents()
    assert "≠ advantage.name" in differing
    opened.locator("#reward summary").click()
    assert opened.locator("#reward details tbody tr").count() == 2
