"""Real questions, written as other trainers have them, and read again."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.config import PromptConfig
from calibadv_jax.contrib.commands.prepare_data import Filters, prepare
from calibadv_jax.data.questions import load_questions
from calibadv_jax.rollout.observation import decode
from calibadv_jax.rollout.prompts import build_prompt

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
    found = load_questions(searchr1)
    assert [plain(one) for one in found] == [plain(one) for one in questions]
    assert {one.data_source for one in found} == SOURCES
    rows = pq.read_table(searchr1).to_pylist()
    bare = [
        {name: row[name] for name in row if name not in ("id", "question", "golden_answers")} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(bare), tmp_path / "authors.parquet")
    again = load_questions(tmp_path / "authors.parquet")
    assert [plain(one) for one in again] == [plain(one) for one in questions], "out of the prompts"


def test_as_flashrag_has_them(questions, tmp_path):
    for source in SOURCES:
        (tmp_path / source).mkdir()
        with (tmp_path / source / "test.jsonl").open("w") as file:
            for number, one in enumerate(q for q in questions if q.data_source == source):
                row = {"id": f"test_{number}", "question": one.text, "golden_answers": one.golden_answers}
                file.write(json.dumps(row | {"metadata": {}}) + "\n")
    found = load_questions(f"{tmp_path}/*/test.jsonl")
    assert sorted(map(plain, found)) == sorted(map(plain, questions))
    assert len({one.id for one in found}) == len(questions)


def test_their_own_prompt_is_given_to_the_policy_word_for_word(searchr1):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    config = PromptConfig(template="from_data")
    for question in load_questions(searchr1):
        ids = build_prompt(question, tokenizer, config, 9999)
        assert decode(tokenizer, ids) == PROMPT.format(question.text)


def test_train_and_test_do_not_overlap_and_an_overlap_is_found(shared, searchr1, tmp_path):
    train = shared / "data/wiki_sample/train.jsonl"
    report = prepare(str(train), tmp_path / "train.jsonl", Filters(excluded=[str(searchr1)]))
    assert report.rows()[-1] == ["all", 3819, 3819]
    report = prepare([str(train), str(searchr1)], tmp_path / "both.jsonl", Filters(excluded=str(searchr1)))
    assert report.dropped.total() == 647 and report.reasons == ["overlap"]
    assert len(load_questions(tmp_path / "both.jsonl")) == 3819
