"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its
own input, so that a public clone notices the same faults.
"""

from __future__ import annotations

import pytest

from calibadv_jax.data.prepare import prepare
from calibadv_jax.data.questions import load_questions

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


# ---- lora: adapters of PEFT and verl ----


# ---- rows: layouts of question files ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("skyrl", [("who wrote Emma?", ("Jane Austen",))]),
        ("promptr1", [("Who wrote Emma?", ("Jane Austen",))]),
        (
            "split",
            [("Who painted the harbour?", ("Ada Berk", "A. Berk")), ("Capital of Italy?", ("Rome", "Roma"))],
        ),
        ("boolq", [("is the mill in rome", ("yes",)), ("is the harbour old", ("no",))]),
        ("browsecomp_plus", [("who painted it?", ("Ada",))]),
    ],
)
def test_rows_of_peers_are_read(shared, name, expected):
    questions = load_questions(shared / f"cases/rows/{name}.jsonl")
    assert [(question.text, question.golden_answers) for question in questions] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nan", [("5",)]),
        ("letters", [("—",)]),
        ("ours", [("5",), ("Ada",), ("Rome",), ("Austen",)]),
        ("ours_nosrc", [("5",), ("Ada",), ("Rome",), ("Austen",)]),
    ],
)
def test_rows_without_possible_answer_are_dropped(shared, tmp_path, name, expected):
    prepare(shared / f"cases/rows/{name}.jsonl", tmp_path / "out.jsonl")
    questions = load_questions(tmp_path / "out.jsonl")
    assert [question.golden_answers for question in questions] == expected


# ---- retriever: queries without a hit, indexes with their own ids ----


# ---- metrics: names with a slash ----


# ---- versions: bounds of dependencies ----
