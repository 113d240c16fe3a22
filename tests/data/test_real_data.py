"""Real questions, written as other trainers have them, and read again."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibadv_jax.contrib.commands.prepare_data import Filters, prepare
from calibadv_jax.data.questions import load_questions

PROMPT = (
    "Answer the given question. Reason inside <think> and </think>; search with <search> query </search>; the"
    " results stand between <information> and </information>; answer with <answer> Beijing </answer>."
    " Question: {}\n"
)
SOURCES = {"nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}


@pytest.fixture(scope="module")
def questions(shared):
    return load_questions(shared / "data/wiki_sample/test.jsonl")


def plain(question):
    return question.text, question.golden_answers, question.data_source


@pytest.fixture(scope="module")
def searchr1(questions, tmp_path_factory):
    rows = [
        {
            "id": f"test_{number}",
            "question": question.text,
            "golden_answers": list(question.golden_answers),
            "data_source": question.data_source,
            "prompt": [{"role": "user", "content": PROMPT.format(question.text)}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
            "extra_info": {"split": "test", "index": number},
            "metadata": None,
        }
        for number, question in enumerate(questions)
    ]
    path = tmp_path_factory.mktemp("searchr1") / "test.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.medium
def test_as_search_r1_has_them(questions, searchr1, tmp_path):
    result = load_questions(searchr1)
    assert [plain(item) for item in result] == [plain(question) for question in questions]
    assert {item.data_source for item in result} == SOURCES
    rows = pq.read_table(searchr1).to_pylist()
    bare = [
        {name: row[name] for name in row if name not in ("id", "question", "golden_answers")} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(bare), tmp_path / "authors.parquet")
    again = load_questions(tmp_path / "authors.parquet")
    assert [plain(item) for item in again] == [plain(question) for question in questions], (
        "out of the prompts"
    )


def test_overlap_of_train_and_test_is_detected(shared, searchr1, tmp_path):
    train = shared / "data/wiki_sample/train.jsonl"
    report = prepare(str(train), tmp_path / "train.jsonl", Filters(excluded=[str(searchr1)]))
    assert report.rows()[-1] == ["all", 3819, 3819]
    report = prepare([str(train), str(searchr1)], tmp_path / "both.jsonl", Filters(excluded=str(searchr1)))
    assert report.dropped.total() == 647 and report.reasons == ["overlap"]
    assert len(load_questions(tmp_path / "both.jsonl")) == 3819
