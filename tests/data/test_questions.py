"""Question files: rows, what they must hold, and which are chosen."""

from collections import Counter

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.layouts import without_nan
from calibadv_jax.data.questions import load_questions, read_questions, select_evenly, write_questions

GOOD = {"id": "1", "question": "who?", "golden_answers": ["me"], "data_source": "nq"}


def make(count, source="nq"):
    return [Question(f"{source}{i}", f"q{i}", ("a",), source) for i in range(count)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        (GOOD | {"id": "2", "golden_answers": []}, "key 'golden_answers' holds no answer"),
        ({"id": "2", "golden_answers": ["me"]}, "field 'question' must be"),
        (GOOD | {"id": "2", "supporting_ids": {"a": 1}}, "key 'supporting_ids' must be text or a"),
        (GOOD, "id '1' was used before, at .*q.jsonl:1"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path, row, message):
    with pytest.raises(UserError, match=f"q.jsonl:2: {message}"):
        load_questions(write_rows(tmp_path / "q.jsonl", GOOD, row))


def test_key_with_dot_and_separator_answer_stay(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", {"asked.text": "who?", "right": "|"})
    (question,) = load_questions(str(path), ColumnsConfig("asked.text", "right", "|"))
    assert (question.text, question.golden_answers) == ("who?", ("|",))
    assert without_nan(float("inf")) is None


def test_row_without_answer_names_its_layouts_source(tmp_path):
    row = {"id": "1", "question": "who?", "paragraphs": [], "answerable": False}
    rows = row, row | {"data_source": "mine"}
    reasons = [reason for _, reason in read_questions(write_rows(tmp_path / "q.jsonl", *rows), "q")]
    assert [reason.source for reason in reasons] == ["musique", "mine"]


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="no such file of questions"):
        load_questions(tmp_path / "none.jsonl")
    empty, good = write_rows(tmp_path / "q.jsonl", ""), write_rows(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(UserError, match="q.jsonl: no questions in it"):
        load_questions([good, empty])


def test_select_evenly_takes_from_every_source():
    chosen = select_evenly(make(50, "a") + make(3, "b"), 10, seed=0)
    assert Counter(question.data_source for question in chosen) == {"a": 7, "b": 3}
    assert select_evenly(make(5), 10, seed=0) == make(5)
    few = select_evenly(make(9, "a") + make(9, "b") + make(9, "c"), 4, seed=0)
    assert {question.data_source for question in few} == {"a", "b", "c"}


def test_question_with_lone_surrogate_can_be_written(tmp_path):
    row = {"id": 7, "question": "who\ud800?", "golden_answers": ["a\udc00"], "data_source": "t"}
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row))
    assert (question.id, question.text, question.golden_answers) == ("7", "who\ufffd?", ("a\ufffd",))
    write_questions(tmp_path / "again.jsonl", [question])
    assert load_questions(tmp_path / "again.jsonl") == [question]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=2026_11", "2026_11"),
        ("data.train=[a.jsonl, 7]", ["a.jsonl", "7"]),
        ("data.train={nq: a.jsonl}", {"nq": "a.jsonl"}),
        ("data.train=", ""),
    ],
)
def test_data_train_takes_path_list_or_mapping(tmp_path, override, expected):
    (tmp_path / "c.yaml").write_text("data: {train: {mine: x.jsonl}, weights: {mine: 2}}\n")
    config = load_config(tmp_path / "c.yaml", [override, "data.weights={nq: 0.5, mine: 1}"])
    assert config.data.train == expected and config.data.weights == {"nq": 0.5, "mine": 1.0}
    with pytest.raises(UserError, match="data.weights.nq: must be greater than 0"):
        load_config(tmp_path / "c.yaml", ["data.weights={nq: 0}"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("['Ada', 'Bo']", ("Ada", "Bo")),
        ('["Ada", "Bo"]', ("Ada", "Bo")),
        ("('Ada', 'Bo')", ("Ada", "Bo")),
        ("array(['Ada', 'Bo'], dtype=object)", ("Ada", "Bo")),
        ('["Ada", null]', ("Ada",)),
        ("Ada<|answer_split|>Bo", ("Ada", "Bo")),
        ("Ada <sep> Bo<SEP>", ("Ada", "Bo")),
        (["Ada[SEP]Bo", "['Cy', 'Ada']"], ("Ada", "Bo", "Cy")),
        (['["Weird Al" Yankovic]'], ('["Weird Al" Yankovic]',)),
        ("Ada<br>Bo", ("Ada", "Bo")),
        ("Ada|Bo", ("Ada|Bo",)),
        ("(1, 2)", ("(1, 2)",)),
        ([True, False], ("yes", "no")),
        (False, ("no",)),
        ([float("nan"), "Ada"], ("Ada",)),
        ([5.0, -3.0, 2.5], ("5", "-3", "2.5")),
        (["", None, " Ada "], ("Ada",)),
    ],
)
@pytest.mark.parametrize("key", ["golden_answers", "answer", "possible_answers", "ground_truth"])
@pytest.mark.parametrize("data_source", [{}, {"data_source": "mine", "id": "1"}])
def test_answers_are_read_equally_in_every_layout(tmp_path, key, data_source, answer, expected):
    row = {"question": "who?", key: answer} | data_source
    verl = {"question": "who?", "reward_model": {"ground_truth": {"target": answer}}} | data_source
    for name, content in (("q.jsonl", row), ("v.jsonl", verl)):
        assert load_questions(write_rows(tmp_path / name, content))[0].golden_answers == expected
