"""The order of questions: the file's, or one that the seed decides."""

import json

import pytest

from calibadv_jax.config import DataConfig
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.data.questions import load_questions, write_questions

QUESTIONS = [Question(f"q{number}", "?", ("a",), "nq") for number in range(20)]


def drawn(seed, shuffle, count=40):
    iterator = QuestionIterator(QUESTIONS, seed, shuffle)
    return [int(next(iterator).id[1:]) for _ in range(count)]


def test_unshuffled_questions_repeat_the_file_order():
    assert drawn(0, False) == list(range(20)) * 2 == drawn(1, False)


def test_seed_decides_the_order():
    assert drawn(0, True) == drawn(0, True)
    assert len({tuple(drawn(seed, True, 20)) for seed in range(5)} | {tuple(range(20))}) == 6


def test_no_epoch_repeats_the_order_of_another():
    order = drawn(0, True, 6 * 20)
    epochs = [order[start : start + 20] for start in range(0, 120, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_too_easy_or_hard_question_is_skipped_once():
    made = [QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75) for _ in range(2)]
    first, resumed = made
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
    for item in made:
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


def test_blank_lines_end_nothing(tmp_path):
    path = tmp_path / "q.jsonl"
    write_questions(path, QUESTIONS[:2])
    first, second = path.read_text().splitlines()
    path.write_text(f"\n{first}\n  \n\n{second}\n\n")
    assert load_questions(path) == QUESTIONS[:2]
