"""Silver documents, repetition, correctness."""

from __future__ import annotations

import random

import numpy as np
import pytest

from calibadv_jax.advantages.calibadv import is_repetition, judge_turns, silver_documents


def slow_edit_distance(first, second):
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def test_repetition_equals_the_textbook_programme():
    draw = random.Random(0)
    for _ in range(1500):
        words = "abcdefgh"[: draw.randint(1, 8)]
        first = draw.choices(words, k=draw.randint(0, 80))
        second = draw.choices(words, k=draw.randint(0, 80))
        expected = slow_edit_distance(first, second)
        longest = max(len(first), len(second))
        assert is_repetition(first, second) == (longest > 0 and 1 - expected / longest > 0.5)


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


def test_silver_needs_best_valid_trajectories(build):
    group = build.group(
        (0.9, True, [build.turn(documents=["a", "b", "b"]), build.turn("answer")]),
        (0.9, True, [build.turn(documents=["a"]), build.turn(documents=["a"]), build.turn("answer")]),
        (0.9, False, [build.turn(documents=["invalid"])]),
        (0.8, True, [build.turn(documents=["second best"]), build.turn("answer")]),
    )
    assert silver_documents(group, 0.7) == {"a": 1.0, "b": 0.5}
    assert silver_documents(group, 0.9) == {"a": 1.0, "b": 0.5}
    assert silver_documents(group, 0.91) == {}


@pytest.mark.parametrize(("largest", "score"), [(2.0, 1.4), (0.5, 0.35), (1.0, 0.7)])
def test_silver_threshold_is_relative_to_largest_reward(build, largest, score):
    for given, expected in ((score, {"a": 1.0}), (score - 0.01, {})):
        group = build.group((given, True, [build.turn(documents=["a"]), build.turn("answer")]))
        group.trajectories[0].max_score = largest
        assert silver_documents(group, 0.7) == expected


def test_silver_weight_is_relative_to_largest_count(build):
    """Three of the best: two saw a, one saw b, and nobody saw what all saw."""
    group = build.group(
        (0.9, True, [build.turn(documents=["a"]), build.turn("answer")]),
        (0.9, True, [build.turn(documents=["a", "b"]), build.turn("answer")]),
        (0.9, True, [build.turn("answer")]),
    )
    assert silver_documents(group, 0.7) == {"a": 1.0, "b": 0.5}


def test_invalid_best_trajectory_leaves_no_silver(build):
    """The best score is that of the whole group; no valid trajectory reaches it here."""
    group = build.group(
        (1.0, False, [build.turn(documents=["a"]), build.turn("answer")]),
        (0.8, True, [build.turn(documents=["b"]), build.turn("answer")]),
    )
    assert silver_documents(group, 0.7) == {}


def test_silver_trajectories_without_documents_have_no_silver_set(build):
    group = build.group(
        (1.0, True, [build.turn(), build.turn("answer")]), (0.0, True, [build.turn("answer")])
    )
    assert silver_documents(group, 0.7) == {}
    assert silver_documents(build.group(), 0.0) == {}


def test_documents_are_one_by_id_not_by_text(build):
    group = build.group((1.0, True, [build.turn(documents=["1", "2"])]))
    assert all(document.text == "" for document in group.trajectories[0].turns[0].documents)
    assert set(silver_documents(group, 0.7)) == {"1", "2"}


def turn_correctness(*arguments):
    return [judgement.correctness for judgement in judge_turns(*arguments)]


def test_only_search_turns_of_valid_trajectories_have_correctness(build):
    turns = [build.turn(documents=["a"]), build.turn("invalid", documents=["b"]), build.turn("answer")]
    valid, invalid = build.group((0.0, True, turns), (0.0, False, turns)).trajectories
    silver = {"a": 1.0, "b": 1.0}
    np.testing.assert_array_equal(turn_correctness(valid, silver, "fraction"), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(turn_correctness(invalid, silver, "fraction"), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(turn_correctness(valid, {}, "fraction"), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("how", ["fraction", "max", "mean"])
def test_search_without_documents_has_correctness_zero(build, how):
    """Also where the only search of a right trajectory found nothing: that makes no silver documents."""
    turns = [build.turn(think="a"), build.turn(think="b", documents=["a"]), build.turn("answer")]
    group = build.group((1.0, True, turns), (1.0, True, [build.turn(think="c"), build.turn("answer")]))
    silver = silver_documents(group, 0.7)
    assert silver == {"a": 1.0}
    assert turn_correctness(group.trajectories[0], silver, how) == [0.0, 1.0, 0.0]
    assert turn_correctness(group.trajectories[1], silver, how) == [0.0, 0.0]


def test_worthless_turn_stays_in_the_history(build):
    turns = [
        build.turn(think="x", documents=["y"]),  # nothing silver
        build.turn(think="one two three", documents=["a"]),
        build.turn(think="one two four", documents=["b"]),  # repeats the second: worth 0
        build.turn(think="five six", documents=["b", "c"]),  # b is seen, c is new
        build.turn("answer"),
    ]
    (trajectory,) = build.group((0.0, True, turns)).trajectories
    silver = dict.fromkeys("abc", 1.0)
    np.testing.assert_allclose(turn_correctness(trajectory, silver, "fraction"), [0, 1, 0, 0.5, 0])


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
    assert [judgement.repeated for judgement in judged] == [
        None,
        "think of turn 1",
        "documents of turn 2",
        None,
        None,
    ]
    assert [judgement.found_silver for judgement in judged] == [(), ("a", "b"), ("c",), (), ()]
    assert [judgement.correctness for judgement in judged] == [0] * 5
    judged = judge_turns(trajectory, {"d": 0.5}, "max")
    assert judged[3].found_silver == ("d",) and judged[3].correctness == 0.5
    assert {judgement.repeated for judgement in judge_turns(trajectory, {}, "max")} == {
        None
    }  # nothing is judged
