"""Turns that several trajectories go through: their tokens are trained once, with the mean advantage."""

from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.advantages.credit import (
    ByToken,
    broadcast_to_tokens,
    merge_continued_turns,
    uncalibrated_credit,
)
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.learner.batching import token_weights
from calibadv_jax.learner.step import make_sample

QUESTION = Question("q", "?", ("x",), "toy", ("p1",))
PROMPT = np.array([9], np.int32)
GOLD, OTHER = Document("p1", "P", "p"), Document("o", "O", "o")


def turn(tokens, kind="search", observed=1, document=GOLD, is_context=False):
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    observation = np.zeros(observed, np.int32)
    documents = (document,) if kind == "search" else ()
    return Turn(
        kind, ids, np.zeros(tokens), documents=documents, observation_ids=observation, is_context=is_context
    )


def make_group():
    """A near miss of two turns before its answer; two continue its first turn, one its first two; one not."""
    answer = turn(2, "answer", 0)
    first, second = turn(3), turn(1, document=OTHER)
    context = [replace(first, is_context=True), replace(second, is_context=True)]
    members = [
        ([first, second, answer], None, 0.0),
        ([turn(1, document=OTHER), answer], None, 0.0),
        ([context[0], turn(4, document=OTHER), answer], 0, 1.0),
        ([context[0], answer], 0, 0.0),
        ([*context, answer], 0, 1.0),
    ]
    trajectories = [
        Trajectory(QUESTION, PROMPT, turns, index, answer_score=score, format_valid=True, continues=continues)
        for index, (turns, continues, score) in enumerate(members)
    ]
    return Group(QUESTION, trajectories)


def test_shared_turn_has_the_mean_of_all_that_go_through_it():
    group = make_group()
    values = [-1.0, -2.0, 3.0, -4.0, 5.0]
    credit = merge_continued_turns(uncalibrated_credit(group, values))
    expected = [
        [(-1 + 3 - 4 + 5) / 4, (-1 + 5) / 2, -1.0],
        [-2.0, -2.0],
        [0.0, 3.0, 3.0],
        [0.0, -4.0],
        [0.0, 0.0, 5.0],
    ]
    assert [turns.tolist() for turns in credit.turns] == expected
    assert [turns.tolist() for turns in credit.before] == [
        [value] * len(trajectory.turns) for value, trajectory in zip(values, group.trajectories, strict=True)
    ]


def test_gradient_is_that_of_prefixes_trained_in_every_trajectory():
    """By hand: A of each trajectory for each token of the first turn, divided by how many go through it.

    Every token of the prefix has a weight in one sample only, so that no token is trained twice.
    """
    group = make_group()
    advantages = [-1.0, -2.0, 3.0, -4.0, 5.0]
    credit = merge_continued_turns(uncalibrated_credit(group, advantages))
    samples = [
        make_sample(trajectory, values)
        for trajectory, values in zip(group.trajectories, broadcast_to_tokens(credit), strict=True)
    ]
    weights = token_weights(samples, "sequence_sum")
    trained = [int(np.count_nonzero(weight)) for weight in weights]
    # First turn 3, second 1, answers 2 each; and 1 and 4 of the turns of their own.
    assert trained == [3 + 1 + 2, 1 + 2, 4 + 2, 2, 2]
    # The token's id takes the place of its gradient: Σ weight · A · id. Trajectory 1 has another first turn.
    first = 0.0
    for index in (0, 2, 3, 4):
        terms = weights[index] * samples[index].advantages * samples[index].tokens
        first += float(terms[1:4].sum())
    by_hand = sum(advantages[index] / 4 * (1 + 2 + 3) for index in (0, 2, 3, 4)) / 5
    assert first == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["grpo", "calibadv"])
def test_stage_merges_after_the_calibration(name):
    """The advantages of the whole trajectories are those that they have without marks of context."""
    group = make_group()
    config = AdvantageConfig(name=name)
    (credit,) = compute_advantages([group], config).credits
    unmarked = Group(
        QUESTION,
        [
            replace(member, turns=[replace(turn, is_context=False) for turn in member.turns], continues=None)
            for member in group.trajectories
        ],
    )
    (expected,) = compute_advantages([unmarked], config).credits
    np.testing.assert_array_equal(credit.raw, expected.raw)
    through = [expected.turns[position][0] for position in (0, 2, 3, 4)]
    assert credit.turns[0][0] == pytest.approx(np.mean(through))
    assert credit.turns[0][0] > expected.turns[0][0]  # its search led to right answers after all
    for position, num_context in enumerate((0, 0, 1, 1, 2)):
        assert not credit.turns[position][:num_context].any()
    np.testing.assert_array_equal(credit.turns[1], expected.turns[1])


def test_source_that_failed_later_leaves_nothing_to_share():
    """A demonstration's context, and a prefix whose trajectory is not in the group, get 0."""
    context = replace(turn(2), is_context=True)
    answer = turn(1, "answer", 0)
    demonstration = Trajectory(QUESTION, PROMPT, [context, answer], 1, is_demonstration=True)
    orphan = Trajectory(QUESTION, PROMPT, [context, answer], 2, continues=0)
    credit = merge_continued_turns(uncalibrated_credit(Group(QUESTION, [demonstration, orphan]), [1.0, -1.0]))
    assert [turns.tolist() for turns in credit.turns] == [[0.0, 1.0], [0.0, -1.0]]


def test_advantages_by_token_are_averaged_too():
    first, answer = turn(2), turn(1, "answer", 0)
    source = Trajectory(QUESTION, PROMPT, [first, answer], 0)
    other = Trajectory(QUESTION, PROMPT, [replace(first, is_context=True), answer], 1, continues=0)
    estimate = [
        ByToken([np.array([1.0, 3.0]), np.array([5.0])]),
        ByToken([np.array([-1.0, 2.0]), np.array([7.0])]),
    ]
    credit = merge_continued_turns(uncalibrated_credit(Group(QUESTION, [source, other]), estimate))
    tokens = broadcast_to_tokens(credit)
    np.testing.assert_allclose(tokens[0], [0.0, 2.5, 0.0, 5.0])
    np.testing.assert_allclose(tokens[1], [0.0, 0.0, 0.0, 7.0])


def test_group_without_context_is_left_as_it_is():
    group = Group(QUESTION, [Trajectory(QUESTION, PROMPT, [turn(2)])])
    credit = uncalibrated_credit(group, [1.0])
    assert merge_continued_turns(credit) is credit
