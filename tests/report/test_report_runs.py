"""Run folders as they are found, their evaluations, and the series that they form."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_rig import HASHES, keep_step, learning_curve, make_run, quickstart_config

from calibadv_jax.contrib.report.page import state
from calibadv_jax.contrib.report.runs import (
    EvaluationTable,
    compare,
    flatten,
    group_runs,
    one_metric,
    read_evaluations,
    read_runs,
)
from calibadv_jax.core.errors import UserError

GRPO, MANY = "advantage.name=grpo", ["learner.steps=7", "rollout.group_size=4", "rollout.max_searches=2"]
MEANS = {"0": {"all": {"f1": 0.5, "trajectories": 300.0}, "nq": {"f1": 0.25, "trajectories": 100.0}}}
EVALUATION = {"method": "agent", "confidence": 0.95, "scores": MEANS}
EVALUATION |= {"intervals": {"0": {"all": {"f1": [0.375, 0.625]}}}}


def test_rows_are_read_by_step(tmp_path):
    """A later row of a step counts, and one that was cut off does not; nor what a rolled back step kept."""
    make_run(tmp_path, {"a": [1.0, 2.0, float("nan"), None]})
    files = [keep_step(tmp_path, step, []) for step in (1, 4, 5)]
    (tmp_path / "rollouts/step_new.parquet").write_text("")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a": 7.0}\n{"step": 5, "a"')
    (run,) = read_runs([tmp_path])
    assert run.kind == "training run" and run.steps == [1, 2, 3, 4]
    assert run.values("a") == {1: 1.0, 2: 7.0, 4: None} and run.values("b") == {}
    assert run.rollouts == {1: files[0], 4: files[1]}


def test_config_of_the_last_start_counts(tmp_path):
    make_run(tmp_path, {"a": [1.0]}, quickstart_config(tmp_path, "learner.steps=5"))
    for number, steps in ((2, 6), (10, 7)):
        later = (tmp_path / "configs/0.yaml").read_text().replace("steps: 5", f"steps: {steps}")
        (tmp_path / f"configs/{number}.yaml").write_text(later)
    (tmp_path / "configs/notes.yaml").write_text("learner: {steps: 99}")
    (run,) = read_runs([tmp_path])
    assert (run.setting("learner.steps"), run.num_starts) == (7, 3)
    assert run.setting("learner.nothing") is None and run.setting("no.such.section") is None


def test_state_of_a_run(tmp_path):
    planned = quickstart_config(tmp_path, "learner.steps=3")
    unfinished = "2 of 3 steps: still running, or stopped early"
    for length, config, text in ((2, planned, unfinished), (3, planned, "3 of 3 steps"), (1, None, "1 step")):
        (run,) = read_runs([make_run(tmp_path / str(length), {"a": [1.0] * length}, config)])
        assert state(run) == text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["empty"], r"not a run folder, it has no metrics\.jsonl; give the run\.dir"),
        (["absent"], "not a run folder"),
        (["runs"], r"it holds some: \S+/runs/seed-0 \S+/runs/seed-1$"),
        (["begun"], "no metrics yet; try again when the first step has ended"),
        (["started"], "no metrics yet; try again when the first step has ended"),
        (["runs/seed-0", "sft"], "sft is a cold start and .*seed-0 a training run; make a report of each"),
        (["sft", "runs/../sft"], "named twice"),
    ],
)
def test_folders_without_report_are_refused(tmp_path, names, words):
    for name in ("seed-1", "seed-0", "sft_metrics"):
        make_run(tmp_path / "runs" / name, {"reward/mean": [1.0]})
    assert read_runs([make_run(tmp_path / "sft", {"sft/loss": [1.0]})])[0].kind == "cold start"
    (tmp_path / "empty").mkdir()
    for name in ("begun", "started"):
        make_run(tmp_path / name, {}, quickstart_config(tmp_path))
    (tmp_path / "begun/metrics.jsonl").unlink()
    with pytest.raises(UserError, match=words):
        read_runs([tmp_path / name for name in names])


def test_names_are_the_shortest_that_differ(tmp_path):
    places = ["grpo/seed-0", "grpo/seed-1", "calibadv/seed-0"]
    runs = read_runs([make_run(tmp_path / place, {"a": [1.0]}) for place in places])
    assert [run.name for run in runs] == ["grpo/seed-0", "seed-1", "calibadv/seed-0"]
    assert [each.name for each in group_runs(runs)] == [run.name for run in runs]  # without a config: alone


def runs_of(tmp_path, *settings, hashes=None):
    """One run for each tuple of overrides."""
    folders = [tmp_path / f"run-{index}" for index in range(len(settings))]
    for index, (folder, overrides) in enumerate(zip(folders, settings, strict=True)):
        config = quickstart_config(folder, *overrides)
        make_run(folder, learning_curve(3, index), config, (hashes or [HASHES] * 9)[index])
    return read_runs(folders)


def test_seeds_are_one_series(tmp_path):
    runs = runs_of(tmp_path, ["run.seed=4"], ["run.seed=5"], ["run.seed=6", "world.seed=6"])
    for run in runs:  # paths in run folders are equal
        run.config["data"]["train"] = [f"{run.folder}/world/a.jsonl", "/elsewhere/b.jsonl"]
    (series,) = group_runs(runs)
    assert (series.name, series.seeds, series.runs) == ("3 seeds", "4, 5, 6", tuple(runs))
    rows = {row.key: row for row in compare([series])}
    assert rows["data.train"].values == ("['${run.dir}/world/a.jsonl', /elsewhere/b.jsonl]",)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([["run.seed=4"], ["run.seed=4"]], ["2 runs"]),  # not two seeds
        ([[GRPO], [], [GRPO, "run.seed=1"]], ["grpo", "calibadv"]),
        (
            [["advantage.target_ratio=1"], ["advantage.target_ratio=2"]],
            ["target_ratio 1.0", "target_ratio 2.0"],
        ),
        ([[], MANY, [*MANY, "run.seed=3"]], ["run-0", "run-1 +1"]),
        *[([[], [key]], ["2 runs"]) for key in ("log.progress=false", "checkpoint.every=7")],
        ([[], ["retriever.url=http://127.0.0.1:1"]], ["2 runs"]),
        ([[], ["learner.optimizer.lr=0.5"]], ["lr 0.001", "lr 0.5"]),
        ([[], ["policy.path=/models/other"]], ["path ${run.dir}/sft", "path /models/other"]),
        ([[], ["reward.answer=em"]], ["answer f1", "answer em"]),
    ],
    ids=str,
)
def test_series_are_named_by_what_differs(tmp_path, settings, names):
    assert [each.name for each in group_runs(runs_of(tmp_path, *settings))] == names


@pytest.mark.parametrize(
    ("changed", "overrides", "number"),
    [
        ("data.content", [], 1),  # of a generated world
        ("data.content", ["world.dir=''", "data.train=/data/train.jsonl"], 2),
        ("policy.config", [], 2),
    ],
)
def test_other_inputs_separate_runs(tmp_path, changed, overrides, number):
    hashes = [HASHES, HASHES | {changed: "other"}]
    assert len(group_runs(runs_of(tmp_path, overrides, overrides, hashes=hashes))) == number


def test_more_configs_than_colours_are_refused(tmp_path):
    (run,) = runs_of(tmp_path, [])
    runs = [replace(run, config=run.config | {"learner": {"steps": steps}}) for steps in range(9)]
    with pytest.raises(UserError, match="9 different configs, but a chart can show 8"):
        group_runs(runs)


def test_comparison_marks_exactly_the_differences(tmp_path):
    runs = runs_of(tmp_path, ["advantage.name=grpo"], [], ["run.seed=3"])
    rows = {row.key: row for row in compare(group_runs(runs))}
    assert set(rows) == set(flatten(runs[0].config))
    assert flatten({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}
    different = {key for key, row in rows.items() if row.is_different}
    assert different == {"advantage.name", "run.seed", "run.dir"}
    assert rows["advantage.name"].values == ("grpo", "calibadv")
    assert rows["run.seed"].values == ("0", "0 | 3")
    assert rows["policy.path"].values == ("${run.dir}/sft",) * 2
    del runs[1].config["guards"]["patience"]
    rows = {row.key: row for row in compare(group_runs(runs))}
    assert rows["guards.patience"].is_different and "-" in " ".join(rows["guards.patience"].values)


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("has_intervals", [False, True])
def test_means_and_intervals_are_read(tmp_path, has_intervals):
    write(tmp_path, "evaluation.json", EVALUATION | ({} if has_intervals else {"intervals": {}}))
    (table,) = read_evaluations(tmp_path, None)
    assert (table.title, table.confidence) == ("Evaluation", 0.95 if has_intervals else None)
    assert table.metrics == ["f1", "trajectories"]
    assert table.rows == {
        "temperature 0, all": {"f1": "0.500" + " [0.375, 0.625]" * has_intervals, "trajectories": "300"},
        "temperature 0, nq": {"f1": "0.250", "trajectories": "100"},
    }


def test_evaluations_are_in_order(tmp_path):
    """Half a file, and one of another program, are no evaluations."""
    for name, content in (
        ("evaluation_after", EVALUATION),
        ("evaluation_before", EVALUATION),
        ("evaluation", EVALUATION | {"method": "rag"}),
        ("evaluation_cut", '{"scores": {"all": {"f1"'),
        ("evaluation_notes", {"seconds": 3}),
    ):
        write(tmp_path, f"{name}.json", content)
    titles = [table.title for table in read_evaluations(tmp_path, str(tmp_path / "absent/x.json"))]
    assert titles == ["Before training", "After training", "Evaluation (rag)"]


def test_one_metric_of_all_tables():
    tables = [
        EvaluationTable(f"table {number}", {f"questions {number}": {metric: str(number)}}, None)
        for number, metric in enumerate(("f1", "f1", "em"))
    ]
    columns, rows = one_metric(list(zip("abc", tables, strict=True)), "f1")
    assert columns == [("a", "table 0"), ("b", "table 1")]
    assert rows == [("questions 0", ["0", "-"]), ("questions 1", ["-", "1"])]


def test_evaluation_output_is_read_once(tmp_path, monkeypatch):
    for name, title in (("evaluation.json", "Evaluation"), ("scores.json", "scores")):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        write(run, name, EVALUATION)
        monkeypatch.chdir(tmp_path / name)
        Path("link").symlink_to("run")
        for folder, output in itertools.product(
            (Path("run"), Path("link"), run), (Path("run", name), run / name)
        ):
            (table,) = read_evaluations(folder, str(output))
            assert table.title == title
