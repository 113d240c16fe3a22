"""Golden answers as data sets publish them: objects, aliases, flags and marks for no answer."""

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.golden_answers import NoAnswer
from calibadv_jax.data.layouts import NO_COLUMNS
from calibadv_jax.data.questions import load_questions

SQUAD = {"text": ["Mara Holt", "Mara Holt", "Holt"], "answer_start": [1, 1, 6]}


def answers_of(tmp_path, row, columns=NO_COLUMNS):
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", {"question": "Who?"} | row), columns)
    return question.golden_answers


@pytest.mark.parametrize(
    "row",
    [
        {"answers": SQUAD},
        {"answers": [{"text": "Mara Holt", "answer_start": 1}, {"text": "Holt", "answer_start": 6}]},
        {"answers": [{"answer_id": "m.0", "answer": "Mara Holt", "aliases": ["Holt"]}]},  # CWQ
        {"answer_list": [{"answer_text": "Mara Holt", "aliases": ["Holt"]}]},  # QAMPARI
        {"answer": {"value": "Mara Holt", "aliases": ["Holt"], "normalized_value": "mara holt"}},
        {"answer": [{"entity_name": "Mara Holt"}, {"entity_name": "", "answer_argument": "Holt"}]},  # GrailQA
        {"answer": "{'text': array(['Mara Holt', 'Holt'], dtype=object)}"},  # SQuAD by pandas as csv
        {"answers": '[{"text": "Mara Holt"}, {"text": "Holt"}]'},
        {"golden_answers": [{"answer": "Mara Holt"}, {"answer": "Holt"}]},
    ],
)
def test_objects_are_read_by_their_usual_keys(tmp_path, row):
    assert answers_of(tmp_path, row) == ("Mara Holt", "Holt")


def test_key_of_other_objects_is_named(tmp_path):
    row = {"gold": [{"words": "Ada"}, {"words": "Bo"}]}
    with pytest.raises(
        UserError, match=r"q.jsonl:1: .*of its text, of words \(--answer gold.KEY; data.columns"
    ):
        answers_of(tmp_path, row, ColumnsConfig(answer="gold"))
    assert answers_of(tmp_path, row, ColumnsConfig(answer="gold.words")) == ("Ada", "Bo")


@pytest.mark.parametrize(
    "row",
    [
        {"answers": ["No Answer Present."]},  # MS MARCO
        {"answer": "CANNOTANSWER"},  # QuAC
        {"answer": "unanswerable"},
        {"answer": "[UNANSWERABLE]"},
        {"answer": "N/A"},
        {"answer": {"value": "<unk>", "aliases": []}},  # TriviaQA's test set
        {"answers": {"text": [], "answer_start": []}},  # SQuAD 2
        {"answers": [{"text": "it", "answer_start": 1}], "is_impossible": True},
        {"answer": "it", "answerable": False},
        {"answer": "nan"},
    ],
)
def test_question_without_an_answer_has_none(tmp_path, row):
    with pytest.raises(NoAnswer, match="q.jsonl:1: "):
        answers_of(tmp_path, row)


@pytest.mark.parametrize("answer", ["Nan", "Unknown", "None", "No", "The Unanswered Question", "Na", "null"])
def test_words_that_only_resemble_a_mark_are_answers(tmp_path, answer):
    assert answers_of(tmp_path, {"answer": answer}) == (answer,)


def test_mark_beside_an_answer_is_left_out(tmp_path):
    assert answers_of(tmp_path, {"answers": ["No Answer Present.", "Ada"]}) == ("Ada",)


def test_deep_objects_are_refused_in_one_line(tmp_path):
    answer = "Ada"
    for _ in range(90):
        answer = {"answer": [answer]}
    with pytest.raises(UserError, match="q.jsonl:1: key 'answer' must be text"):
        answers_of(tmp_path, {"answer": answer})
