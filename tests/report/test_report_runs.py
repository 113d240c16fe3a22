"""Run folders as they are found: whole, being written, killed, or no run at all."""

import pytest
from report_rig import keep_step, learning_curve, make_run, quickstart_config

from calibadv_jax.contrib.report.gather import state
from calibadv_jax.contrib.report.runs import read_runs
from calibadv_jax.core.errors import UserError


def test_rows_are_read_by_step(tmp_path):
    (run,) = read_runs([make_run(tmp_path, {"a": [1.0, float("nan"), None]})])
    assert run.kind == "training run"
    assert run.steps == [1, 2, 3]
    assert run.values("a") == {1: 1.0, 3: None}
    assert run.values("b") == {}


def test_cut_row_is_left_out(tmp_path):
    make_run(tmp_path, {"a": [1.0, 2.0]})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a"')
    (run,) = read_runs([tmp_path])
    assert run.steps == [1, 2]


def test_later_row_of_a_repeated_step_counts(tmp_path):
    make_run(tmp_path, {"a": [1.0, 2.0]})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a": 7.0}\n')
    (run,) = read_runs([tmp_path])
    assert run.values("a") == {1: 1.0, 2: 7.0}


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
    config = quickstart_config(tmp_path, "learner.steps=3")
    (unfinished,) = read_runs([make_run(tmp_path / "a", {"a": [1.0, 2.0]}, config)])
    (finished,) = read_runs([make_run(tmp_path / "b", {"a": [1.0, 2.0, 3.0]}, config)])
    (unknown,) = read_runs([make_run(tmp_path / "c", {"a": [1.0]})])
    assert state(unfinished) == "2 of 3 steps: still running, or stopped early"
    assert state(finished) == "3 of 3 steps"
    assert state(unknown) == "1 step"


def test_trajectories_of_rolled_back_steps_do_not_count(tmp_path):
    make_run(tmp_path, {"a": [1.0, 2.0]})
    kept = [keep_step(tmp_path, step, []) for step in (1, 2, 3)]
    (tmp_path / "rollouts/step_new.parquet").write_text("")
    (run,) = read_runs([tmp_path])
    assert run.rollouts == {1: kept[0], 2: kept[1]}


def test_folder_without_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"not a run folder, it has no metrics\.jsonl; give the run\.dir"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match="not a run folder"):
        read_runs([tmp_path / "absent"])


def test_folder_of_runs_names_them(tmp_path):
    for name in ("seed-1", "seed-0", "sft_metrics"):
        make_run(tmp_path / name, {"a": [1.0]})
    with pytest.raises(UserError, match=rf"it holds some: {tmp_path}/seed-0 {tmp_path}/seed-1$"):
        read_runs([tmp_path])


@pytest.mark.parametrize("has_file", [False, True])
def test_run_before_first_step_is_refused(tmp_path, has_file):
    make_run(tmp_path, {}, quickstart_config(tmp_path))
    if not has_file:
        (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no metrics yet; try again when the first step has ended"):
        read_runs([tmp_path])


def test_runs_of_different_kinds_are_refused(tmp_path):
    training = make_run(tmp_path / "run", {"reward/mean": [1.0]})
    cold_start = make_run(tmp_path / "sft_metrics", {"sft/loss": [1.0]})
    with pytest.raises(
        UserError, match="sft_metrics is a cold start and .*run a training run; make a report of each"
    ):
        read_runs([training, cold_start])
    (run,) = read_runs([cold_start])
    assert run.kind == "cold start"


def test_run_named_twice_is_refused(tmp_path):
    folder = make_run(tmp_path / "a", learning_curve(2, 0))
    with pytest.raises(UserError, match="named twice"):
        read_runs([folder, folder / ".." / "a"])


def test_names_are_the_shortest_that_differ(tmp_path):
    places = ["grpo/seed-0", "grpo/seed-1", "calibadv/seed-0"]
    runs = read_runs([make_run(tmp_path / place, {"a": [1.0]}) for place in places])
    assert [run.name for run in runs] == ["grpo/seed-0", "seed-1", "calibadv/seed-0"]
