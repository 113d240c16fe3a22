"""Tables whose cells hold lists of answers."""

import csv
import io
import json

import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import load_questions

LISTED = {
    '["Ada", "Bo"]': ("Ada", "Bo"),
    "['Ada']": ("Ada",),
    """['Ada', "Bo's"]""": ("Ada", "Bo's"),
    "['Ada' 'Bo']": ("Ada", "Bo"),  # numpy, as pandas writes a parquet's lists
    "['Ada'\n 'Bo']": ("Ada", "Bo"),
    "[1999, 2000]": ("1999", "2000"),
    "['minus', -1]": ("minus", "-1"),
    "Ada": ("Ada",),
    "[Fe(CN)6]": ("[Fe(CN)6]",),
    "[a] and [b]": ("[a] and [b]",),
    "[__import__('os').getcwd()]": ("[__import__('os').getcwd()]",),
    "[[1], [2]]": ("[[1], [2]]",),
}


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("column", ["answer", "answers", "golden_answers", "possible_answers", "Answer"])
def test_a_list_in_a_table_is_a_list(tmp_path, column, separator):
    """JSON's, Python's or numpy's; what only looks like one is a text, and is never run."""
    text = io.StringIO()
    table = csv.writer(text, delimiter=separator)
    table.writerow(["Question" if column == "Answer" else "question", column])
    table.writerows([f"['who'] {n}", written] for n, written in enumerate(LISTED))
    (tmp_path / "mine.csv").write_text(text.getvalue())
    if column == "possible_answers":  # PopQA's, which are lists
        with pytest.raises(UserError, match="key 'possible_answers' must be a JSON list, got 'Ada'"):
            load_questions(tmp_path / "mine.csv")
        return
    questions = load_questions(tmp_path / "mine.csv")
    assert [question.golden_answers for question in questions] == list(LISTED.values())
    assert [question.text for question in questions] == [f"['who'] {n}" for n in range(len(LISTED))]


def test_our_own_layout_as_a_table(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "id,question,golden_answers,data_source,supporting_ids\n"
        "1,who?,\"['Ada', 'Bo']\",mine,\"['7', '8']\"\n2,where?,Rome,mine,\n"
    )
    first, second = load_questions(tmp_path / "mine.csv")
    assert (first.golden_answers, first.supporting_ids) == (("Ada", "Bo"), ("7", "8"))
    assert (second.golden_answers, second.supporting_ids) == (("Rome",), ())


@pytest.mark.parametrize("cell", ["['Ada', Bo]", '["Ada", "Bo"', "['Ada', b'Bo']", "[ 'Ada', ['Bo']]"])
def test_a_list_in_a_table_that_is_broken_is_refused(tmp_path, cell):
    text = io.StringIO()
    csv.writer(text).writerows([["question", "answer"], ["who?", "Ada"], ["what?", cell]])
    (tmp_path / "mine.csv").write_text(text.getvalue())
    with pytest.raises(
        UserError, match=r"mine.csv:3: column 'answer' begins as a list, but is none: .*write"
    ):
        load_questions(tmp_path / "mine.csv")


def test_a_list_as_the_text_of_another_file_stays_a_text(tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "who?", "answer": "['Ada']"}) + "\n")
    (question,) = load_questions(tmp_path / "mine.jsonl")
    assert question.golden_answers == ("['Ada']",)
