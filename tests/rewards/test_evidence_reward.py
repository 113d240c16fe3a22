"""The evidence in the reward: shares and needed searches of hand-made trajectories, and their scores."""

from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.rewards.evidence import Evidence, check_evidence, find_evidence, max_score
from calibadv_jax.rewards.score import check_reward, score_groups, score_trajectory

TWO = Question("q", "?", ("Rome",), "test", supporting_ids=("a", "b"))


def turn(kind, text, ids=(), answer=""):
    documents = tuple(Document(name, f"{name} (id: b)", "b a") for name in ids)
    observed = np.zeros(1 if kind == "search" else 0, np.int32)
    return Turn(
        kind,
        np.zeros(2, np.int32),
        np.zeros(2, np.float32),
        text=text,
        answer=answer,
        documents=documents,
        observation_ids=observed,
    )


def attempt(*searches, answer="Rome", question=TWO):
    turns = [turn("search", "<think>t</think><search>b a</search>", ids) for ids in searches]
    turns.append(turn("answer", f"<think>a b</think><answer>{answer}</answer>", answer=answer))
    return Trajectory(question, np.zeros(1, np.int32), turns)


@pytest.mark.parametrize(
    ("searches", "share", "extra"),
    [
        ([], 0.0, 0),
        (["x"], 0.0, 0),
        (["xa"], 0.5, 0),
        (["ab"], 1.0, 0),
        (["xa", "ab"], 1.0, 0),  # found again: once
        (["a", "a"], 0.5, 0),
        (["a", "a", "a"], 0.5, 1),  # a passage is missing: two searches for two passages
        (["a", "x", "b"], 1.0, 0),  # the third was needed
        (["ab", "x"], 1.0, 1),
        (["ab", "a", "b"], 1.0, 2),
        (["", "", "", ""], 0.0, 2),
    ],
)
def test_share_of_passages_and_searches_beyond_need(searches, share, extra):
    assert find_evidence(attempt(*searches)) == Evidence(share, extra)


def test_only_searches_count():
    """A page that the policy opens, or a tool, names its own documents."""
    trajectory = attempt("a")
    page = turn("access", "<think>t</think><access>b</access>", "b")
    trajectory.turns.insert(1, page)
    assert find_evidence(trajectory) == Evidence(0.5, 0)


def test_passages_named_twice_count_once():
    question = replace(TWO, supporting_ids=("a", "a", "b"))
    assert find_evidence(attempt("a", question=question)) == Evidence(0.5, 0)


@pytest.mark.parametrize(
    ("keys", "trajectory", "score", "largest"),
    [
        ({"evidence": 0.5}, attempt("a"), 1.25, 1.5),
        ({"evidence": 0.5}, attempt("a", "b"), 1.5, 1.5),
        ({"evidence": 0.5}, attempt("ab", answer="Paris"), 0.5, 1.5),
        ({"evidence": 0.5}, attempt("a", question=replace(TWO, supporting_ids=())), 1.0, 1.0),
        ({"search_cost": 0.1}, attempt("ab", "x", "x"), 0.8, 1.0),
        ({"search_cost": 0.1}, attempt("x", "x"), 1.0, 1.0),
        ({"search_cost": 0.6}, attempt("ab", "x", "x"), 0.0, 1.0),  # not below 0
        ({"evidence": 0.5, "search_cost": 0.1}, attempt("ab", "a", answer="Paris"), 0.4, 1.5),
        ({"evidence": 0.5, "answer": {"f1": 2.0}}, attempt("a"), 2.25, 2.5),
        ({"answer": {"f1": -1.0}, "search_cost": 0.1}, attempt("ab", "x"), -1.0, 1.0),
        ({"evidence": 0.5}, attempt(), 0.0, 1.5),  # without a search the format is invalid
        ({"evidence": 0.5, "format": False}, attempt(), 1.0, 1.5),
    ],
)
def test_score_pays_for_evidence(keys, trajectory, score, largest):
    config = RewardConfig(**keys)
    scored = score_trajectory(trajectory, config)
    assert scored.answer_score == pytest.approx(score)
    assert scored.max_score == max_score(trajectory.question.supporting_ids, config) == largest
    assert scored.relative_score <= 1


def test_evidence_is_logged_where_passages_are_named_only():
    metrics = score_trajectory(attempt("ab", "x"), RewardConfig()).metrics
    assert (metrics["evidence"], metrics["extra_searches"]) == (1.0, 1.0)
    unmarked = attempt("ab", question=replace(TWO, supporting_ids=()))
    assert not {"evidence", "extra_searches"} & score_trajectory(unmarked, RewardConfig()).metrics.keys()


def test_evidence_needs_questions_with_passages():
    unmarked = [replace(TWO, supporting_ids=())]
    for keys in ({"evidence": 0.5}, {"search_cost": 0.1}):
        with pytest.raises(UserError, match="no question of data.train has supporting_ids"):
            check_evidence(unmarked, RewardConfig(**keys))
        check_evidence([*unmarked, TWO], RewardConfig(**keys))
    check_evidence(unmarked, RewardConfig())


def test_shuffled_scores_keep_their_largest_score():
    """The control permutes scores over questions with and without supporting passages."""
    unmarked = replace(TWO, id="u", supporting_ids=())
    groups = [
        Group(TWO, [attempt("ab"), attempt("a"), attempt("x", answer="Paris")]),
        Group(unmarked, [attempt("a", question=unmarked), attempt("a", answer="Paris", question=unmarked)]),
    ]
    config = RewardConfig(evidence=0.5, shuffle=True)
    for seed in range(20):
        shuffled = score_groups(groups, config, np.random.default_rng(seed))
        trajectories = [trajectory for group in shuffled for trajectory in group.trajectories]
        assert all(trajectory.relative_score <= 1 for trajectory in trajectories)
        pairs = sorted((trajectory.answer_score, trajectory.max_score) for trajectory in trajectories)
        assert pairs == [(0.0, 1.0), (0.0, 1.5), (1.0, 1.0), (1.25, 1.5), (1.5, 1.5)]


def test_reward_is_described():
    (line,) = check_reward(RewardConfig(evidence=0.5, search_cost=0.1))
    assert "0.5 × share of the supporting passages" in line and "0.1 × searches" in line
    assert check_reward(RewardConfig()) == []
