"""Rewards of trajectories and groups."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.rewards.score import score_groups, score_trajectory

ROME = Question("q", "?", ("Rome",), "test")


def turn(kind, text, answer="", num_observed=0):
    ids, logprobs = np.arange(2, dtype=np.int32), np.zeros(2, np.float32)
    observation = np.zeros(num_observed, np.int32)
    return Turn(kind, ids, logprobs, text=text, answer=answer, observation_ids=observation)


def attempt(answer=None, has_search=True):
    turns = [turn("search", "<think>t</think><search>q</search>", num_observed=2)] if has_search else []
    if answer is not None:
        turns.append(turn("answer", f"<think>u</think><answer>{answer}</answer>", answer))
    return Trajectory(ROME, np.zeros(1, np.int32), turns)


@pytest.mark.parametrize(
    ("config", "trajectory", "score", "metrics"),
    [
        (RewardConfig(), attempt("Rome city"), 2 / 3, (0, 2 / 3, 1, 1)),
        (RewardConfig(answer="em"), attempt("Rome city"), 0, (0, 2 / 3, 1, 1)),
        (RewardConfig(answer="cover_em"), attempt("Rome city"), 1, (0, 2 / 3, 1, 1)),
        (RewardConfig(), attempt("Rome", has_search=False), 0, (1, 1, 1, 0)),
        (RewardConfig(format=False), attempt("Rome", has_search=False), 1, (1, 1, 1, 0)),
        (RewardConfig(format=False), attempt(None), 0, (0, 0, 0, 0)),
    ],
)
def test_score(config, trajectory, score, metrics):
    scored = score_trajectory(trajectory, config)
    assert scored.answer_score == score
    assert scored.metrics == dict(zip(("em", "f1", "cover_em", "format"), metrics, strict=True))
    assert scored.format_valid == bool(metrics[3])
    assert (trajectory.answer_score, trajectory.metrics) == (0, {}) and not trajectory.format_valid


@pytest.mark.parametrize(
    ("answer", "score", "largest"),
    [
        ("f1", 2 / 3, 1),
        ({"f1": 1, "em": 1}, 2 / 3, 2),
        ({"f1": 0.25, "cover_em": 0.25}, 5 / 12, 0.5),
        ({"f1": 3, "em": -1}, 2, 3),
        ({"f1": -1}, -2 / 3, 1),
    ],
)
def test_relative_score_is_a_share_of_the_largest(answer, score, largest):
    scored = score_trajectory(attempt("Rome city"), RewardConfig(answer=answer))
    assert scored.answer_score == pytest.approx(score) and scored.max_score == largest
    assert scored.relative_score == pytest.approx(score / largest)


@pytest.mark.parametrize(("tokens", "penalty"), [(2, 0), (3, 0), (4, 0.1), (8, 0.5), (9, 0.5)])
def test_long_trajectory_loses_evenly_more(tokens, penalty):
    """Only what it sampled counts, not the two observed tokens; a wrong answer loses as much."""
    config = RewardConfig(overlong_penalty=0.5, overlong_from=3, overlong_until=8, format=False)
    for answer, score in (("Rome", 1), ("Milan", 0)):
        trajectory = attempt(answer)
        trajectory.turns[0].text += "<answer>Rome</answer>"  # the structured answer counts, not the text
        trajectory.turns[0].observation_text = "<answer>Rome</answer>"
        trajectory.turns[1].token_ids = np.arange(tokens - 2, dtype=np.int32)
        trajectory = score_trajectory(trajectory, config)
        assert trajectory.answer_score == pytest.approx(score - penalty)
        assert trajectory.metrics["overlong_penalty"] == pytest.approx(penalty)
        assert trajectory.metrics["f1"] == score


@pytest.mark.parametrize(("penalty", "start", "end"), [(1, 0, 0), (1, 5, 5), (0, 0, 5)])
def test_penalty_without_a_range_is_refused(penalty, start, end):
    with pytest.raises(ValueError, match="overlong_from"):
        RewardConfig(overlong_penalty=penalty, overlong_from=start, overlong_until=end)


def step():
    answers = ["Rome", "Rome city", "Milan", None, "Rome of old", "Rome or Milan or Turin"]
    return [Group(ROME, [attempt(text, has_search) for text in answers]) for has_search in (True, False)]


def rewards(groups):
    return [(t.answer_score, t.format_valid) for group in groups for t in group.trajectories]


def test_shuffled_rewards_are_the_same_pairs_elsewhere():
    groups, used = step(), np.random.default_rng(0)
    true = score_groups(groups, RewardConfig(), used)
    assert used.random() == np.random.default_rng(0).random(), "unshuffled scores draw nothing"
    shuffled, again = (
        score_groups(groups, RewardConfig(shuffle=True), np.random.default_rng(0)) for _ in "12"
    )
    assert rewards(again) == rewards(shuffled) != rewards(true)
    assert sorted(rewards(shuffled)) == sorted(rewards(true))
    assert any(trajectory.answer_score > 0 for trajectory in shuffled[1].trajectories), "stays in its group"
    for before, after in zip(true, shuffled, strict=True):
        assert [t.metrics for t in before.trajectories] == [t.metrics for t in after.trajectories]


def test_trajectory_that_failed_takes_no_part_in_the_shuffle():
    groups = step()
    for group in groups:
        group.failed.append(group.trajectories.pop(3))  # without an answer: 0
    groups = score_groups(groups, RewardConfig(), np.random.default_rng(0))
    before = sorted(rewards(groups))
    for seed in range(5):
        groups = score_groups(groups, RewardConfig(shuffle=True), np.random.default_rng(seed))
        assert sorted(rewards(groups)) == before
        assert all(group.failed[0].answer_score == 0 for group in groups)
