"""Tables whose cells hold lists of answers."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
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
def test_list_in_a_table_cell_is_parsed(tmp_path, column, separator):
    """JSON's, Python's or numpy's; what only looks like one is a text, and is never run."""
    text = io.StringIO()
    table = csv.writer(text, delimiter=separator)
    table.writerow(["Question" if column == "Answer" else "question", column])
    table.writerows([f"['who'] {n}", written] for n, written in enumerate(LISTED))
    (tmp_path / "mine.csv").write_text(text.getvalue())
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


@pytest.mark.parametrize(
    "cell",
    [
        "['Ada', Bo]",
        '["Ada", "Bo"',
        "[{'text': 'Ada'}]",
        "{'text': 'Ada'}",
        "['Ada', b'Bo']",
        "[ 'Ada', ['Bo']]",
    ],
)
def test_broken_list_in_a_table_is_refused(tmp_path, cell):
    text = io.StringIO()
    csv.writer(text).writerows([["question", "answer"], ["who?", "Ada"], ["what?", cell]])
    (tmp_path / "mine.csv").write_text(text.getvalue())
    with pytest.raises(UserError, match=r"mine.csv:3: key 'answer' begins as a list, but is none: .*write"):
        load_questions(tmp_path / "mine.csv")


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
        (tmp_path / name).write_text(json.dumps(content) + "\n")
        assert load_questions(tmp_path / name)[0].golden_answers == expected


def test_table_has_the_booleans_and_numbers_of_pandas(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "id,question,golden_answers,data_source,supporting_ids\n"
        "1.0,who?,5.0,mine,7.0\n2.0,is it?,True,mine,\n3.0,is it not?,FALSE,,8.0\n"
    )
    questions = load_questions(tmp_path / "mine.csv")
    assert [question.golden_answers for question in questions] == [("5",), ("yes",), ("no",)]
    assert [question.id for question in questions] == ["1", "2", "mine_3"]
    assert [question.supporting_ids for question in questions] == [("7",), (), ("8",)]


@pytest.mark.parametrize("name", ["q.json", "q.jsonl", "q.parquet"])
def test_nan_is_missing_in_every_column(tmp_path, name):
    nan = float("nan")
    rows = [
        {"id": 1.0, "question": "who?", "golden_answers": [5.0], "data_source": "mine"},
        {"id": nan, "question": "where?", "golden_answers": [7.0, nan], "data_source": None},
    ]
    if name == "q.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        text = json.dumps(rows) if name == "q.json" else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(text)
    questions = load_questions(tmp_path / name)
    assert [question.golden_answers for question in questions] == [("5",), ("7",)]
    assert [(question.id, question.data_source) for question in questions] == [("1", "mine"), ("q_1", "q")]
