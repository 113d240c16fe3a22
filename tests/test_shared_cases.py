"""Inputs made from public reports (``../shared/cases``) whose readers depend on versions.

Skipped where the folder is absent. Every case of that folder has a test beside the module that it concerns.
"""

from __future__ import annotations

import pytest

from calibadv_jax.contrib.cli.prepare_data import prepare
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tokens import decode, encode
from calibadv_jax.data.questions import load_questions
from calibadv_jax.run.model import load_tokenizer


def test_llama_class_over_bytes_loses_nothing(shared):
    """transformers reads it right from 5.22 on; with an older one it is refused."""
    folder, text = shared / "cases/models/r1_distill_llama", "Who wrote it in 1291?\n <think> é 北京 </think>"
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        assert "LlamaTokenizer" in str(error) and "loses text" in str(error)
        assert "set tokenizer_class to TokenizersBackend" in str(error)
    else:
        assert decode(tokenizer, encode(tokenizer, text)) == text


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
    assert not any("think" in question.text.lower() for question in questions)
