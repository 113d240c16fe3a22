"""`calibadv report`: what it writes and how it refuses."""

import json
import re
from html.parser import HTMLParser

import pytest
from report_rig import keep_step, learning_curve, make_run, quickstart_config, two_configs

from calibadv_jax import cli

pytest.importorskip("matplotlib")

from calibadv_jax.contrib.report.page import rounded

pytestmark = pytest.mark.medium  # figures are drawn


class Page(HTMLParser):
    """Tags with their attributes, and the tags that are open at the end."""

    VOID = {"meta", "link", "br", "img", "input"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self.open += [tag] * (tag not in self.VOID)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, expected):
        return [attributes for tag, attributes in self.tags if tag == expected]


def test_scores_have_three_places_and_larger_values_four_digits():
    values = (0.5, -0.12345, 9.9996, 10, 10.54321, -10.54321, 1234.56)
    expected = ["0.500", "-0.123", "10.000", "10", "10.54", "-10.54", "1235"]
    assert [rounded(value) for value in values] == expected


def report(*arguments):
    """Runs the command; returns its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["report", *map(str, arguments)])
    return end.value.code


@pytest.fixture(scope="module")
def of_two_configs(tmp_path_factory):
    """The text of their page."""
    folder = tmp_path_factory.mktemp("two")
    output = folder / "new" / "page.html"
    runs = two_configs(folder, 12)
    for index, run in enumerate(runs):
        keep_step(run, 12, [{"data_source": "nq </script><b>", "metrics": {"f1": 0.5 + index / 8}}])
    evaluation = {"confidence": 0.9, "scores": {"0": {"all": {"f1": 0.5}}}}
    evaluation["intervals"] = {"0": {"all": {"f1": [0.4, 0.6]}}}
    (runs[2] / "evaluation.json").write_text(json.dumps(evaluation))
    assert report(*runs, "--output", output) == 0
    return output.read_text(encoding="utf-8")


def test_one_run_has_its_page_in_its_folder(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "run", learning_curve(4, 0))
    assert report(folder, "--png", tmp_path / "figures") == 0
    files = {path.stem: path.read_bytes() for path in (tmp_path / "figures").glob("*.png")}
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert files.keys() == {attributes["id"] for attributes in page.all("figure")}
    assert all(content.startswith(b"\x89PNG") for content in files.values())
    printed = capsys.readouterr()
    assert printed.out == f"{folder}/report.html\n{tmp_path}/figures: {len(files)} figures\n"
    assert printed.err.startswith("reading the kept trajectories\ndrawing the figures\n")
    assert [path.name for path in folder.iterdir() if "report" in path.name] == ["report.html"]
    monkeypatch.chdir(tmp_path)
    assert report(folder, make_run(tmp_path / "other", learning_curve(4, 0))) == 0  # in the current folder
    assert capsys.readouterr().out == "report.html\n" and (tmp_path / "report.html").is_file()


def test_page_asks_for_nothing_and_is_whole(of_two_configs):
    text = of_two_configs
    page = Page(text)
    assert page.open == []
    theme = {*re.findall(r"(--[a-z0-9-]+):", text)}
    assert {*re.findall(r"var\((--[a-z0-9-]+)\)", text)} <= theme
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"' ]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    for _, attributes in page.tags:
        links = [attributes.get(name, "#") for name in ("href", "xlink:href")]
        assert "src" not in attributes and all(link.startswith("#") for link in links)
    (policy,) = [each["content"] for each in page.all("meta") if each.get("http-equiv")]
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = {each["href"].removeprefix("#") for each in page.all("a")}
    assert {"runs", "outcome", "credit", "settings"} <= links <= set(ids)
    figures = {each["id"] for each in page.all("figure")}
    assert figures >= {"reward", "f1", "f1_by_source", "format", "entropy", "phases"}
    assert all(attributes["aria-label"] for attributes in page.all("svg") if attributes.get("role") == "img")


def test_places_are_those_of_drawn_axes(of_two_configs):
    for figure in of_two_configs.split("<figure")[1:]:
        panels = json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure)[1])
        clips = re.findall(r'<clipPath id="[^"]*">\s*<rect x="([\d.]+)" y="([\d.]+)"', figure)
        assert len(clips) == len(panels)
        for panel, (left, top) in zip(panels, clips, strict=True):
            assert (panel["left"], panel["top"]) == pytest.approx((float(left), float(top)), abs=0.11)


def test_script_and_table_of_a_figure_have_its_values(tmp_path):
    """Of two seeds at four steps: both reward values, one, none that is finite, and both again."""
    columns = [0.25, 0.5, None, 0.123456], [0.75, None, None, 0.25]
    folders = []
    for seed, column in enumerate(columns):
        folder = tmp_path / f"seed-{seed}"
        config = quickstart_config(folder, f"run.seed={seed}")
        folders.append(make_run(folder, {"reward/mean": column}, config))
    text = page_of(tmp_path, folders)
    figure = text.split('<figure id="reward"')[1].split("</figure>")[0]
    (panel,) = json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure)[1])
    (curve,) = panel["curves"]
    assert panel["title"] == "" and curve.pop("name") == ""
    assert curve == {
        "steps": [1, 2, 3, 4],
        "mean": [0.5, 0.5, None, 0.1867],
        "low": [0.25, 0.5, None, 0.1235],
        "high": [0.75, 0.5, None, 0.25],
    }
    row = re.search(r"<tbody>\s*<tr>(.*?)</tr>", figure, re.DOTALL)[1]
    assert re.findall(r'class="number">(.*?)<', row) == ["0.5", "0.1867", "0.1867", "0.5"]


def test_text_from_runs_is_text_in_the_page(tmp_path):
    folder = make_run(tmp_path / "<img src=x>", learning_curve(12, 0), quickstart_config(tmp_path / "<b>"))
    for step in (11, 12):
        sources = ("nq </script><i>", "other")
        keep_step(folder, step, [{"data_source": name, "metrics": {"f1": 1 / step}} for name in sources])
    assert report(folder) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and not page.all("img") and not page.all("i") and not page.all("b")
    assert "nq &lt;/script&gt;&lt;i&gt;" in text


def test_page_says_what_the_runs_are(of_two_configs):
    text = of_two_configs
    assert "3 runs of 2 configs: calibadv (2 runs), grpo (1 run)." in text
    assert '<td data-label="steps">12 of 40</td>' in text
    assert "<p>They differ in <b>advantage.name</b> (calibadv, grpo).</p>" in text
    cells = '<td data-label="calibadv">calibadv</td><td data-label="grpo">grpo</td>'
    assert f'<tr><th scope="row">advantage.name</th>{cells}' in text
    cells = '<td data-label="calibadv">1 | 2</td><td data-label="grpo">0</td>'
    assert f'<tr><th scope="row">run.seed</th>{cells}' in text  # below, since it makes no other experiment
    assert 'class="different"><th scope="row"><span title="differs">≠ </span>advantage.name</th>' in text
    confidence = '<td data-label="confidence">90 %</td>'
    assert f'{confidence}<td data-label="f1" class="number">0.500 [0.400, 0.600]</td>' in text
    assert "Strong lines are means of 10 steps" in text


def test_result_stands_before_the_figures_and_the_title_names_the_method(of_two_configs):
    text = of_two_configs
    assert "<title>CalibAdv and GRPO</title>" in text and "<h1>CalibAdv and GRPO</h1>" in text
    places = [text.index(f'<section id="{key}"') for key in ("result", "differences", "runs", "outcome")]
    assert places == sorted(places)
    result = text[places[0] : places[1]]
    assert "<h3>CalibAdv</h3>" in result and "<h3>GRPO</h3>" in result
    assert "<strong>0.500</strong>" in result
    assert '90 % confidence interval: after <span class="range">0.400 to 0.600</span>' in result


def page_of(tmp_path, folders, *arguments):
    """The text of the page of these runs."""
    output = tmp_path / "page.html"
    assert report(*folders, "--output", output, *arguments) == 0
    return output.read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [1, 3])
def test_trends_are_explained_where_there_are_any(tmp_path, steps):
    folder = make_run(tmp_path / "run", {"reward/mean": [0.25, 0.5] * 15})
    text = page_of(tmp_path, [folder], "--smooth", steps)
    assert ("Strong lines" in text) == (steps > 1)
    assert ("Strong lines are means of 3 steps" in text) == (steps == 3)


def test_early_ends_and_left_out_figures_are_notes(tmp_path):
    folders = []
    for name, steps in (("short", 2), ("long", 3)):
        metrics = {"reward/mean": [0.25, 0.5, 0.75][:steps]}
        folders.append(make_run(tmp_path / name, metrics, quickstart_config(tmp_path / name)))
    text = page_of(tmp_path, folders)
    assert "<li>Run short ends at step 2; after it, its curve shows only the runs that go on.</li>" in text
    left_out = "<li>Left out: F1 by data source, Advantage by turn, Importance weights. "
    assert f"{left_out}No trajectories were kept; log.rollouts=parquet keeps them.</li>" in text
    keep_step(folders[0], 2, [])
    assert f"{left_out}The kept trajectories do not hold their values.</li>" in page_of(tmp_path, folders)


def test_steps_of_each_run_are_in_the_table(tmp_path):
    lengths = {"early": 3, "finished": 5, "unknown": 4}
    folders = []
    for name, steps in lengths.items():
        folder = tmp_path / name
        config = None if name == "unknown" else quickstart_config(folder, "learner.steps=5")
        folders.append(make_run(folder, {"reward/mean": [float(step) for step in range(steps)]}, config))
    text = page_of(tmp_path, folders)
    assert re.findall(r'data-label="steps">(\d+(?: of \d+)?)</td>', text) == ["3 of 5", "5 of 5", "4"]


def test_metrics_that_an_evaluation_lacks_are_dashes(tmp_path):
    folders = []
    for name, metric in (("a", "f1"), ("b", "em")):
        folder = make_run(tmp_path / name, {"reward/mean": [0.25, 0.5]})
        evaluation = {"scores": {"0": {"all": {metric: 0.5}}}, "intervals": {}}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        folders.append(folder)
    text = page_of(tmp_path, folders)
    for run, f1, em in (("a", "0.500", "-"), ("b", "-", "0.500")):
        columns = {"run": run, "evaluation": "evaluation", "confidence": "-"}
        cells = "".join(f'<td data-label="{label}">{value}</td>' for label, value in columns.items())
        for label, value in (("f1", f1), ("em", em)):
            cells += f'<td data-label="{label}" class="number">{value}</td>'
        assert f"{cells}</tr>" in text


def test_long_phases_are_announced(tmp_path, capsys):
    folder = make_run(tmp_path / "run", {"reward/mean": [0.25, 0.5]})
    assert report(folder) == 0
    assert capsys.readouterr().err == "reading the kept trajectories\ndrawing the figures\n"


def test_many_long_runs_make_small_figures(tmp_path):
    """A page of 25 of them stays below 5 MB."""
    folders = []
    for index in range(8):
        config = quickstart_config(tmp_path, f"learner.optimizer.lr={index + 1}")
        folders.append(make_run(tmp_path / f"run-{index}", learning_curve(1000, index), config))
    assert report(*folders, "--output", tmp_path / "page.html", "--smooth", "1") == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(text) < 5e6 / 25 * text.count("<figure")
    assert "Strong lines" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "{}/absent",
            "{}/absent: not a run folder, it has no metrics.jsonl; give the run.dir of a run",
        ),
        ("{}/empty", "{}/empty: no metrics yet; try again when the first step has ended"),
        ("{}/run --smooth 0", "argument --smooth: 0: give 1 or more"),
        ("{}/run", "matplotlib is not installed; pip install 'calibadv-jax[report]'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, arguments, words):
    make_run(tmp_path / "run", learning_curve(2, 0))
    make_run(tmp_path / "empty", {}, quickstart_config(tmp_path))
    if "matplotlib" in words:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert report(*arguments.replace("{}", str(tmp_path)).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words.replace('{}', str(tmp_path))}") and error.count("\n") == 1


def test_missing_run_is_one_line(capsys):
    assert report() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
