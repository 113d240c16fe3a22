"""The resumable order and mixture of questions."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from calibadv_jax.config import DataConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.pipeline import QuestionIterator, check_questions


def make(count, source="nq"):
    return [Question(f"{source}{i}", f"q{i}", ("a",), source) for i in range(count)]


@pytest.mark.parametrize("weights", [None, {"a": 3.0, "b": 1.0}])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resumed_pipeline_goes_on_exactly(shuffle, weights):
    questions = make(6, "a") + make(30, "b")
    first, resumed, other = (QuestionIterator(questions, seed, shuffle, weights) for seed in (3, 3, 4))
    begun = list(islice(first, 37))
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert list(islice(resumed, 60)) == list(islice(first, 60))
    assert (list(islice(other, 37)) == begun) == (not shuffle)


QUESTIONS = make(20, "q")


def drawn(seed, shuffle, count=40):
    iterator = QuestionIterator(QUESTIONS, seed, shuffle)
    return [int(next(iterator).id[1:]) for _ in range(count)]


def test_seed_and_epoch_decide_the_order():
    assert drawn(0, False) == list(range(20)) * 2 == drawn(1, False)
    assert drawn(0, True) == drawn(0, True)
    assert len({tuple(drawn(seed, True, 20)) for seed in range(5)} | {tuple(range(20))}) == 6
    order = drawn(0, True, 6 * 20)
    epochs = [order[start : start + 20] for start in range(0, 120, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_too_easy_or_hard_question_is_skipped_once():
    first, resumed = (QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75) for _ in range(2))
    assert [next(first).id for _ in range(20)] == [question.id for question in QUESTIONS]
    for name, scores in {
        "q1": [1, 1, 0.5],  # too easy
        "q2": [-1, 0.7, 0],  # too hard: a negative score counts as 0
        "q3": [-1, 1, 0],
        "q4": [0.75, 0.75],
        "q5": [],  # all trajectories failed
    }.items():
        first.note(name, scores)
    assert first.resting == 2
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    for item in (first, resumed):
        expected = ["q0", *(f"q{number}" for number in range(3, 20)), *(f"q{number}" for number in range(5))]
        assert [next(item).id for _ in expected] == expected
        assert item.get_state() == {"drawn": 45} and item.resting == 0


def test_by_default_no_question_rests():
    iterator = QuestionIterator(QUESTIONS, 0, False)
    for scores in ([1.0] * 3, [0.0] * 3, [-1.0], [2.0] * 3):
        iterator.note("q0", scores)
    assert iterator.get_state() == {"drawn": 0}
    with pytest.raises(ValueError, match="rest_below is 0.5, but must be below rest_above"):
        DataConfig(rest_below=0.5, rest_above=0.5)


MIXED, WEIGHTS = make(6, "nq") + make(90, "hotpotqa"), {"nq": 3.0, "hotpotqa": 1.0}


@pytest.mark.medium
@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_has_its_shares_everywhere(shuffle):
    drawn = list(islice(QuestionIterator(MIXED, 0, shuffle, WEIGHTS), 400))
    reordered = dict(reversed(WEIGHTS.items()))
    assert list(islice(QuestionIterator(MIXED, 0, shuffle, reordered), 400)) == drawn
    for start in range(0, 400, 40):
        part = drawn[start : start + 40]
        assert Counter(question.data_source for question in part) == {"nq": 30, "hotpotqa": 10}
    nq = [item.id for item in drawn if item.data_source == "nq"]
    epochs = [nq[start : start + 6] for start in range(0, 300, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs), "a source has epochs of its own"
    assert (len({tuple(epoch) for epoch in epochs}) > 10) == shuffle
    hotpot = [item.id for item in drawn if item.data_source == "hotpotqa"]
    assert len(set(hotpot[:90])) == 90


def test_sources_of_one_size_are_not_shuffled_alike():
    iterator = QuestionIterator(make(20, "a") + make(20, "b"), 0, True, {"a": 1, "b": 1})
    drawn = list(islice(iterator, 40))
    orders = [[item.id[1:] for item in drawn if item.data_source == source] for source in "ab"]
    assert orders[0] != orders[1]


def test_question_without_required_prompt_is_refused():
    check_questions(MIXED, {}, "paper")
    carried = [replace(question, prompt=(Message("user", ("x",)),)) for question in MIXED]
    check_questions(carried, WEIGHTS, "from_data")
    with pytest.raises(UserError, match="question 'hotpotqa3': prompt.template is 'from_data'"):
        check_questions([*carried, MIXED[9]], WEIGHTS, "from_data")


@pytest.mark.parametrize("weights", [{"nq": 1.0}, WEIGHTS | {"popqa": 1.0}])
def test_weights_and_data_must_name_the_same_sources(weights):
    with pytest.raises(UserError, match="data.weights names .*nq.*, but data.train holds hotpotqa, nq"):
        QuestionIterator(MIXED, 0, True, weights)
