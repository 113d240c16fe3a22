"""Several files, patterns, names for data sources, and mixtures of them."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from calibadv_jax.config import load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.files import source_of
from calibadv_jax.data.pipeline import QuestionIterator, check_questions
from calibadv_jax.data.questions import load_questions


def write(path, count, **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"id": n, "question": f"q{n}", "golden_answers": ["a"]} | fields for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sources_of(questions):
    return [question.data_source for question in questions]


def test_several_files_are_read_in_the_order_given(tmp_path):
    nq, popqa = write(tmp_path / "nq/train.jsonl", 2), write(tmp_path / "popqa/train.jsonl", 1)
    assert sources_of(load_questions([popqa, nq])) == ["popqa", "nq", "nq"]
    assert sources_of(load_questions(f"{tmp_path}/*/train.jsonl")) == ["nq", "nq", "popqa"]
    assert [question.id for question in load_questions({"mine": nq})] == ["mine_0", "mine_1"]


def test_data_source_of_the_row_wins(tmp_path):
    path = write(tmp_path / "nq/train.jsonl", 1, data_source="theirs")
    assert sources_of(load_questions({"mine": path})) == ["theirs"]


def test_repeated_id_is_named_with_both_places(tmp_path):
    first = write(tmp_path / "a.jsonl", 1, data_source="x")
    second = write(tmp_path / "b.jsonl", 1, data_source="x")
    with pytest.raises(UserError, match=f"{second}:1: id '0' was used before, at {first}:1"):
        load_questions([first, second])


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=a.jsonl", "a.jsonl"),
        ("data.train=2026_11", "2026_11"),
        ("data.train=[a.jsonl, 7]", ["a.jsonl", "7"]),
        ("data.train={nq: a.jsonl}", {"nq": "a.jsonl"}),
        ("data.train=", ""),
    ],
)
def test_data_train_takes_path_list_or_mapping(tmp_path, override, expected):
    (tmp_path / "c.yaml").write_text("data: {train: {mine: x.jsonl}, weights: {mine: 2}}\n")
    config = load_config(tmp_path / "c.yaml", [override, "data.weights={nq: 0.5, mine: 1}"])
    assert config.data.train == expected
    assert config.data.weights == {"nq": 0.5, "mine": 1.0}


def test_weight_must_be_positive(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {weights: {nq: 0}}\n")
    with pytest.raises(UserError, match="data.weights.nq: must be greater than 0"):
        load_config(tmp_path / "c.yaml")


MIXED = [
    Question(f"{source}{n}", "?", ("a",), source)
    for source, size in (("nq", 6), ("hotpotqa", 90))
    for n in range(size)
]
WEIGHTS = {"nq": 3.0, "hotpotqa": 1.0}


@pytest.mark.medium
@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_has_its_shares_everywhere(shuffle):
    drawn = list(islice(QuestionIterator(MIXED, 0, shuffle, WEIGHTS), 400))
    for start in range(0, 400, 40):
        assert Counter(sources_of(drawn[start : start + 40])) == {"nq": 30, "hotpotqa": 10}
    nq = [item.id for item in drawn if item.data_source == "nq"]
    epochs = [nq[start : start + 6] for start in range(0, 300, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs), "a source has epochs of its own"
    assert (len({tuple(epoch) for epoch in epochs}) > 10) == shuffle
    hotpot = [item.id for item in drawn if item.data_source == "hotpotqa"]
    assert len(set(hotpot[:90])) == 90


def test_resumed_mixture_continues_exactly():
    whole = list(islice(QuestionIterator(MIXED, 1, True, WEIGHTS), 100))
    first = QuestionIterator(MIXED, 1, True, WEIGHTS)
    for _ in range(37):
        next(first)
    resumed = QuestionIterator(MIXED, 1, True, WEIGHTS)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert list(islice(resumed, 63)) == whole[37:]
    assert list(islice(QuestionIterator(MIXED, 2, True, WEIGHTS), 100)) != whole


def test_sources_of_one_size_are_not_shuffled_alike():
    questions = [Question(f"{source}{n}", "?", ("a",), source) for source in "ab" for n in range(20)]
    drawn = list(islice(QuestionIterator(questions, 0, True, {"a": 1, "b": 1}), 40))
    orders = [[item.id[1:] for item in drawn if item.data_source == source] for source in "ab"]
    assert orders[0] != orders[1]


def test_question_without_required_prompt_is_refused():
    check_questions(MIXED, {}, "paper")
    carried = [replace(question, prompt=(Message("user", ("x",)),)) for question in MIXED]
    check_questions(carried, WEIGHTS, "from_data")
    with pytest.raises(
        UserError, match="question 'hotpotqa3': prompt.template is 'from_data', but its row has"
    ):
        check_questions([*carried, MIXED[9]], WEIGHTS, "from_data")


@pytest.mark.parametrize("weights", [{"nq": 1.0}, WEIGHTS | {"popqa": 1.0}])
def test_weights_and_data_must_name_the_same_sources(weights):
    with pytest.raises(UserError, match="data.weights names .*nq.*, but data.train holds hotpotqa, nq"):
        QuestionIterator(MIXED, 0, True, weights)
