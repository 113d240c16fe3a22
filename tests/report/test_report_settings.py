"""Which runs become one curve, what they are called, and the table of settings."""

import pytest
from report_rig import HASHES, learning_curve, make_run, quickstart_config

from calibadv_jax.contrib.report.runs import compare, flatten, group_runs, read_runs
from calibadv_jax.core.errors import UserError


def runs_of(tmp_path, *settings, hashes=None):
    """One run for each tuple of overrides; "grpo" as the first takes the config of that name."""
    folders = []
    for index, overrides in enumerate(settings):
        folder = tmp_path / f"run-{index}"
        config = quickstart_config(folder, *overrides)
        make_run(folder, learning_curve(3, index), config, (hashes or [HASHES] * 9)[index])
        folders.append(folder)
    return read_runs(folders)


def test_seeds_are_one_series(tmp_path):
    runs = runs_of(tmp_path, ["run.seed=4"], ["run.seed=5"], ["run.seed=6", "world.seed=6"])
    (series,) = group_runs(runs)
    assert series.runs == tuple(runs)
    assert (series.name, series.seeds) == ("3 seeds", "4, 5, 6")


def test_same_seed_twice_is_not_two_seeds(tmp_path):
    (series,) = group_runs(runs_of(tmp_path, ["run.seed=4"], ["run.seed=4"]))
    assert series.name == "2 runs"


def test_paths_in_run_folders_are_equal_in_lists(tmp_path):
    runs = runs_of(tmp_path, [], [])
    for run in runs:
        run.config["data"]["train"] = [f"{run.folder}/world/a.jsonl", "/elsewhere/b.jsonl"]
    (series,) = group_runs(runs)
    rows = {row.key: row for row in compare([series])}
    assert rows["data.train"].values == ("['${run.dir}/world/a.jsonl', /elsewhere/b.jsonl]",)


def test_another_algorithm_is_another_series_named_by_it(tmp_path):
    runs = runs_of(tmp_path, ["advantage.name=grpo"], [], ["advantage.name=grpo", "run.seed=1"])
    assert [(each.name, len(each.runs)) for each in group_runs(runs)] == [("grpo", 2), ("calibadv", 1)]


def test_series_are_named_by_the_keys_that_differ(tmp_path):
    runs = runs_of(tmp_path, ["advantage.target_ratio=1"], ["advantage.target_ratio=2"])
    assert [each.name for each in group_runs(runs)] == ["target_ratio 1.0", "target_ratio 2.0"]


def test_series_with_many_differences_are_named_by_folders(tmp_path):
    more = ["learner.steps=7", "rollout.group_size=4", "rollout.max_searches=2"]
    runs = runs_of(tmp_path, [], more, [*more, "run.seed=3"])
    assert [each.name for each in group_runs(runs)] == ["run-0", "run-1 +1"]


@pytest.mark.parametrize(
    "override",
    ["learner.optimizer.lr=0.5", "policy.path=/models/other", "reward.answer=em", "rollout.group_size=4"],
)
def test_experiment_setting_separates_runs(tmp_path, override):
    assert len(group_runs(runs_of(tmp_path, [], [override]))) == 2


@pytest.mark.parametrize(
    "override", ["retriever.url=http://127.0.0.1:1", "log.progress=false", "checkpoint.every=7"]
)
def test_setting_of_place_or_display_keeps_runs_together(tmp_path, override):
    assert len(group_runs(runs_of(tmp_path, [], [override]))) == 1


def test_other_questions_separate_runs_unless_generated(tmp_path):
    other = [HASHES, HASHES | {"data.content": "other"}]
    assert len(group_runs(runs_of(tmp_path / "a", [], [], hashes=other))) == 1
    given = ["world.dir=''", "data.train=/data/train.jsonl"]
    assert len(group_runs(runs_of(tmp_path / "b", given, given, hashes=other))) == 2


def test_another_policy_size_parts_the_runs(tmp_path):
    other = [HASHES, HASHES | {"policy.config": "larger"}]
    assert len(group_runs(runs_of(tmp_path, [], [], hashes=other))) == 2


def test_runs_without_a_config_stand_alone(tmp_path):
    folders = [make_run(tmp_path / name, learning_curve(2, 0)) for name in ("a", "b")]
    assert [each.name for each in group_runs(read_runs(folders))] == ["a", "b"]


@pytest.mark.medium
def test_more_configs_than_colours_are_refused(tmp_path):
    runs = runs_of(tmp_path, *[[f"learner.steps={steps}"] for steps in range(10, 19)])
    with pytest.raises(UserError, match="9 different configs, but a chart can show 8"):
        group_runs(runs)


def test_comparison_marks_exactly_the_differences(tmp_path):
    runs = runs_of(tmp_path, ["advantage.name=grpo"], [], ["run.seed=3"])
    rows = {row.key: row for row in compare(group_runs(runs))}
    assert set(rows) == set(flatten(runs[0].config))
    different = {key for key, row in rows.items() if row.is_different}
    assert different == {"advantage.name", "run.seed", "run.dir"}
    assert rows["advantage.name"].values == ("grpo", "calibadv")
    assert rows["run.seed"].values == ("0", "0 | 3")
    assert rows["policy.path"].values == ("${run.dir}/sft",) * 2


def test_key_that_one_config_lacks_is_a_difference(tmp_path):
    runs = runs_of(tmp_path, [], [])
    del runs[1].config["guards"]["patience"]
    rows = {row.key: row for row in compare(group_runs(runs))}
    assert rows["guards.patience"].is_different
    assert "-" in " ".join(rows["guards.patience"].values)


def test_flatten_keeps_lists_and_empty_sections():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
