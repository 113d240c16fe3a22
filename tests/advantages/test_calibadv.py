"""Defined behaviour where the authors' code crashes or is noisy, and the switches one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein

from calibadv_jax.advantages.calibadv import is_repetition, judge_turns, silver_documents
from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.config import AdvantageConfig

A = 0.5 / (np.sqrt(0.5) + 1e-6)  # advantage of the better of two scores 1 and 0
B = {"rebalance": False}


def by_turn(group, **switches):
    (credit,) = compute_advantages([group], AdvantageConfig(**switches)).credits
    return [turns.tolist() for turns in credit.turns]


# A winner and a loser, by the documents of their search and the tokens of their answer.
PAIR = ("a", 2), ("ax", 4)


@pytest.mark.parametrize(
    ("members", "switches", "expected"),
    [
        (PAIR, {}, [[A, 2 * A], [-A / 2, -A]]),
        (PAIR, {"adjust": "negative"}, [[A, A], [-A / 2, -A / 2]]),
        (PAIR, {"target_ratio": 4.0}, [[A, A / 2], [-A / 2, -A]]),
        (PAIR, {"soft_penalty": False}, [[A, 2 * A], [-A, -A]]),
        (PAIR, B, [[A, A], [-A / 2, -A]]),
        (PAIR, {"soft_penalty": False} | B, [[A, A], [-A, -A]]),
        (PAIR, {"silver_threshold": 1.0}, [[A, 2 * A], [-A / 2, -A]]),
        (PAIR, {"normalize_std": False}, [[0.5, 1.0], [-0.25, -0.5]]),
        (PAIR, {"name": "grpo"}, [[A, A], [-A, -A]]),
        (PAIR, {"softening": "aggressive"}, [[A, 2 * A], [0, -A]]),
        (PAIR, {"softening": "upper_limit"}, [[A, 2 * A], [0, -A]]),  # halfway between -A and the best, A
        (PAIR, {"softening": "reset"}, [[A, 2 * A], [-A / 2, -A]]),
        (PAIR, {"rebalance_over": "turn"}, [[A / 2, 2 * A], [-A / 2, -A]]),
        (PAIR, {"rebalance_over": "all"}, [[1.5 * A, 1.5 * A], [-A / 2, -A]]),  # 4.5 A against 3 A
        (PAIR, {"rebalance_over": "turn", "rebalance_by": "tokens"}, [[A, 2 * A], [-A / 2, -A]]),
        (PAIR, {"adjust": "clip", "target_ratio": 0.75}, [[A, A], [-A / 2, -0.75 * A]]),
        (
            PAIR,
            {"adjust": "clip", "rebalance_over": "turn", "target_ratio": 0.25},
            [[A, A], [-A / 4, -A / 4]],
        ),
        ((("", 1), ("a", 1)), {}, [[A, A], [-A, -A]]),  # silver without documents
        ((("a", 1), ("axy", 1)), {"softening": "aggressive"} | B, [[A, A], [0, -A]]),  # forgiven from 1/3
        ((("a", 1), ("axyz", 1)), {"softening": "aggressive"} | B, [[A, A], [-0.75 * A, -A]]),
        (PAIR, {"rebalance_excess": True, "target_ratio": 2.0}, [[A, A], [-A / 2, -A]]),
        # The negative side within the target, exactly it, and above it.
        ((("", 1), ("", 1)), {"rebalance_excess": True, "target_ratio": 2.0}, [[A, A], [-A, -A]]),
        ((("", 1), ("", 2)), {"rebalance_excess": True, "target_ratio": 2.0}, [[A, A], [-A, -A]]),
        ((("", 1), ("", 3)), {"rebalance_excess": True, "target_ratio": 2.0}, [[A, 1.5 * A], [-A, -A]]),
    ],
    ids=str,
)
def test_switches(build, members, switches, expected):
    winner, loser = (
        build.member(score, documents, answer=length, observed=1)
        for score, (documents, length) in zip((1.0, 0.0), members, strict=True)
    )
    np.testing.assert_allclose(
        by_turn(build.group(winner, loser), **switches), expected, rtol=1e-12, atol=1e-12
    )
    # The order of the members is nothing.
    swapped = by_turn(build.group(loser, winner), **switches)
    np.testing.assert_allclose(swapped, expected[::-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("score", "size"), [(0.0, 3), (6 / 7, 5)], ids=["all_wrong", "all_right"])
def test_group_of_equal_scores_is_zero(build, score, size):
    """All wrong, and all right by a score that no float holds exactly."""
    group = build.group(*[build.member(score, "a")] * size)
    assert by_turn(group) == [[0.0, 0.0]] * size


@pytest.mark.parametrize("soft_penalty", [True, False])
@pytest.mark.parametrize("adjust", ["positive", "negative"])
def test_one_sided_group_keeps_searches_and_zeroes_answers(build, soft_penalty, adjust):
    winner = build.member(1.0, "a", answer=3)
    loser = (0.0, False, [build.turn(num_tokens=0, num_observed=2)])  # nothing to train
    turns = by_turn(build.group(winner, loser), soft_penalty=soft_penalty, adjust=adjust)
    np.testing.assert_allclose(turns[0], [A, 0.0])


def test_last_search_is_rebalanced_and_not_softened(build):
    lost = (0.0, True, [build.turn(documents="a"), build.turn(documents="b", num_tokens=2)])
    group = build.group(build.member(1.0, "ab"), lost)
    np.testing.assert_allclose(by_turn(group), [[A, 2 * A], [0.0, -A]])


def test_other_estimator_is_calibrated_by_hand(build):
    """RLOO doubles the advantages of a pair; then as for GRPO."""
    group = build.group(build.member(1.0, "a", answer=2), build.member(0.0, "ax", answer=4))
    (credit,) = compute_advantages([group], AdvantageConfig(base="rloo")).credits
    np.testing.assert_allclose(credit.before, [[1, 1], [-1, -1]])
    np.testing.assert_allclose(credit.turns, [[1, 2], [-0.5, -1]])
    (uncalibrated,) = compute_advantages([group], AdvantageConfig(name="rloo")).credits
    assert not uncalibrated.silver


def test_description_names_the_switches():
    config = AdvantageConfig(target_ratio=0.5, adjust="negative", correctness="mean")
    assert describe(config)[2:] == [
        "soft penalty ON: correctness reduces the negative advantage of a search turn"
        " (softening=plain, correctness=mean, silver_threshold=0.7)",
        "rebalance ON: |negative| / positive becomes 0.5 (lambda; rebalance_over=answer,"
        " rebalance_within=group, rebalance_by=advantage, rebalance_excess=False, adjust=negative)",
    ]
    assert describe(AdvantageConfig(soft_penalty=False, rebalance=False))[2:] == [
        "soft penalty OFF: search turns keep their trajectory's whole advantage",
        "rebalance OFF: answer turns keep their trajectory's whole advantage",
    ]
    assert describe(AdvantageConfig(name="grpo"))[2:] == [
        "no CalibAdv calibration: advantage.name is not calibadv"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("softening", "aggressive"),
        ("softening", "upper_limit"),
        ("softening", "reset"),
        ("silver_threshold", 0.5),
        ("rebalance_over", "turn"),
        ("rebalance_over", "all"),
        ("rebalance_within", "step"),
        ("rebalance_by", "tokens"),
        ("rebalance_excess", True),
        ("adjust", "clip"),
    ],
)
def test_description_names_every_variant(key, value):
    assert f"{key}={value}" in "\n".join(describe(AdvantageConfig(**{key: value})))
    assert f"{key}={value}" not in "\n".join(describe(AdvantageConfig()))


def test_score_of_trajectory_without_tokens_counts(build):
    empty = (0.0, False, [build.turn(num_tokens=0, num_observed=2)])
    members = [empty, (0.0, False, []), build.member(1.0, "a"), (0.0, False, [build.turn("invalid")])]
    result = compute_advantages([build.group(*members)], AdvantageConfig())
    advantages = result.advantages[0]
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1].shape == (0,)
    # mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2: the winner's 3/4 / 1/2 is rescaled to the loser's 1/2
    np.testing.assert_allclose(advantages[2], [1.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(advantages[3], [-0.5], rtol=1e-5)
    assert result.metrics["advantage/skipped_trajectories"] == 2


def test_step_balanced_as_a_whole(build):
    def answers(question_id, *scores):
        return build.group(*(build.member(score) for score in scores), question_id=question_id)

    groups = [answers("one", 1.0, 0.0), answers("sided", 0.0, 0.0), answers("alone", 1.0)]
    config = AdvantageConfig(rebalance_within="step", normalize_std=False)
    credits = compute_advantages(groups, config).credits
    # Negative 1/2, positive 1/2 + 1: a group that is one-sided is balanced by the others.
    np.testing.assert_allclose(credits[0].turns, [[1 / 6], [-1 / 2]])
    np.testing.assert_allclose(credits[2].turns, [[1 / 3]])


def test_reset_takes_praise_of_always_correct_searches(build):
    group = build.group(build.member(1.0, "a", "b"), build.member(0.0, "a", "x"))
    np.testing.assert_allclose(by_turn(group, softening="reset"), [[0, A, A], [0, -A, -A]])
    np.testing.assert_allclose(by_turn(group), [[A, A, A], [0, -A, -A]])
    # Trajectories in an invalid format do not count.
    members = [build.member(1.0, "a"), build.member(0.0, "a"), build.member(0.0, "x", valid=False)]
    turns = by_turn(build.group(*members), softening="reset", **B)
    assert turns[0][0] == turns[1][0] == 0 and turns[2][0] == turns[2][1] < 0
    assert by_turn(build.group(*members), **B)[0][0] > 0


def test_repetition_is_half_of_the_edit_distance():
    draw = random.Random(0)
    for _ in range(1500):
        words = "abcdefgh"[: draw.randint(1, 8)]
        first, second = (draw.choices(words, k=draw.randint(0, 80)) for _ in range(2))
        similarity = Levenshtein.normalized_similarity(first, second)
        assert is_repetition(first, second) == (bool(first or second) and similarity > 0.5)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", False),
        ("a", "", False),
        ("a b", "a c", False),  # similarity exactly 1/2
        ("a b c", "a b d", True),
        ("a b c d", "d c b a", False),  # the same words, another order
    ],
)
def test_repetition_is_strictly_above_half(first, second, expected):
    assert is_repetition(first.split(), second.split()) is expected


@pytest.mark.parametrize(
    ("members", "threshold", "expected"),
    [
        ([(0.9, True, "abb"), (0.9, True, "a", "a"), (0.9, False, "i"), (0.8, True, "s")], 0.9, "a1 b.5"),
        ([(0.9, True, "abb"), (0.9, True, "a", "a")], 0.91, ""),
        ([(0.9, True, "a"), (0.9, True, "ab"), (0.9, True)], 0.7, "a1 b.5"),  # nobody saw what all saw
        ([(1.0, False, "a"), (0.8, True, "b")], 0.7, ""),  # no valid trajectory has the group's best score
        ([(1.0, True, ""), (0.0, True)], 0.7, ""),
        ([], 0.0, ""),
    ],
    ids=str,
)
def test_silver_documents_are_of_best_valid_trajectories(build, members, threshold, expected):
    group = build.group(*(build.member(score, *shown, valid=valid) for score, valid, *shown in members))
    weights = {item[0]: float(item[1:]) for item in expected.split()}
    assert silver_documents(group, threshold) == weights


@pytest.mark.parametrize(("score", "expected"), [(1.4, {"a": 1.0}), (1.39, {})])
def test_silver_threshold_is_relative_to_largest_reward(build, score, expected):
    group = build.group(build.member(score, "a"))
    group.trajectories[0].max_score = 2.0
    assert silver_documents(group, 0.7) == expected


def turn_correctness(*arguments):
    return [judgement.correctness for judgement in judge_turns(*arguments)]


def test_only_searches_with_documents_have_correctness(build):
    documents = [build.turn(documents=["a"]), build.turn("invalid", documents=["b"]), build.turn("answer")]
    empty = [build.turn(think="a"), build.turn(think="b", documents=["a"]), build.turn("answer")]
    members = (0.0, True, documents), (0.0, False, documents), (1.0, True, empty)
    valid, invalid, last = build.group(*members).trajectories
    silver = {"a": 1.0, "b": 1.0}
    for how in ("fraction", "max", "mean"):
        assert turn_correctness(valid, silver, how) == [1.0, 0.0, 0.0]
        assert turn_correctness(invalid, silver, how) == turn_correctness(valid, {}, how) == [0.0, 0.0, 0.0]
        assert turn_correctness(last, silver, how) == [0.0, 1.0, 0.0]


def test_judgement_names_repetition_and_silver(build):
    """The first earlier turn counts, documents before thinks, and turns of any kind are earlier ones."""
    turns = [
        build.turn("invalid", think="one two three"),
        build.turn(think="one two four", documents=["a", "b", "a"]),  # repeats the invalid turn
        build.turn(think="one two five", documents=["b", "a", "c"]),  # its documents, and both thinks
        build.turn(think="nothing alike", documents=["a", "d"]),  # one shared document is no repetition
        build.turn("answer", think="nothing alike"),
    ]
    (trajectory,) = build.group((0.0, True, turns)).trajectories
    judged = judge_turns(trajectory, dict.fromkeys("abc", 1.0), "fraction")
    repeated = [None, "think of turn 1", "documents of turn 2", None, None]
    assert [judgement.repeated for judgement in judged] == repeated
    assert [judgement.found_silver for judgement in judged] == [(), ("a", "b"), ("c",), (), ()]
    assert [judgement.correctness for judgement in judged] == [0] * 5
    judged = judge_turns(trajectory, {"d": 0.5}, "max")
    assert judged[3].found_silver == ("d",) and judged[3].correctness == 0.5
    assert {judgement.repeated for judgement in judge_turns(trajectory, {}, "max")} == {None}


def test_later_search_is_compared_with_a_worthless_one(build):
    turns = [
        build.turn(think="x", documents=["y"]),  # nothing silver
        build.turn(think="one two three", documents=["a"]),
        build.turn(think="one two four", documents=["b"]),  # repeats the second turn: correctness 0
        build.turn(think="five six", documents=["b", "c"]),  # b was seen, c is new
        build.turn("answer"),
    ]
    (trajectory,) = build.group((0.0, True, turns)).trajectories
    silver = dict.fromkeys("abc", 1.0)
    np.testing.assert_allclose(turn_correctness(trajectory, silver, "fraction"), [0, 1, 0, 0.5, 0])
