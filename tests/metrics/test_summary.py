"""calibadv_jax.metrics.summary: worked by hand on three trajectories of two questions."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.metrics.summary import ALIASES, report_metrics, trajectory_metrics

QUESTION = Question("q", "Who?", ("Ada",), "toy")


def turn(kind, sampled, observed=0, stop_reason="stop"):
    ids, more = np.arange(sampled, dtype=np.int32), np.arange(observed, dtype=np.int32)
    answer = "Ada" if kind == "answer" else ""
    return Turn(kind, ids, ids * 0.0, answer=answer, observation_ids=more, stop_reason=stop_reason)


def trajectory(turns, score, valid, prompt=10):
    scores = {"f1": score, "em": float(score == 1)}
    ids = np.zeros(prompt, np.int32)
    return Trajectory(QUESTION, ids, turns, format_valid=valid, answer_score=score, metrics=scores)


@pytest.fixture
def metrics():
    solved = trajectory([turn("search", 6, observed=8), turn("answer", 4)], 1.0, True)
    invalid = trajectory([turn("invalid", 3, observed=9)], 0.0, False)
    cut = trajectory(
        [turn("search", 5, observed=5), turn("unfinished", 20, stop_reason="length")], 0.0, False, 16
    )
    return trajectory_metrics([Group(QUESTION, [solved, invalid]), Group(QUESTION, [cut])])


def test_values(metrics):
    expected = {
        0: ["reward/min"],
        1 / 3: [
            *("reward/mean", "reward/em", "reward/format_valid", "rollout/answered", "rollout/invalid"),
            *("rollout/truncated", "env/finish_ratio", "critic/score/mean", "response_length/clip_ratio"),
        ],
        0.5: [
            *("group/best_score", "group/solved", "group/tied", "group/all_zero"),
            *("correct_rate/least_one_correct", "env/ratio_of_valid_action"),
            "rollout/valid_action_ratio",  # (1 + 0 + 0.5) / 3
        ],
        2 / 3: ["rollout/searches/mean", "env/number_of_valid_search"],
        1: ["reward/max", "rollout/searches/max", "rollout/valid_actions/mean"],  # (2 + 0 + 1) / 3
        5 / 3: ["rollout/turns/mean", "env/number_of_actions/mean"],
        3: ["rollout/sampled_tokens/min"],
        16: ["rollout/prompt_length/max"],
        (18 + 12 + 30) / 3: ["rollout/response_length/mean"],
        30: ["response_length/max"],
        10 + 3 + 25: ["rollout/sampled_tokens/total"],
        38 / 60: ["rollout/sampled_token_ratio"],
    }
    values = {name: value for value, names in expected.items() for name in names}
    assert {name: metrics[name] for name in values} == pytest.approx(values) and len(values) == 30
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    assert all(alias in metrics or f"{alias}/mean" in metrics for alias in ALIASES)
    means = {"0": {"nq": {"em": 0.5}}, "0.7": {"all": {"f1": 1.0}}}
    assert report_metrics(means) == {"eval/nq/em/greedy": 0.5, "eval/all/f1/temperature_0.7": 1.0}


def test_trajectory_without_turns_has_length_zero():
    empty, other, wrong = trajectory([], 0.0, True), trajectory([], 1.0, True), sampled_by(1)
    metrics = trajectory_metrics([Group(QUESTION, [empty])])
    assert metrics["rollout/response_length/mean"] == 0
    assert metrics["rollout/valid_action_ratio"] == 0
    # A wrong answer is an answer, and a metric averages over the trajectories that have it.
    wrong.turns[0].answer, other.metrics = "y", {"recall": 0.5}
    metrics = trajectory_metrics([Group(QUESTION, [wrong, other])])
    assert (metrics["rollout/answered"], metrics["reward/recall"]) == (0.5, 0.5)
    with pytest.raises(ValueError, match="no trajectories"):
        trajectory_metrics([Group(QUESTION, [])])


def test_length_of_answers_is_compared_with_the_golden_answer_nearest_in_length():
    question = Question("q", "Who?", ("Ada", "Ada King of Lovelace"), "toy")
    padded = trajectory([turn("answer", 1)], 0.0, True)
    padded.question = question
    padded.turns[0].answer = "Ada or Bob or Cy or Di"
    plain = trajectory([turn("answer", 1)], 1.0, True)
    without = trajectory([turn("search", 1)], 0.0, False)
    metrics = trajectory_metrics([Group(question, [padded, plain, without])])
    assert metrics["rollout/answer_words"] == pytest.approx((7 / 4 + 1) / 2)


def test_failed_trajectories_are_only_counted(metrics):
    solved = trajectory([turn("search", 6, observed=8), turn("answer", 4)], 1.0, True)
    solved.turns[0].is_refused = True
    lost, gone, late = (trajectory([turn("search", 90)], 0.5, False, 90) for _ in range(3))
    lost.error, gone.error, late.error = "retriever: a: b", "retriever: c", "time: d"
    other = trajectory([turn("search", 6, observed=8), turn("answer", 4)], 0.0, True)
    groups = [
        Group.from_attempts(QUESTION, [solved, lost]),
        Group.from_attempts(QUESTION, [gone, late, other]),
    ]
    with_failures = trajectory_metrics(groups)
    without = trajectory_metrics([Group(QUESTION, [solved]), Group(QUESTION, [other])])
    failed = {"rollout/failed": 3.0, "rollout/failed/retriever": 2.0, "rollout/failed/time": 1.0}
    assert with_failures == without | failed | {"rollout/failed_share": 0.6}
    assert without["rollout/failed"] == without["rollout/failed_share"] == 0
    assert with_failures["rollout/refused_queries"] == 1
    counts = {"rollout/failed": 1.0, "rollout/failed_share": 1.0, "rollout/failed/time": 1.0}
    assert trajectory_metrics([Group(QUESTION, [], [late])]) == counts


def sampled_by(*versions):
    answer = turn("answer", 1)
    answer.policy_versions = versions
    return trajectory([answer], 0.0, True)


def test_staleness_counts_the_oldest_version():
    metrics = trajectory_metrics([Group(QUESTION, [sampled_by(3, 5), sampled_by(5), sampled_by()])], step=5)
    assert [metrics[f"rollout/staleness/{name}"] for name in ("max", "min", "mean")] == [2, 0, 1]
    assert metrics["rollout/mixed_versions"] == 0.5
    assert "rollout/staleness/max" not in trajectory_metrics([Group(QUESTION, [sampled_by()])], step=5)
