"""Question files and the resumable pipeline."""

import json

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.layouts import without_nan
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.data.questions import load_questions, read_questions, select_evenly, write_questions

GOOD = {"id": "1", "question": "who?", "golden_answers": ["me"], "data_source": "nq"}


def make(count, source="nq"):
    return [Question(f"{source}{i}", f"q{i}", ("a",), source) for i in range(count)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "q.jsonl:2: not valid JSON"),
        ("[1]", "q.jsonl:2: expected a JSON object, got list"),
        (GOOD | {"id": "2", "question": " "}, "q.jsonl:2: field 'question' must be a non-empty string"),
        (GOOD | {"id": "2", "golden_answers": []}, "q.jsonl:2: key 'golden_answers' holds no answer"),
        (GOOD | {"id": "2", "golden_answers": [""]}, "q.jsonl:2: key 'golden_answers' holds no answer"),
        ({"id": "2", "golden_answers": ["me"]}, "q.jsonl:2: field 'question' must be"),
        (GOOD | {"id": "2", "supporting_ids": {"a": 1}}, "q.jsonl:2: key 'supporting_ids' must be text or a"),
        (GOOD, "q.jsonl:2: id '1' was used before, at .*q.jsonl:1"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        load_questions(write_rows(tmp_path / "q.jsonl", GOOD, row))


def test_key_with_dot_and_separator_answer_stay(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", {"asked.text": "who?", "right": "|"})
    (question,) = load_questions(str(path), ColumnsConfig("asked.text", "right", "|"))
    assert (question.text, question.golden_answers) == ("who?", ("|",))
    assert without_nan(float("inf")) is None


def test_row_without_answer_names_its_layouts_source(tmp_path):
    row = {"id": "1", "question": "who?", "paragraphs": [], "answerable": False}
    ((_, reason),) = read_questions(write_rows(tmp_path / "q.jsonl", row), "q")
    assert reason.source == "musique"


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="no such file of questions"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no questions in it"):
        load_questions(write_rows(tmp_path / "q.jsonl", ""))


def test_select_evenly_takes_from_every_source():
    chosen = select_evenly(make(50, "a") + make(3, "b"), 10, seed=0)
    sources = [question.data_source for question in chosen]
    assert sources.count("b") == 3
    assert sources.count("a") == 7
    assert select_evenly(make(5), 10, seed=0) == make(5)


@pytest.mark.parametrize("shuffle", [True, False])
def test_resumed_pipeline_goes_on_exactly(shuffle):
    iterator = QuestionIterator(make(10), seed=3, shuffle=shuffle)
    for _ in range(13):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(25)]
    resumed = QuestionIterator(make(10), seed=3, shuffle=shuffle)
    resumed.set_state(state)
    assert [next(resumed) for _ in range(25)] == expected


def test_question_with_lone_surrogate_can_be_written(tmp_path):
    row = '{"id": 7, "question": "who\\ud800?", "golden_answers": ["a\\udc00"], "data_source": "t"}\n'
    (tmp_path / "q.jsonl").write_text(row)
    (question,) = load_questions(tmp_path / "q.jsonl")
    assert (question.id, question.text, question.golden_answers) == ("7", "who\ufffd?", ("a\ufffd",))
    write_questions(tmp_path / "again.jsonl", [question])
    assert load_questions(tmp_path / "again.jsonl") == [question]
