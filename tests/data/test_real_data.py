"""Real questions, written as other trainers have them, and read again."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.config import PromptConfig
from calibadv_jax.contrib.cli.prepare_data import Filters, prepare
from calibadv_jax.core.tokens import decode
from calibadv_jax.data.questions import load_questions
from calibadv_jax.rollout.prompts import open_prompt

PROMPT = (
    "Answer the given question. Reason inside <think> and </think>; search with <search> query </search>; the"
    " results stand between <information> and </information>; answer with <answer> Beijing </answer>."
    " Question: {}\n"
)
SOURCES = {"nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}


@pytest.fixture(scope="module")
def questions(shared):
    return load_questions(shared / "data/wiki_sample/test.jsonl")


def contents(questions):
    return [(question.text, question.golden_answers, question.data_source) for question in questions]


def search_r1_row(number, question):
    answers = list(question.golden_answers)
    return {
        "id": f"test_{number}",
        "question": question.text,
        "golden_answers": answers,
        "data_source": question.data_source,
        "prompt": [{"role": "user", "content": PROMPT.format(question.text)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": "test", "index": number},
        "metadata": None,
    }


@pytest.fixture(scope="module")
def search_r1(questions, tmp_path_factory):
    """The questions in a parquet file as Search-R1's."""
    rows = [search_r1_row(number, question) for number, question in enumerate(questions)]
    path = tmp_path_factory.mktemp("search_r1") / "test.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_of_search_r1_is_read(questions, search_r1):
    loaded = load_questions(search_r1)
    assert contents(loaded) == contents(questions)
    assert {question.data_source for question in loaded} == SOURCES


def test_questions_are_cut_out_of_the_prompts_of_search_r1(questions, search_r1, tmp_path):
    table = pq.read_table(search_r1).drop_columns(["id", "question", "golden_answers"])
    pq.write_table(table, tmp_path / "authors.parquet")
    assert contents(load_questions(tmp_path / "authors.parquet")) == contents(questions)


def test_folders_of_flashrag_are_read(questions, tmp_path):
    for source in SOURCES:
        (tmp_path / source).mkdir()
        of_source = [question for question in questions if question.data_source == source]
        with (tmp_path / source / "test.jsonl").open("w") as file:
            for number, question in enumerate(of_source):
                row = {"id": f"test_{number}", "question": question.text, "metadata": {}}
                file.write(json.dumps(row | {"golden_answers": question.golden_answers}) + "\n")
    loaded = load_questions(f"{tmp_path}/*/test.jsonl")
    assert sorted(contents(loaded)) == sorted(contents(questions))
    assert len({question.id for question in loaded}) == len(questions)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def test_prompt_of_the_data_reaches_the_policy_word_for_word(search_r1):
    tokenizer, config = byte_tokenizer(), PromptConfig(template="from_data")
    for question in load_questions(search_r1):
        ids, _ = open_prompt(question, tokenizer, config, 9999)
        assert decode(tokenizer, ids) == PROMPT.format(question.text)


def test_train_and_test_questions_do_not_overlap(shared, search_r1, tmp_path):
    train = shared / "data/wiki_sample/train.jsonl"
    report = prepare(str(train), tmp_path / "train.jsonl", Filters(excluded=[str(search_r1)]))
    assert report.rows()[-1] == ["all", 3819, 3819]


def test_overlap_with_test_questions_is_found(shared, search_r1, tmp_path):
    train = shared / "data/wiki_sample/train.jsonl"
    excluded = Filters(excluded=str(search_r1))
    report = prepare([str(train), str(search_r1)], tmp_path / "both.jsonl", excluded)
    assert report.outcomes[2:] == ["overlap"]
    assert report.rows()[-1] == ["all", 3819 + 647, 3819, 647]
    assert len(load_questions(tmp_path / "both.jsonl")) == 3819
