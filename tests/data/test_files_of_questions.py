"""Files of questions: how they are named, found and read, whatever their format."""

import csv
from pathlib import Path

import pytest
from rows_rig import write_rows

from calibadv_jax.core.errors import UserError
from calibadv_jax.data.files import source_of
from calibadv_jax.data.questions import load_questions


def write(path, count, **fields):
    rows = ({"id": n, "question": f"q{n}", "golden_answers": ["a"]} | fields for n in range(count))
    return str(write_rows(path, *rows))


def sources_of(questions):
    return [question.data_source for question in questions]


def test_several_files_are_read_in_the_order_given(tmp_path):
    nq, popqa = write(tmp_path / "nq/train.jsonl", 2), write(tmp_path / "popqa/train.jsonl", 1)
    assert sources_of(load_questions([popqa, nq])) == ["popqa", "nq", "nq"]
    assert sources_of(load_questions(f"{tmp_path}/*/train.jsonl")) == ["nq", "nq", "popqa"]
    assert [question.id for question in load_questions({"mine": nq})] == ["mine_0", "mine_1"]
    path = write(tmp_path / "nq/train.jsonl", 1, data_source="theirs")
    assert sources_of(load_questions({"mine": path})) == ["theirs"], "that of the row wins"


def test_nothing_that_fits_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"\*.jsonl: no file matches"):
        load_questions(f"{tmp_path}/*.jsonl")
    for nothing in ([], {}, "", [""]):
        with pytest.raises(UserError, match="no question file: set data.train and data.eval"):
            load_questions(nothing)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nq/test.jsonl", "nq"),
        ("hotpot_dev_fullwiki_v1.json", "hotpotqa"),
        ("2wiki/dev.json", "2wikimultihopqa"),
        ("NQ-open.train.jsonl", "nq"),
        ("data/triviaqa-unfiltered.json.gz", "triviaqa"),
        ("mine/train-00000.parquet", "mine"),
        ("data/mine.jsonl", "mine"),
        ("train.jsonl", "train"),
    ],
)
def test_names_tell_the_data_source(path, expected):
    assert source_of(Path(path)) == expected


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


def write_table(path, rows, separator=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("column", ["answer", "answers", "golden_answers", "possible_answers", "Answer"])
def test_list_in_a_table_cell_is_parsed(tmp_path, column, separator):
    """JSON's, Python's or numpy's; what only looks like one is a text, and is never run."""
    rows = [["Question" if column == "Answer" else "question", column]]
    rows += [[f"['who'] {n}", written] for n, written in enumerate(LISTED)]
    questions = load_questions(write_table(tmp_path / "mine.csv", rows, separator))
    assert [question.golden_answers for question in questions] == list(LISTED.values())
    assert [question.text for question in questions] == [f"['who'] {n}" for n in range(len(LISTED))]


BROKEN = [
    "['Ada', Bo]",
    '["Ada", "Bo"',
    "[{'text': 'Ada'}]",
    "{'text': 'Ada'}",
    "['Ada', b'Bo']",
    "['A', ['Bo']]",
]


@pytest.mark.parametrize("cell", BROKEN)
def test_broken_list_in_a_table_is_refused(tmp_path, cell):
    path = write_table(tmp_path / "mine.csv", [["question", "answer"], ["who?", "Ada"], ["what?", cell]])
    with pytest.raises(UserError, match="mine.csv:3: key 'answer' begins as a list, but is none"):
        load_questions(path)


def test_table_has_the_booleans_and_numbers_of_pandas(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "id,question,golden_answers,data_source,supporting_ids\n"
        "1.0,who?,5.0,mine,7.0\n\n2.0,is it?,True,mine,\n3.0,is it not?,FALSE,,8.0\n"
        f"4,{'long ' * 50_000}?,\"['Ada', 'Bo']\",mine,\"['7', '8']\"\n"
    )
    questions = load_questions(tmp_path / "mine.csv")
    assert [question.golden_answers for question in questions] == [("5",), ("yes",), ("no",), ("Ada", "Bo")]
    assert [question.id for question in questions] == ["1", "2", "mine_3", "4"]
    assert [question.supporting_ids for question in questions] == [("7",), (), ("8",), ("7", "8")]


@pytest.mark.parametrize("name", ["q.json", "q.jsonl", "q.parquet"])
def test_nan_is_missing_in_every_column(tmp_path, name):
    nan = float("nan")
    rows = [
        {"id": 1.0, "question": "who?", "golden_answers": [5.0], "data_source": "mine"},
        {"id": nan, "question": "where?", "golden_answers": [7.0, nan], "data_source": None},
    ]
    questions = load_questions(write_rows(tmp_path / name, *rows))
    assert [question.golden_answers for question in questions] == [("5",), ("7",)]
    assert [(question.id, question.data_source) for question in questions] == [("1", "mine"), ("q_1", "q")]
