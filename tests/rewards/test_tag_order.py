"""Of all runs of four tags a turn may hold, exactly one is well-formed, as a search and as an answer."""

import itertools

import numpy as np
import pytest

from calibadv_jax.core.tags import TAGS
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.rewards.score import format_flaw

GOOD = {
    "search": "<think> t </think> <search> q </search>",
    "answer": "<think> t </think> <answer> x </answer>",
}


def is_valid(search, answer):
    def turn(kind, text, num_observed):
        observed = np.zeros(num_observed, np.int32)
        ids = np.arange(3, dtype=np.int32)
        return Turn(kind, ids, np.zeros(3, np.float32), text=text, observation_ids=observed)

    turns = [turn("search", search, 2), turn("answer", answer, 0)]
    trajectory = Trajectory(Question("q", "?", ("x",), "test"), np.zeros(1, np.int32), turns)
    return not format_flaw(trajectory)


@pytest.mark.parametrize("kind", ["search", "answer"])
def test_only_the_protocols_own_order_is_valid(kind):
    valid = [
        tags
        for tags in itertools.product(TAGS, repeat=4)
        if is_valid(**(GOOD | {kind: "{}t{} {}q{}".format(*tags)}))
    ]
    assert valid == [("<think>", "</think>", f"<{kind}>", f"</{kind}>")]


@pytest.mark.parametrize("kind", ["search", "answer"])
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("place", range(5))
def test_one_tag_more_is_invalid_wherever_it_stands(kind, tag, place):
    pieces = ["<think>", "</think>", f"<{kind}>", f"</{kind}>"]
    pieces.insert(place, tag)
    assert not is_valid(**(GOOD | {kind: " ".join(pieces)}))
