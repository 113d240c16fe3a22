"""Defined behaviour where the authors' code crashes or is noisy, and the switches one by one."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.config import AdvantageConfig

A = 0.5 / (np.sqrt(0.5) + 1e-6)  # advantage of the better of two scores 1 and 0


@pytest.fixture
def pair(build):
    """Winner: search, answer of 2 tokens. Loser: a search that finds a silver document, answer of 4."""
    return build.group(
        (1.0, True, [build.turn(documents=["a"], num_observed=1), build.turn("answer", num_tokens=2)]),
        (0.0, True, [build.turn(documents=["a", "x"], num_observed=1), build.turn("answer", num_tokens=4)]),
    )


def by_turn(group, **switches):
    return [
        turns.tolist() for turns in compute_advantages([group], AdvantageConfig(**switches)).credits[0].turns
    ]


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, [[A, 2 * A], [-A / 2, -A]]),
        ({"adjust": "negative"}, [[A, A], [-A / 2, -A / 2]]),
        ({"target_ratio": 4.0}, [[A, A / 2], [-A / 2, -A]]),
        ({"soft_penalty": False}, [[A, 2 * A], [-A, -A]]),
        ({"rebalance": False}, [[A, A], [-A / 2, -A]]),
        ({"soft_penalty": False, "rebalance": False}, [[A, A], [-A, -A]]),
        ({"normalize_std": False}, [[0.5, 1.0], [-0.25, -0.5]]),
        ({"name": "grpo"}, [[A, A], [-A, -A]]),
        ({"silver_threshold": 1.0}, [[A, 2 * A], [-A / 2, -A]]),
    ],
)
def test_switches(pair, switches, expected):
    np.testing.assert_allclose(by_turn(pair, **switches), expected, rtol=1e-12)


def test_all_wrong_group_is_zero(build):
    group = build.group(*[(0.0, True, [build.turn(documents=["a"]), build.turn("answer")])] * 3)
    assert by_turn(group) == [[0.0, 0.0]] * 3


def test_all_right_group_of_inexact_scores_is_zero(build):
    group = build.group(*[(6 / 7, True, [build.turn(documents=["a"]), build.turn("answer")])] * 5)
    assert by_turn(group) == [[0.0, 0.0]] * 5


@pytest.mark.parametrize("soft_penalty", [True, False])
@pytest.mark.parametrize("adjust", ["positive", "negative"])
def test_one_sided_group_zeroes_answers_and_keeps_searches(build, soft_penalty, adjust):
    winner = (1.0, True, [build.turn(documents=["a"]), build.turn("answer", num_tokens=3)])
    loser = (0.0, False, [build.turn(num_tokens=0, num_observed=2)])  # nothing to train on
    turns = by_turn(build.group(winner, loser), soft_penalty=soft_penalty, adjust=adjust)
    np.testing.assert_allclose(turns[0], [A, 0.0])


def test_score_of_trajectory_without_tokens_counts(build):
    empty = (0.0, False, [build.turn(num_tokens=0, num_observed=2)])
    none = (0.0, False, [])
    winner = (1.0, True, [build.turn(documents=["a"]), build.turn("answer")])
    loser = (0.0, False, [build.turn("invalid")])
    result = compute_advantages([build.group(empty, none, winner, loser)], AdvantageConfig())
    advantages = result.advantages[0]
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1].shape == (0,)
    # mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2: the winner's 3/4 / 1/2 is rescaled to the loser's 1/2
    np.testing.assert_allclose(advantages[2], [1.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(advantages[3], [-0.5], rtol=1e-5)
    assert result.metrics["advantage/skipped_trajectories"] == 2


def test_final_search_is_balanced_and_not_softened(build):
    group = build.group(
        (1.0, True, [build.turn(documents=["a", "b"]), build.turn("answer")]),
        (0.0, True, [build.turn(documents=["a"]), build.turn(documents=["b"], num_tokens=2)]),
    )
    np.testing.assert_allclose(by_turn(group), [[A, 2 * A], [0.0, -A]])


def test_silver_without_documents_leaves_advantages_alone(build):
    group = build.group(
        (1.0, True, [build.turn(), build.turn("answer")]),
        (0.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
    )
    np.testing.assert_allclose(by_turn(group), [[A, A], [-A, -A]])


def test_describe_names_every_switch():
    lines = "\n".join(describe(AdvantageConfig(target_ratio=0.5, adjust="negative", correctness="mean")))
    assert "soft penalty ON" in lines
    assert "rebalance ON" in lines
    assert "the negative side is rescaled" in lines
    assert "positive sum = 0.5 (lambda)" in lines
    assert "correctness mean" in lines
    assert "at least 0.7" in lines
    lines = "\n".join(describe(AdvantageConfig(soft_penalty=False, rebalance=False, normalize_std=False)))
    assert "soft penalty OFF" in lines
    assert "rebalance OFF" in lines
    assert "Dr. GRPO" in lines
    assert "no CalibAdv calibration" in "\n".join(describe(AdvantageConfig(name="grpo")))


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"softening": "aggressive"}, [[A, 2 * A], [0, -A]]),
        ({"softening": "upper_limit"}, [[A, 2 * A], [0, -A]]),  # halfway between -A and the best, A
        ({"softening": "reset"}, [[A, 2 * A], [-A / 2, -A]]),
        ({"rebalance_over": "turn"}, [[A / 2, 2 * A], [-A / 2, -A]]),
        ({"rebalance_over": "all"}, [[1.5 * A, 1.5 * A], [-A / 2, -A]]),  # 4.5 A against 3 A
        ({"rebalance_over": "turn", "rebalance_by": "tokens"}, [[A, 2 * A], [-A / 2, -A]]),
        ({"rebalance_excess": True, "target_ratio": 2.0}, [[A, A], [-A / 2, -A]]),
        ({"adjust": "clip", "target_ratio": 0.75}, [[A, A], [-A / 2, -0.75 * A]]),
        ({"adjust": "clip", "rebalance_over": "turn", "target_ratio": 0.25}, [[A, A], [-A / 4, -A / 4]]),
    ],
)
def test_variants(pair, switches, expected):
    np.testing.assert_allclose(by_turn(pair, **switches), expected, rtol=1e-12, atol=1e-12)


def test_always_correct_searches_get_nothing(build):
    group = build.group(
        (1.0, True, [build.turn(documents=["a"]), build.turn(documents=["b"]), build.turn("answer")]),
        (0.0, True, [build.turn(documents=["a"]), build.turn(documents=["x"]), build.turn("answer")]),
    )
    np.testing.assert_allclose(by_turn(group, softening="reset"), [[0, A, A], [0, -A, -A]])
    np.testing.assert_allclose(by_turn(group), [[A, A, A], [0, -A, -A]])


def test_step_balanced_as_a_whole(build):
    def answers(question_id, *scores):
        return build.group(
            *((score, True, [build.turn("answer")]) for score in scores), question_id=question_id
        )

    groups = [answers("one", 1.0, 0.0), answers("sided", 0.0, 0.0), answers("alone", 1.0)]
    config = AdvantageConfig(rebalance_within="step", normalize_std=False)
    credits = compute_advantages(groups, config).credits
    # Blame 1/2, praise 1/2 + 1: a group that is one-sided is balanced by the others.
    np.testing.assert_allclose(credits[0].turns, [[1 / 6], [-1 / 2]])
    np.testing.assert_allclose(credits[2].turns, [[1 / 3]])


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"softening": "aggressive"}, "0 from 1/3"),
        ({"softening": "upper_limit"}, "towards the group's largest"),
        ({"softening": "reset"}, "where all search turns of its number are correct"),
        ({"rebalance_over": "turn"}, "of the first search turns"),
        ({"rebalance_over": "all", "rebalance_within": "step"}, "within the whole step the positive side"),
        ({"rebalance_by": "tokens"}, "positive number"),
        ({"rebalance_excess": True}, "where it is above that"),
        ({"adjust": "clip"}, "cut at 1 (lambda) × the mean positive one"),
    ],
)
def test_describe_names_every_variant(switches, phrase):
    assert phrase in "\n".join(describe(AdvantageConfig(**switches)))
    assert phrase not in "\n".join(describe(AdvantageConfig()))


@pytest.mark.parametrize(("documents", "left"), [("axy", 0.0), ("axyz", -0.75 * A)])
def test_aggressive_softening_forgives_all_from_one_third(build, documents, left):
    group = build.group(
        (1.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
        (0.0, True, [build.turn(documents=documents), build.turn("answer")]),
    )
    turns = by_turn(group, softening="aggressive", rebalance=False)
    np.testing.assert_allclose(turns, [[A, A], [left, -A]], rtol=1e-12, atol=1e-15)


def test_upper_limit_is_the_groups_best_advantage(build):
    """Wherever the best trajectory stands: half of the way from the loser's -A to A is 0."""
    group = build.group(
        (0.0, True, [build.turn(documents=["a", "x"]), build.turn("answer")]),
        (1.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
    )
    turns = by_turn(group, softening="upper_limit", rebalance=False)
    np.testing.assert_allclose(turns, [[0, -A], [A, A]], rtol=1e-12, atol=1e-15)


def test_invalid_trajectories_do_not_count_for_reset(build):
    members = [
        (1.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
        (0.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
        (0.0, False, [build.turn(documents=["x"]), build.turn("answer")]),
    ]
    turns = by_turn(build.group(*members), softening="reset", rebalance=False)
    assert turns[0][0] == turns[1][0] == 0 and turns[2][0] == turns[2][1] < 0
    assert by_turn(build.group(*members), softening="plain", rebalance=False)[0][0] > 0


@pytest.mark.parametrize(
    ("tokens", "answers"),
    [
        (2, [A, -A]),  # the negative side is exactly the target
        (1, [A, -A]),  # and below it
        (3, [1.5 * A, -A]),  # above it, the positive side is raised to half of the negative one
    ],
)
def test_rebalance_excess_leaves_groups_within_the_target(build, tokens, answers):
    group = build.group(
        (1.0, True, [build.turn(), build.turn("answer", num_tokens=1)]),
        (0.0, True, [build.turn(), build.turn("answer", num_tokens=tokens)]),
    )
    turns = by_turn(group, rebalance_excess=True, target_ratio=2.0)
    np.testing.assert_allclose([trajectory[1] for trajectory in turns], answers, rtol=1e-12)
