"""Run folders as they are found, their evaluations, and the series that they form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_rig import HASHES, keep_step, learning_curve, make_run, quickstart_config

from calibadv_jax.contrib.report.runs import (
    compare,
    evaluation_files,
    flatten,
    group_runs,
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
    assert list(run.rows) == [1, 2, 3, 4]
    assert run.values("a") == {1: 1.0, 2: 7.0, 4: None} and run.values("b") == {}
    assert run.rollouts == {1: files[0], 4: files[1]}


@pytest.mark.parametrize(
    ("num_runs", "ending"), [(2, "seed-1; give those that you want"), (10, "seed-7 and 2 more; give those.*")]
)
def test_folder_of_runs_is_refused_with_their_names(tmp_path, num_runs, ending):
    for seed in range(num_runs):
        make_run(tmp_path / f"seed-{seed}", {"a": [1.0]})
    make_run(tmp_path / "sft_metrics", {"a": [1.0]})
    (tmp_path / "notes").mkdir()
    runs = f"{tmp_path}/seed-0 {tmp_path}/seed-1"
    with pytest.raises(UserError, match=f"no metrics.jsonl; it holds some: {runs}") as refusal:
        read_runs([tmp_path])
    assert re.search(f"{ending}$", str(refusal.value))


def test_config_of_the_newest_start_counts(tmp_path):
    make_run(tmp_path, {"a": [1.0]}, quickstart_config(tmp_path, "learner.steps=5"))
    first = (tmp_path / "configs/0.yaml").read_text()
    for number, steps in ((2, 6), (10, 7)):
        (tmp_path / f"configs/{number}.yaml").write_text(first.replace("steps: 5", f"steps: {steps}"))
        (tmp_path / f"configs/{number}.json").write_text(json.dumps(HASHES))
    (tmp_path / "configs/notes.yaml").write_text("learner: {steps: 99}")
    (run,) = read_runs([tmp_path])
    assert (run.setting("learner.steps"), run.num_starts) == (7, 3)
    assert run.setting("learner.nothing") is None and run.setting("no.such.section") is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["empty"], r"not a run folder, it has no metrics\.jsonl; give the run\.dir"),
        (["absent"], "not a run folder"),
        (["begun"], "no metrics yet; try again when the first step has ended"),
        (["started"], "no metrics yet; try again when the first step has ended"),
        (["run", "empty/../run"], "named twice"),
    ],
)
def test_folders_without_report_are_refused(tmp_path, names, words):
    make_run(tmp_path / "run", {"reward/mean": [1.0]})
    (tmp_path / "empty").mkdir()
    for name in ("begun", "started"):
        make_run(tmp_path / name, {}, quickstart_config(tmp_path))
    (tmp_path / "begun/metrics.jsonl").unlink()
    with pytest.raises(UserError, match=words):
        read_runs([tmp_path / name for name in names])
    assert read_runs([]) == []


def test_names_are_paths_below_the_common_folder(tmp_path):
    for places, names in (
        (["grpo/seed-0", "grpo/seed-1", "calibadv/seed-0"], None),
        (["grpo/seed-0", "grpo/seed-1"], ["seed-0", "seed-1"]),
        (["grpo/seed-0"], ["seed-0"]),
    ):
        runs = read_runs([make_run(tmp_path / place, {"a": [1.0]}) for place in places])
        assert [run.name for run in runs] == (names or places)
        assert [each.name for each in group_runs(runs)] == (names or places)  # without a config: alone


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
    assert (series.name, series.runs) == ("3 runs", tuple(runs))
    assert {run.num_starts for run in runs} == {1} and runs[0].setting("no.key") is None
    settings = compare([series])
    assert settings["data.train"] == [["['${run.dir}/world/a.jsonl', /elsewhere/b.jsonl]"]]
    assert settings["run.seed"] == [["4", "5", "6"]]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([[GRPO], [], [GRPO, "run.seed=1"]], ["grpo", "calibadv"]),
        ([[], MANY, [*MANY, "run.seed=3"]], ["run-0", "run-1 +1"]),
        *[([[], [key]], ["2 runs"]) for key in ("log.progress=false", "checkpoint.every=7")],
        ([[], ["retriever.url=http://127.0.0.1:1"]], ["2 runs"]),
        ([[], ["learner.optimizer.lr=0.5"]], ["lr 0.001", "lr 0.5"]),
        ([[], ["policy.path=/models/other"]], ["path ${run.dir}/sft", "path /models/other"]),
        ([[], ["reward.answer=em"]], ["answer f1", "answer em"]),
        ([[], ["rollout.group_size=4"]], ["group_size 8", "group_size 4"]),
        (
            [["advantage.target_ratio=1"], ["advantage.target_ratio=2"]],
            ["target_ratio 1.0", "target_ratio 2.0"],
        ),
        ([["run.seed=4"], ["run.seed=4"]], ["2 runs"]),
    ],
    ids=str,
)
def test_series_are_named_by_what_differs(tmp_path, settings, names):
    assert [each.name for each in group_runs(runs_of(tmp_path, *settings))] == names


def test_series_hold_their_runs_in_the_order_of_the_first(tmp_path):
    runs = runs_of(tmp_path, [GRPO], [], [GRPO, "run.seed=1"])
    assert [series.runs for series in group_runs(runs)] == [(runs[0], runs[2]), (runs[1],)]


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


def test_comparison_has_every_key_of_each_series(tmp_path):
    runs = runs_of(tmp_path, ["advantage.name=grpo"], [], ["run.seed=3"])
    assert flatten({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}
    del runs[1].config["guards"]["patience_steps"], runs[2].config["guards"]["patience_steps"]
    settings = compare(group_runs(runs))
    assert set(settings) == set(flatten(runs[0].config))
    patience = settings.pop("guards.patience_steps")
    assert patience[0] != patience[1] == ["-"]
    different = {key: values for key, values in settings.items() if values[0] != values[1]}
    assert different == {"advantage.name": [["grpo"], ["calibadv"]], "run.seed": [["0"], ["0", "3"]]}
    assert settings["policy.path"] == [["${run.dir}/sft"]] * 2


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_evaluations_are_read_in_order(tmp_path):
    """One of another program is no evaluation; half a file is named."""
    for name, content in (
        ("evaluation_after", EVALUATION | {"intervals": {}}),
        ("evaluation_before", EVALUATION),
        ("evaluation", EVALUATION | {"method": "rag"}),
        ("evaluation_notes", {"seconds": 3}),
    ):
        write(tmp_path, f"{name}.json", content)
    rows = read_evaluations(evaluation_files(tmp_path, str(tmp_path / "absent/x.json")))
    titles = ["evaluation before", "evaluation after", "evaluation (rag)"]
    assert [row.title for row in rows] == [title for title in titles for _ in range(2)]
    assert [row.questions for row in rows] == ["temperature 0, all", "temperature 0, nq"] * 3
    assert [row.confidence for row in rows] == [0.95, None, None, None, 0.95, None]
    assert rows[0].cells == {"f1": "0.500 [0.375, 0.625]", "trajectories": "300"}
    assert rows[1].cells == {"f1": "0.250", "trajectories": "100"}
    write(tmp_path, "evaluation_cut.json", '{"scores": {"all": {"f1"')
    with pytest.raises(UserError, match="evaluation_cut.json: not valid JSON"):
        read_evaluations(evaluation_files(tmp_path, None))


def test_evaluation_output_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    Path("link").symlink_to("run")
    for name, output in (("evaluation.json", "run/evaluation.json"), ("scores.json", "link/scores.json")):
        write(tmp_path / "run", name, EVALUATION)
        for folder in (Path("run"), Path("link")):
            rows = read_evaluations(evaluation_files(folder, output))
            assert [row.title for row in rows if row.questions.endswith("all")] == [name.partition(".")[0]]
        (tmp_path / "run" / name).unlink()


@pytest.mark.parametrize("name", ["evaluation.json", "scores.json"])
@pytest.mark.parametrize("folder", ["run", "link"])
def test_absolute_evaluation_output_is_read_once(tmp_path, monkeypatch, name, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    Path("link").symlink_to("run")
    write(tmp_path / "run", name, EVALUATION)
    for place in (Path(folder), tmp_path / folder):
        rows = read_evaluations(evaluation_files(place, str(tmp_path / "run" / name)))
        assert [row.questions for row in rows] == ["temperature 0, all", "temperature 0, nq"]


def test_evaluation_output_outside_the_run_is_read(tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path, "scores.json", EVALUATION)
    rows = read_evaluations(evaluation_files(tmp_path / "run", str(tmp_path / "scores.json")))
    assert [row.title for row in rows] == ["scores", "scores"]


def test_only_counts_are_whole_numbers(tmp_path):
    means = {"trajectories": 300.0, "searches": 2.0}
    write(tmp_path, "evaluation.json", {"scores": {"0": {"all": means}}, "intervals": {}})
    (row,) = read_evaluations(evaluation_files(tmp_path, None))
    assert row.cells == {"trajectories": "300", "searches": "2.000"}


def test_evaluation_outside_of_the_run_needs_trust(tmp_path):
    """Its config or a link names it: a page that is published must not show a file of the reader's."""
    run = tmp_path / "run"
    output = tmp_path / "private.json"
    output.write_text(json.dumps(EVALUATION))
    linked = tmp_path / "linked.json"
    linked.write_text(json.dumps(EVALUATION))
    make_run(run, {"a": [1.0]}, quickstart_config(run, f"evaluate.output={output}"))
    (run / "evaluation.json").symlink_to(linked)
    (given,) = read_runs([run])
    assert given.unread == [linked, output] and given.evaluations == []
    (trusted,) = read_runs([run], is_trusted=True)
    assert trusted.unread == [] and {row.title for row in trusted.evaluations} == {"linked", "private"}
