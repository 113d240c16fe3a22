"""Evaluation tables, with and without intervals."""

import json
from pathlib import Path

import pytest

from calibadv_jax.contrib.report.runs import Score, one_metric, read_evaluations, score_cell

MEANS = {"0": {"all": {"f1": 0.5, "trajectories": 300.0}, "nq": {"f1": 0.25, "trajectories": 100.0}}}
WITH_INTERVALS = {
    "policy": {"kind": "checkpoint"},
    "method": "agent",
    "confidence": 0.95,
    "scores": MEANS,
    "intervals": {"0": {"all": {"f1": [0.375, 0.625]}}},
}


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_means_alone(tmp_path):
    write(tmp_path, "evaluation.json", MEANS)
    (table,) = read_evaluations(tmp_path, None)
    assert (table.title, table.confidence) == ("Evaluation", None)
    assert table.metrics == ["f1", "trajectories"]
    assert table.rows == {
        "temperature 0, all": {"f1": Score(0.5), "trajectories": Score(300.0)},
        "temperature 0, nq": {"f1": Score(0.25), "trajectories": Score(100.0)},
    }


def test_means_with_intervals(tmp_path):
    write(tmp_path, "evaluation.json", WITH_INTERVALS)
    (table,) = read_evaluations(tmp_path, None)
    assert table.confidence == 0.95
    assert table.rows["temperature 0, all"]["f1"] == Score(0.5, 0.375, 0.625)
    assert table.rows["temperature 0, nq"]["f1"] == Score(0.25)


def test_quickstart_has_two_tables_in_order(tmp_path):
    write(tmp_path, "evaluation_after.json", WITH_INTERVALS)
    write(tmp_path, "evaluation_before.json", WITH_INTERVALS)
    write(tmp_path, "evaluation.json", WITH_INTERVALS | {"method": "rag"})
    write(tmp_path, "quickstart.json", {"before": MEANS, "after": MEANS, "seconds": {"total": 3}})
    tables = read_evaluations(tmp_path, str(tmp_path / "evaluation.json"))
    assert [table.title for table in tables] == ["Before training", "After training", "Evaluation (rag)"]
    assert tables[0].confidence == 0.95


def test_quickstarts_own_file_is_enough(tmp_path):
    write(tmp_path, "quickstart.json", {"before": MEANS, "after": MEANS, "seconds": {"total": 3}})
    assert [table.title for table in read_evaluations(tmp_path, None)] == [
        "Before training",
        "After training",
    ]


def test_evaluation_that_was_written_elsewhere_is_read(tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path, "scores.json", MEANS)
    (table,) = read_evaluations(tmp_path / "run", str(tmp_path / "scores.json"))
    assert table.title == "scores"


def test_nothing_and_half_a_file_are_no_tables(tmp_path):
    assert read_evaluations(tmp_path, str(tmp_path / "absent" / "x.json")) == []
    write(tmp_path, "evaluation.json", '{"0": {"all": {"f1"')
    assert read_evaluations(tmp_path, None) == []


def test_one_metric_of_all_tables(tmp_path):
    write(tmp_path, "evaluation.json", WITH_INTERVALS)
    (table,) = read_evaluations(tmp_path, None)
    other = type(table)("Other", {"temperature 1, all": {"f1": Score(0.75)}})
    without = type(table)("Without", {"temperature 1, all": {"em": Score(0.75)}})
    columns, rows = one_metric([("run-0", table), ("run-1", other), ("run-1", without)], "f1")
    assert columns == [("run-0", "Evaluation"), ("run-1", "Other")]
    assert rows == [
        ("temperature 0, all", ["0.500 [0.375, 0.625]", "-"]),
        ("temperature 0, nq", ["0.250", "-"]),
        ("temperature 1, all", ["-", "0.750"]),
    ]


def test_counts_are_whole_numbers():
    assert score_cell("trajectories", Score(300.0)) == "300"
    assert score_cell("searches", Score(2.0)) == "2.000"
    assert score_cell("f1", None) == "-"


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("name", ["evaluation.json", "scores.json"])
def test_evaluation_output_is_read_once(
    tmp_path, monkeypatch, relative, name
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", name, MEANS)
    (tmp_path / "link").symlink_to("run")
    for folder in (Path("run"), Path("link"), tmp_path / "run"):
        output = Path("run", name) if relative else tmp_path / "run" / name
        assert len(read_evaluations(folder, str(output))) == 1
