"""The result of each series: scores before and after, and the title of the page."""

import json

import pytest
from report_rig import make_run, quickstart_config

from calibadv_jax.contrib.report.results import Measured, method_name, results, title
from calibadv_jax.contrib.report.runs import group_runs, read_runs
from calibadv_jax.core.errors import UserError

REWARDS = {"reward/mean": [0.25, 0.5], "timing_s/step": [30.0, 90.0]}


def evaluation(f1, interval=None, searches=1.0):
    """Scores of an evaluation at two temperatures; the first one is the lower one."""
    intervals = {"0": {"all": {"f1": interval}}} if interval else {}
    return {
        "confidence": 0.95,
        "scores": {
            "0": {
                "nq": {"f1": 0.9},
                "all": {"f1": f1, "em": f1 / 2, "searches": searches, "format": 1.0, "questions": 300.0},
            },
            "1": {"all": {"f1": 0.0}},
        },
        "intervals": intervals,
    }


def run_with(folder, metrics=REWARDS, evaluations=None, *overrides):
    """The folder of a run with these evaluations, by name."""
    make_run(folder, metrics, quickstart_config(folder, *overrides))
    for name, scores in (evaluations or {}).items():
        (folder / f"evaluation_{name}.json").write_text(json.dumps(scores))
    return folder


def results_of(*folders):
    return results(group_runs(read_runs(folders)))


def test_evaluations_before_and_after_are_the_result(tmp_path):
    evaluations = {
        "after": evaluation(0.75, [0.7, 0.8], searches=1.75),
        "before": evaluation(0.25, [0.2, 0.3]),
        "rag": evaluation(0.5) | {"method": "rag"},
    }
    folder = run_with(tmp_path / "runs/seed-0", REWARDS, evaluations)
    (result,) = results_of(folder)
    assert result.score.label == "F1"
    assert result.score.before == Measured(0.25, 0.2, 0.3)
    assert result.score.after == Measured(0.75, 0.7, 0.8)
    assert result.measured_on == "300 held-out questions, greedy"
    assert result.range_text == "95 % confidence interval"
    facts = {fact.label: (fact.before.mean, fact.after.mean) for fact in result.facts}
    assert facts == {
        "Exact match": (0.125, 0.375),
        "Searches a question": (1.0, 1.75),
        "Valid format": (1.0, 1.0),
    }
    assert (result.steps, result.seconds, result.seconds_in_all) == ("2 of 40", 120.0, None)


def test_seeds_have_their_mean_and_range(tmp_path):
    folders = []
    for seed, f1 in enumerate((0.5, 0.75)):
        folder = tmp_path / f"grpo/seed-{seed}"
        scores = {"after": evaluation(f1, [0.0, 1.0])}
        folders.append(run_with(folder, REWARDS, scores, f"run.seed={seed}", "advantage.name=grpo"))
    (result,) = results_of(*folders)
    assert result.score.before is None
    assert result.score.after == Measured(0.625, 0.5, 0.75)
    assert result.range_text == "lowest to highest of 2 runs"
    assert title([result]) == "GRPO: grpo"


def test_evaluations_during_the_training_are_next(tmp_path):
    metrics = REWARDS | {
        "eval/all/f1/greedy": [0.25, None, 0.5],
        "eval/all/searches/greedy": [1.0, 2.0, 3.0],
    }
    (result,) = results_of(run_with(tmp_path / "run", metrics))
    assert (result.score.before, result.score.after) == (Measured(0.25), Measured(0.5))
    assert result.measured_on.startswith("held-out questions, greedy, first and last evaluation")


@pytest.mark.parametrize(
    ("metrics", "label", "ends", "words"),
    [
        (
            {"reward/mean": [0.0] * 5 + [0.5] * 10 + [1.0] * 5},
            "Reward",
            (0.25, 0.75),
            "training trajectories",
        ),
        ({"sft/loss": [4.0, 2.0]}, "Loss", (3.0, 3.0), "demonstrations"),
    ],
)
def test_without_evaluations_the_ends_of_the_run_are_compared(tmp_path, metrics, label, ends, words):
    (result,) = results_of(make_run(tmp_path / "run", metrics))
    assert (result.score.label, result.score.before.mean, result.score.after.mean) == (label, *ends)
    assert result.measured_on == f"{words}, first and last 10 steps"


def test_run_without_scores_has_no_result(tmp_path):
    (result,) = results_of(make_run(tmp_path / "run", {"actor/entropy": [1.0]}))
    assert result.score is None and result.method == "Run"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "CalibAdv"),
        (["advantage.name=grpo"], "GRPO"),
        (["advantage.softening=reset"], "CalibAdv (softening=reset)"),
        (["advantage.base=rloo", "advantage.rebalance=false"], "CalibAdv (base RLOO, rebalance=false)"),
        (["advantage.name=gigpo"], "GiGPO"),
    ],
)
def test_method_has_the_name_of_its_paper_and_its_variant(tmp_path, overrides, name):
    (run,) = read_runs([run_with(tmp_path / "run", REWARDS, None, *overrides)])
    assert method_name(run) == name


def test_title_names_methods_and_what_differs(tmp_path):
    changes = ["learner.optimizer.lr=0.5", "learner.optimizer.lr=0.25"]
    folders = [run_with(tmp_path / f"r{n}", REWARDS, None, key) for n, key in enumerate(changes)]
    assert title(results_of(*folders)) == "CalibAdv: lr 0.5, lr 0.25"
    assert title(results_of(folders[0])) == f"CalibAdv: {tmp_path.name}/r0"
    grpo = run_with(tmp_path / "grpo", REWARDS, None, "advantage.name=grpo", changes[0])
    assert title(results_of(folders[0], grpo)) == "CalibAdv and GRPO"
    more = [run_with(tmp_path / f"m{n}", REWARDS, None, f"learner.optimizer.lr={n}") for n in range(1, 5)]
    assert title(results_of(*more)) == "4 configs: CalibAdv"


def test_time_of_the_whole_quickstart_is_shown_or_its_file_is_named(tmp_path):
    folder = run_with(tmp_path / "run")
    (folder / "quickstart.json").write_text('{"seconds": {"total": 340.5}}')
    (result,) = results_of(folder)
    assert result.seconds_in_all == 340.5
    (folder / "quickstart.json").write_text('{"seconds": {}}')
    with pytest.raises(UserError, match="quickstart.json: no seconds.total, a number; remove the file"):
        results_of(folder)
