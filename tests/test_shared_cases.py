"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its
own input, so that a public clone notices the same faults.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from packaging.requirements import Requirement

from calibadv_jax.config import PromptConfig
from calibadv_jax.contrib.commands.prepare_data import prepare
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.questions import load_questions
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.observation import decode, encode
from calibadv_jax.rollout.prompts import open_prompt
from calibadv_jax.run.model import load_tokenizer
from calibadv_jax.snapshots.huggingface import check_weights, read_hf_config
from calibadv_jax.snapshots.peft import load_adapters
from retriever.backends import BuildOptions, IndexOptions
from retriever.corpus.passages import load_corpus
from retriever.corpus.prepare import prepare_corpus
from retriever.errors import RetrieverError
from retriever.indexes.index import build_index, open_index

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


def test_llama_class_over_bytes_loses_nothing(shared):
    """transformers reads it right from 5.22 on; with an older one it is refused."""
    folder, text = shared / "cases/models/r1_distill_llama", "Who wrote it in 1291?\n <think> é 北京 </think>"
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        assert "LlamaTokenizer" in str(error) and "loses spaces" in str(error)
        assert "set tokenizer_class to TokenizersBackend" in str(error)
    else:
        assert decode(tokenizer, encode(tokenizer, text)) == text


def test_qwen3_without_head_dim_has_128(shared):
    folder = shared / "cases/models/qwen3_no_head_dim"
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    architecture = architecture_from_hf(read_hf_config(folder))
    assert architecture.head_dim == 128
    assert "tensors in 1 file(s)" in check_weights(folder, Policy(architecture, Numerics()))


USER = Message("user", ("Question: ", "\n"))


def prompt_of(folder, messages=(USER,), **config):
    question = Question("q", "Who wrote it?", ("Ada",), "test", prompt=messages)
    config = PromptConfig(template="from_data", **config)
    return open_prompt(question, load_tokenizer(folder), config, 4096)


def test_thought_that_template_opens_counts(shared):
    """The score of such a first turn: tests/rewards/test_format.py."""
    folder = shared / "cases/models/qwen3_thinking"
    ids, opening = prompt_of(folder)
    assert opening == "<think>\n"
    assert np.array_equal(prompt_of(folder, prepend_think=True)[0], ids)


def test_template_that_refuses_a_role_is_one_line(shared):
    folder = shared / "cases/models/qwen2_raises"
    assert prompt_of(folder)[1] == ""
    with pytest.raises(UserError, match=f"{folder} fails on messages of the role system and user: .*System"):
        prompt_of(folder, (Message("system", ("You help.",)), USER))


# ---- lora: adapters of PEFT and verl ----


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("pissa", "init_lora_weights is 'pissa', which is not supported"),
        ("with_embedding", "holds base_model.model.model.embed_tokens.weight, which"),
        ("verl_alpha0", "lora_alpha is 0, but must be a number above 0: .* verl"),
    ],
)
def test_adapter_that_is_not_plain_is_refused(shared, case, words):
    folder = shared / "cases/lora"
    adapters = Adapters(4, 8.0, ("q", "v"), "float32")
    architecture = architecture_from_hf(read_hf_config(folder / "base"))
    with pytest.raises(UserError, match=words) as caught:
        load_adapters(folder / case, Policy(architecture, Numerics(), adapters), None)
    assert "\n" not in str(caught.value)


# ---- rows: layouts of question files ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("skyrl", [("Jane Austen",)]),
        ("promptr1", [("Jane Austen",)]),
        ("split", [("Ada Berk", "A. Berk"), ("Rome", "Roma")]),
        ("boolq", [("yes",), ("no",)]),
        ("browsecomp_plus", [("Ada",)]),
        ("nan", [("5",)]),
        ("letters", [("—",)]),
        ("ours", [("5",), ("Ada",), ("Rome",), ("Austen",)]),
        ("ours_nosrc", [("5",), ("Ada",), ("Rome",), ("Austen",)]),
    ],
)
def test_rows_of_peers_are_read_or_dropped(shared, tmp_path, name, expected):
    prepare(shared / f"cases/rows/{name}.jsonl", tmp_path / "out.jsonl")
    questions = load_questions(tmp_path / "out.jsonl")
    assert [question.golden_answers for question in questions] == expected
    assert not any("Think" in question.text or "think" in question.text for question in questions)


# ---- retriever: queries without a hit, indexes with their own ids ----


@pytest.mark.parametrize("name", ["hashed", "bm25"])
def test_queries_match_their_passage_or_nothing(shared, tmp_path, name):
    pytest.importorskip("faiss")
    cases = [("en", "who noticed the mould?", "Penicillin"), ("zh_raw", "北京大学在哪个区？", "北京大学")]
    for file, query, title in cases:
        source = shared / f"cases/retriever/{file}.jsonl"
        prepare_corpus([str(source)], tmp_path / f"{file}.jsonl", progress=False)
        corpus = load_corpus(tmp_path / f"{file}.jsonl")
        build_index(corpus, tmp_path / file, BuildOptions(name), progress=False)
        (hit, *_), *others = open_index(tmp_path / file, corpus).search([query, "zzzz", "", "!!!"], 3)
        assert hit[0]["contents"].startswith(f'"{title}"') and hit[1] > 0
        assert others == [[]] * 3


def test_index_with_ids_from_one_is_refused(shared, monkeypatch):
    pytest.importorskip("faiss")
    folder = shared / "cases/retriever"
    encoder = SimpleNamespace(name="e5", model="m", dimension=384)
    monkeypatch.setattr("retriever.indexes.index.make_encoder", lambda *_: encoder)
    with pytest.raises(RetrieverError, match="its ids are not the row numbers 0 … 4 of the corpus .*id 5"):
        open_index(folder / "idmap_from_one.index", load_corpus(folder / "en.jsonl"), IndexOptions("e5"))


# ---- versions: bounds of dependencies ----


@pytest.mark.parametrize(("python", "allowed"), [("3.11", True), ("3.12", False), ("3.13", False)])
def test_flax_that_jax_breaks_is_excluded(python, allowed):
    """Flax 0.12.8 cannot be imported beside JAX 0.12, which needs Python 3.12."""
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    bounds = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    flax = [bound for bound in map(Requirement, bounds) if bound.name == "flax"]
    places = {"python_version": python, "python_full_version": f"{python}.1"}
    specifiers = [bound.specifier for bound in flax if not bound.marker or bound.marker.evaluate(places)]
    assert ["0.12.8" in specifier for specifier in specifiers] == [allowed]
