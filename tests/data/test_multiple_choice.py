"""Multiple choice as data sets publish it: the golden answer is a text, and the choices are shown."""

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.golden_answers import NoAnswer
from calibadv_jax.data.questions import load_questions

ASKED = {"question": "Which town?"}
NESTED = [{"label": "A", "text": "Ulm"}, {"label": "B", "text": "Rye"}]
LISTED = ASKED | {"choices": ["Ulm", "Rye"]}
ARC = {"text": ["Ulm", "Rye"], "label": ["A", "B"]}
MEDQA = {"options": {"A": "Ulm", "B": "Rye"}, "answer_idx": "B"}


@pytest.mark.parametrize(
    "row",
    [
        LISTED | {"answer": 1, "subject": "geo"},  # MMLU
        LISTED | {"answer": "B"},
        LISTED | {"answer": "(b)"},
        LISTED | {"answer": "B. Rye"},
        LISTED | {"answer": "rye"},
        LISTED | {"answer": "1"},  # MMLU as csv
        LISTED | {"golden_answers": [1], "id": "x", "data_source": "mmlu"},  # FlashRAG
        ASKED | {"options": ["Ulm", "Rye"], "answer": "B", "answer_index": 1},  # MMLU-Pro
        ASKED | {"choices": ARC, "answerKey": "B"},  # ARC, CommonsenseQA
        ASKED | {"choices": ARC | {"label": ["1", "2"]}, "answerKey": "2"},
        {"question_stem": "Which town?", "choices": ARC, "answerKey": "B"},  # OpenBookQA
        {
            "question": {"stem": "Which town?", "choices": NESTED},
            "answerKey": "B",
        },  # ARC, not on the hub
        ASKED | MEDQA | {"answer": "Rye"},
        ASKED | {"options": [{"key": "A", "value": "Ulm"}, {"key": "B", "value": "Rye"}], "answer": "B"},
        ASKED | {"opa": "Ulm", "opb": "Rye", "cop": 1},  # MedMCQA
        {"context": "x", "answerA": "Ulm", "answerB": "Rye", "label": "B"} | ASKED,  # Social IQa
        ASKED | {"options": ["A)Ulm", "B)Rye"], "correct": "B"},  # AQuA
        ASKED | {"choices": "['Ulm' 'Rye']", "answer": 1},  # as pandas writes it
    ],
)
def test_golden_answer_is_the_text_of_the_right_choice(tmp_path, row):
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row))
    assert question.golden_answers == ("Rye",)
    assert question.text == "Which town? Choices: Ulm; Rye"


def test_columns_of_letters_are_choices(tmp_path):
    (tmp_path / "cmmlu.csv").write_text(",Question,A,B,C,D,Answer\n0,Which town?,Ulm,Rye,Bath,York,C\n")
    (question,) = load_questions(tmp_path / "cmmlu.csv")
    assert (question.text, question.golden_answers) == (
        "Which town? Choices: Ulm; Rye; Bath; York",
        ("Bath",),
    )


def test_choices_in_the_question_are_found_by_named_columns(tmp_path):
    """Else the golden answer would be the letter, of choices that the policy never sees."""
    row = {"question": {"stem": "Which town?", "choices": NESTED}, "gold": "B"}
    columns = ColumnsConfig(question="question.stem", answer="gold")
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row), columns=columns)
    assert (question.text, question.golden_answers) == ("Which town? Choices: Ulm; Rye", ("Rye",))


def test_several_choices_may_be_right_and_shown_ones_are_not_repeated(tmp_path):
    row = {"question": "Rye or Ulm?", "choices": ["Ulm", "Rye"], "answer": ["A", "B"]}
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row))
    assert (question.text, question.golden_answers) == ("Rye or Ulm?", ("Ulm", "Rye"))


def test_row_of_such_a_file_may_be_open(tmp_path):
    rows = [LISTED | {"answer": 1}, ASKED | {"choices": None, "answer": "Rye"}]
    _, question = load_questions(write_rows(tmp_path / "q.jsonl", *rows))
    assert (question.text, question.golden_answers) == ("Which town?", ("Rye",))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"answer": 2}, UserError, "key 'answer' is 2, which names none of the choices .A: Ulm, B: Rye"),
        ({"answer": "C"}, UserError, "none of the choices"),
        ({"choices": ["1", "0"], "answer": "1"}, UserError, "names two different choices"),
        ({"choices": ["B", "A"], "answer": "A"}, UserError, "names two different choices"),
        ({"choices": [["Ulm"], ["Rye"]], "answer": 1}, UserError, "key 'choices' must be a list of texts"),
        ({"answer": -1}, NoAnswer, "key 'answer' holds no answer"),
        ({"answer": ""}, NoAnswer, "key 'answer' holds no answer"),
    ],
)
def test_choice_that_is_not_known_is_refused(tmp_path, change, error, message):
    with pytest.raises(error, match=f"q.jsonl:1: .*{message}"):
        load_questions(write_rows(tmp_path / "q.jsonl", LISTED | change))
