"""Figures from kept trajectories."""

import numpy as np
import pytest
from report_rig import keep_step, make_run

from calibadv_jax.contrib.report.gather import MAX_STEPS, chosen_steps, rollout_values
from calibadv_jax.contrib.report.runs import read_runs


def row(source, f1, **more):
    return {"data_source": source, "metrics": {"f1": f1, "em": 0.0}, **more}


def values_of(folder, steps=2):
    (run,) = read_runs([make_run(folder, {"a": [float(step) for step in range(steps)]})])
    return rollout_values(run)


def test_f1_by_source_is_mean_of_finished_trajectories(tmp_path):
    keep_step(
        tmp_path,
        1,
        [row("nq", 1.0), row("nq", 0.5), row("hotpot", 0.25), row("nq", 0.0, error="sampler: gone")],
    )
    keep_step(tmp_path, 2, [row("nq", 0.125)])
    assert values_of(tmp_path) == {"f1/nq": {1: 0.75, 2: 0.125}, "f1/hotpot": {1: 0.25}}


def test_advantages_are_split_by_the_kind_of_turn(tmp_path):
    turns = [
        {"kind": "search", "advantage_raw": -1.0, "advantage": -0.25},
        {"kind": "search", "advantage_raw": -1.0, "advantage": -1.0},
        {"kind": "invalid", "advantage_raw": 9.0, "advantage": 9.0},
        {"kind": "answer", "advantage_raw": -1.0, "advantage": -2.0},
    ]
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=turns)])
    values = values_of(tmp_path)
    assert {name: by_step[1] for name, by_step in values.items() if name.startswith("turn_advantage")} == {
        "turn_advantage/search before": -1.0,
        "turn_advantage/search after": -0.625,
        "turn_advantage/answer before": -1.0,
        "turn_advantage/answer after": -2.0,
    }


def test_importance_weights_are_percentiles_over_all_tokens(tmp_path):
    ours, sampled = np.linspace(-3, -1, 50), np.linspace(-2, -1.5, 50)
    turns = [
        {"kind": "search", "logprobs": sampled[:20], "learner_logprobs": ours[:20]},
        {"kind": "answer", "logprobs": sampled[20:], "learner_logprobs": ours[20:]},
        {"kind": "answer", "logprobs": [-1.0], "learner_logprobs": None},
    ]
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=turns)])
    values = values_of(tmp_path)
    weights = np.sort(np.exp(ours - sampled))
    for percent in (1, 50, 99):
        expected = np.percentile(weights, percent)
        assert values[f"importance/p{percent}"][1] == pytest.approx(expected, rel=1e-5)


def test_without_the_learners_logprobs_there_are_no_weights(tmp_path):
    keep_step(tmp_path, 1, [row("nq", 1.0, turns=[{"kind": "answer", "logprobs": [-1.0]}])])
    assert set(values_of(tmp_path)) == {"f1/nq"}


def test_file_that_was_cut_off_is_left_out(tmp_path):
    keep_step(tmp_path, 1, [row("nq", 1.0)])
    path = keep_step(tmp_path, 2, [row("nq", 1.0)])
    path.write_bytes(path.read_bytes()[:-20])
    assert values_of(tmp_path) == {"f1/nq": {1: 1.0}}


def test_empty_step_gives_nothing(tmp_path):
    keep_step(tmp_path, 1, [])
    assert values_of(tmp_path) == {}


@pytest.mark.parametrize("number", [0, 1, MAX_STEPS, MAX_STEPS + 1, 410])
def test_steps_that_are_read_end_with_the_last(number):
    steps = list(range(1, number + 1))
    chosen = chosen_steps(steps)
    assert len(chosen) <= MAX_STEPS
    assert chosen == sorted(chosen) and set(chosen) <= set(steps)
    assert chosen[-1:] == steps[-1:]
    assert len({later - earlier for earlier, later in zip(chosen, chosen[1:], strict=False)}) <= 1
    if number <= MAX_STEPS:
        assert chosen == steps
