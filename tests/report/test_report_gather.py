"""From runs to charts: curves, values of kept trajectories, and figures."""

from __future__ import annotations

import itertools
import math
import random
import re

import numpy as np
import pytest
from report_rig import keep_step, learning_curve, make_run, quickstart_config, two_configs

from calibadv_jax.contrib.report.curves import moving_mean, over_seeds, thin
from calibadv_jax.contrib.report.figures import FIGURES, SECTIONS
from calibadv_jax.contrib.report.gather import Chart, Gathered
from calibadv_jax.contrib.report.page import early_ends, mean_of_last
from calibadv_jax.contrib.report.runs import group_runs, read_runs
from calibadv_jax.contrib.report.trajectories import MAX_STEPS, chosen_steps, rollout_values
from calibadv_jax.metrics.summary import ALIASES


def gather_folders(*folders) -> Gathered:
    return Gathered(group_runs(read_runs(list(folders))), smooth=1)


def charts_of(gathered: Gathered) -> dict[str, Chart]:
    return {chart.figure.key: chart for chart in gathered.charts}


def charts_in(*folders) -> dict[str, Chart]:
    return charts_of(gather_folders(*folders))


def test_keys_of_figures_name_files_and_are_unique():
    keys = [*SECTIONS, *(figure.key for figure in FIGURES)]
    keys += ["runs", "evaluations", "settings", "main", "other"]  # the page's own
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9_]+", key) for key in keys)


def test_seeds_are_one_curve_and_configs_are_several(tmp_path):
    charts = charts_in(*two_configs(tmp_path, 5))
    assert {"f1", "format", "entropy", "mass_before", "correctness", "phases"} <= set(charts)
    assert not {"staleness", "importance", "sft_loss"} & set(charts)
    (panel,) = charts["reward"].panels
    assert [curve.name for curve in panel.curves] == ["calibadv", "grpo"]
    seeds = np.array([learning_curve(5, seed)["reward/mean"] for seed in (0, 1)])
    assert panel.curves[0].steps.tolist() == list(range(1, 6))
    for name, summary in (("mean", np.mean), ("low", np.min), ("high", np.max)):
        assert getattr(panel.curves[0], name) == pytest.approx(summary(seeds, axis=0))
    assert not panel.curves[1].has_band
    # A figure with several lines has a panel for each config, unless there are more configs than lines.
    assert [panel.title for panel in charts["mass_before"].panels] == ["calibadv", "grpo"]
    assert [curve.name for curve in charts["mass_before"].panels[0].curves] == ["positive", "negative"]
    assert [curve.name for curve in charts["phases"].panels[1].curves] == ["whole step", "rollout", "update"]


@pytest.mark.medium
def test_with_more_configs_than_lines_configs_share_panel(tmp_path):
    folders = [tmp_path / str(index) for index in range(3)]
    for index, folder in enumerate(folders):
        make_run(folder, learning_curve(5, index), quickstart_config(folder, f"learner.steps={index + 5}"))
    chart = charts_in(*folders)["mass_before"]
    assert [panel.title for panel in chart.panels] == ["positive", "negative"]
    assert [curve.name for curve in chart.panels[1].curves] == ["steps 5", "steps 6", "steps 7"]
    third = learning_curve(5, 2)["advantage/answer/negative_before"]
    assert chart.panels[1].curves[2].mean.tolist() == third
    assert chart.is_by_series


def test_seed_that_stopped_early_leaves_the_others(tmp_path):
    folders = [
        make_run(tmp_path / str(steps), {"reward/mean": [float(steps)] * steps}, quickstart_config(tmp_path))
        for steps in (2, 4)
    ]
    (panel,) = charts_in(*folders)["reward"].panels
    assert [curve.mean.tolist() for curve in panel.curves] == [[3, 3, 4, 4]]


def test_run_that_ends_before_the_others_of_its_curve_is_named(tmp_path):
    lengths = {"short": 2, "long": 4}
    folders = []
    for name, steps in lengths.items():
        metrics = {"reward/mean": [0.5] * steps}
        folders.append(make_run(tmp_path / name, metrics, quickstart_config(tmp_path / name)))
    other = make_run(
        tmp_path / "grpo", {"reward/mean": [0.5]}, quickstart_config(tmp_path, "advantage.name=grpo")
    )
    assert early_ends(group_runs(read_runs([*folders, other]))) == [
        "Run short ends at step 2; after it, its curve shows only the runs that go on."
    ]


NEED_ROLLOUTS = ["F1 by data source", "Advantage by turn", "Importance weights"]


def test_figures_without_kept_trajectories_are_listed(tmp_path):
    folder = make_run(tmp_path / "run", learning_curve(3, 0))
    assert gather_folders(folder).left_out == NEED_ROLLOUTS
    keep_step(folder, 3, [{"data_source": "nq", "metrics": {"f1": 0.5}}])
    assert gather_folders(folder).left_out == NEED_ROLLOUTS[1:]
    cold_start = make_run(tmp_path / "cold", {"sft/loss": [2.0, 1.0]})
    assert gather_folders(cold_start).left_out == []


def test_metric_without_a_finite_value_has_no_figure(tmp_path):
    folder = make_run(tmp_path, {"reward/mean": [0.5, 0.25, 0.5], "reward/f1": [None] * 3})
    charts = charts_in(folder)
    assert "reward" in charts and "f1" not in charts


def test_long_runs_have_fewer_points_than_steps(tmp_path):
    folder = make_run(tmp_path, learning_curve(2000, 0))
    charts = charts_in(folder)
    assert len(charts["reward"].curves[0].steps) == 334  # a point for 6 steps
    assert all(len(curve.steps) <= 360 for chart in charts.values() for curve in chart.curves)


def test_default_trend_is_over_ten_steps_of_a_long_run(tmp_path):
    """The points of a short run have marks, and are not smoothed."""
    for steps, is_smoothed in ((25, False), (26, True)):
        values = [float(step % 2) for step in range(steps)]
        folder = make_run(tmp_path / str(steps), {"reward/mean": values})
        gathered = Gathered(group_runs(read_runs([folder])))
        assert gathered.smooth == 10
        (curve,) = charts_of(gathered)["reward"].curves
        assert curve.mean.tolist() == values
        assert curve.trend.tolist() == (moving_mean(curve.mean, 10).tolist() if is_smoothed else values)


def test_null_values_are_gaps_and_are_counted(tmp_path):
    metrics = {"reward/mean": [0.5, None, 0.25], "actor/grad_norm": [1.0, None, 2.0]}
    charts = charts_in(make_run(tmp_path, metrics))
    assert np.isnan(charts["reward"].panels[0].curves[0].mean).tolist() == [False, True, False]
    assert charts["nonfinite"].panels[0].curves[0].mean.tolist() == [0, 2, 0]
    constant = make_run(tmp_path / "constant", {"reward/mean": [0.5, None, 0.5]})
    assert "reward" in charts_in(constant)  # a gap is no constant


def test_metrics_without_figure_are_shown_at_end(tmp_path):
    """Each has an anchor and a file of its own; constant ones become a line of text."""
    names = ["new/metric", "new/x/mean", "new/a_b", "new/a/b", "new/a-b", "new/a b", "new/a.b"]
    metrics = {name: [1.0, 2.0] for name in ("reward/mean", "new/x/max", *names, *ALIASES)}
    metrics |= {"some/new_metric": [7.0] * 2, "rollout/failed": [0.0] * 2}
    gathered = gather_folders(make_run(tmp_path, metrics))
    assert gathered.sections[-1].key == "other"
    figures = [chart.figure for chart in gathered.sections[-1].charts]
    assert [figure.title for figure in figures] == sorted(names)
    assert len({figure.key for figure in figures}) == len(names)
    assert all(re.fullmatch(r"[\w-]+", figure.key) for figure in figures)
    constant = {title: value for each in gathered.sections for title, value in each.constant.items()}
    zero = dict.fromkeys(["Failed trajectories: all", "Values that were not finite"], 0.0)
    assert constant == zero | {"some/new_metric": 7.0}


@pytest.mark.parametrize("line", ["all/f1/greedy", "hotpotqa/hotpot_qa/f1/temperature_0.7"])
def test_evaluations_during_the_training_have_a_figure(tmp_path, line):
    name = f"eval/{line}"
    evaluated = {name: [math.nan, 0.25, 0.75], name.replace("f1", "em"): [math.nan, 0.5, 0.75]}
    gathered = gather_folders(make_run(tmp_path, {"reward/mean": [0.5, 0.25, 0.5]} | evaluated))
    chart = charts_of(gathered)["evaluation_f1"]
    assert chart.figure.title == f"F1 on held-out questions: {line.replace('_', ' ')}"
    assert chart.panels[0].curves[0].steps.tolist() == [2, 3]
    assert "other" not in [each.key for each in gathered.sections]


def test_cold_start_has_its_own_figures(tmp_path):
    values = {"sft/loss": [3.0, 2.0, 1.0], "sft/lr": [0.1, 0.2, 0.1], "timing_s/step": [2.0, 1.0, 1.0]}
    gathered = gather_folders(make_run(tmp_path / "sft", values))
    assert set(charts_of(gathered)) == {"sft_loss", "sft_rate", "phases"}


def test_figure_with_one_line_names_it_in_its_title(tmp_path):
    values = {"sft/loss": [3.0, 2.0, 1.0], "timing_s/step": [2.0, 1.0, 1.0]}
    chart = charts_in(make_run(tmp_path / "sft", values))["phases"]
    assert chart.figure.title == "Time by phase: whole step"
    assert [curve.name for curve in chart.curves] == [""]


def test_mean_of_last_skips_what_is_not_finite():
    values = dict.fromkeys(range(5, 13), 1.5)
    assert mean_of_last({3: 1.0, 1: 100.0, 2: None, 4: 2.0} | values) == 1.5
    assert mean_of_last({1: None}) is None


def random_runs(draw: random.Random, number: int) -> list[dict[int, float | None]]:
    """Seeds that lack some steps and have some values that were not finite."""
    steps = ([step for step in range(1, 30) if draw.random() < 0.7] for _ in range(number))
    return [{step: None if draw.random() < 0.2 else draw.uniform(-5, 5) for step in run} for run in steps]


@pytest.mark.parametrize("seed", range(20))
def test_band_is_that_of_a_loop(seed):
    draw = random.Random(seed)
    runs = random_runs(draw, draw.randint(1, 5)) if seed else [{1: None}, {}]
    curve = over_seeds("x", runs)
    assert curve.steps.tolist() == sorted(set().union(*runs))
    for index, step in enumerate(curve.steps.tolist()):
        there = [run[step] for run in runs if run.get(step) is not None]
        if there:
            assert curve.mean[index] == pytest.approx(sum(there) / len(there), abs=1e-12)
            assert (curve.low[index], curve.high[index]) == (min(there), max(there))
        else:
            assert np.isnan([curve.mean[index], curve.low[index], curve.high[index]]).all()
    assert curve.has_band == any(
        len({run[step] for run in runs if run.get(step) is not None}) > 1 for step in range(30)
    )


def test_runs_that_agree_have_no_band():
    assert not over_seeds("x", [{1: 0.5, 2: None}]).has_band
    assert not over_seeds("x", [{1: 0.5}, {1: 0.5}]).has_band
    assert over_seeds("x", [{1: 0.5}, {1: 0.75}]).has_band


def test_trend_is_smoothed_and_mean_is_not():
    curve = over_seeds("x", [{1: 0.0, 2: 3.0, 3: 0.0}], smooth=3)
    assert curve.mean.tolist() == [0, 3, 0]
    assert curve.trend.tolist() == [1.5, 1, 1.5]


@pytest.mark.parametrize("width", [1, 2, 3, 6, 50])
def test_trend_is_that_of_a_loop(width):
    draw = random.Random(width)
    values = [math.nan if draw.random() < 0.2 else draw.uniform(-5, 5) for _ in range(20)]
    before, after = (width - 1) // 2, width // 2
    result = moving_mean(np.array(values), width)
    for index, value in enumerate(values):
        around = values[max(0, index - before) : index + after + 1]
        finite = [each for each in around if not math.isnan(each)]
        expected = math.nan if math.isnan(value) else sum(finite) / len(finite)
        assert result[index] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("seed", range(10))
def test_thinning_is_that_of_a_loop(seed):
    draw = random.Random(seed)
    whole = over_seeds("x", random_runs(draw, 3), smooth=3)
    thinned = thin(whole, 7)
    width = math.ceil(len(whole.steps) / 7)
    assert len(thinned.steps) == math.ceil(len(whole.steps) / width) <= 7
    for index in range(len(thinned.steps)):
        part = slice(index * width, (index + 1) * width)
        assert thinned.steps[index] == pytest.approx(np.mean(whole.steps[part]))
        for name, summary in {"mean": np.mean, "low": min, "high": max, "trend": np.mean}.items():
            finite = [each for each in getattr(whole, name)[part].tolist() if not math.isnan(each)]
            expected = summary(finite) if finite else math.nan
            assert getattr(thinned, name)[index] == pytest.approx(expected, nan_ok=True)


def test_no_spike_is_lost_by_thinning():
    values = dict.fromkeys(range(1, 1001), 0.0) | {617: 9.0}
    assert thin(over_seeds("x", [values]), 60).high.max() == 9


def test_thinning_leaves_short_curves_as_they_are():
    curve = over_seeds("x", [{1: 0.5, 2: 0.25}])
    thinned = thin(curve, 2)
    for name in ("steps", "mean", "low", "high", "trend"):
        assert getattr(thinned, name).tolist() == getattr(curve, name).tolist()


def row(source, f1, **more):
    return {"data_source": source, "metrics": {"f1": f1, "em": 0.0}, **more}


def values_of(folder, steps=2):
    (run,) = read_runs([make_run(folder, {"a": [float(step) for step in range(steps)]})])
    return rollout_values(run)


def test_f1_by_source_is_mean_of_finished_trajectories(tmp_path):
    """Steps without any, and files that were cut off, give nothing; so do turns without the learner's."""
    failed = row("nq", 0.0, error="sampler: gone")
    keep_step(tmp_path, 1, [row("nq", 1.0), row("nq", 0.5), row("hotpot", 0.25), failed])
    keep_step(tmp_path, 2, [row("nq", 0.125, turns=[{"kind": "answer", "logprobs": [-1.0]}])])
    keep_step(tmp_path, 3, [])
    path = keep_step(tmp_path, 4, [row("nq", 1.0)])
    path.write_bytes(path.read_bytes()[:-20])
    keep_step(tmp_path, 5, []).write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    assert values_of(tmp_path, 5) == {"f1/nq": {1: 0.75, 2: 0.125}, "f1/hotpot": {1: 0.25}}


def test_advantages_are_split_by_the_kind_of_turn(tmp_path):
    advantages = [("search", -1, -0.25), ("search", -1, -1), ("invalid", 9, 9), ("answer", -1, -2)]
    turns = [{"kind": kind, "advantage_raw": raw, "advantage": after} for kind, raw, after in advantages]
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=turns)])
    values = values_of(tmp_path)
    expected = {"search before": -1.0, "search after": -0.625, "answer before": -1.0, "answer after": -2.0}
    assert {name: values[f"turn_advantage/{name}"][1] for name in expected} == expected


def test_invalid_turns_have_no_advantage_of_their_own(tmp_path):
    turns = [
        {"kind": kind, "advantage_raw": 1.0, "advantage": 2.0} for kind in ("search", "invalid", "answer")
    ]
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=turns)])
    names = {name for name in values_of(tmp_path) if name.startswith("turn_advantage/")}
    turns_and_times = itertools.product(("search", "answer"), ("before", "after"))
    assert names == {f"turn_advantage/{turn} {time}" for turn, time in turns_and_times}


def test_importance_weights_are_percentiles_over_all_tokens(tmp_path):
    ours, sampled = np.linspace(-3, -1, 50), np.linspace(-2, -1.5, 50)
    turns = [
        {"kind": "search", "logprobs": sampled[:20], "learner_logprobs": ours[:20]},
        {"kind": "answer", "logprobs": sampled[20:], "learner_logprobs": ours[20:]},
        {"kind": "answer", "logprobs": [-1.0], "learner_logprobs": None},
    ]
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=turns)])
    values, weights = values_of(tmp_path), np.exp(ours - sampled)
    for percent in (1, 50, 99):
        expected = np.percentile(weights, percent)
        assert values[f"importance/p{percent}"][1] == pytest.approx(expected, rel=1e-5)


def test_steps_that_are_read_end_with_the_last():
    for number, stride in ((0, 1), (1, 1), (MAX_STEPS, 1), (MAX_STEPS + 1, 2), (410, 5)):
        assert chosen_steps(list(range(1, number + 1))) == list(range(number, 0, -stride))[::-1]
