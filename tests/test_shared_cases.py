"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its
own input, so that a public clone notices the same faults.
"""

from __future__ import annotations

import pytest

from calibadv_jax.data.prepare import prepare
from calibadv_jax.data.questions import load_questions
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots.huggingface import read_hf_config
from calibadv_jax.snapshots.peft import load_adapters

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


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


@pytest.mark.parametrize(("python", "allowed"), [("3.11", True), ("3.12", False), ("3.13", False)])
def test_flax_that_jax_breaks_is_excluded(python, allowed):
    """Flax 0.12.8 cannot be imported beside JAX 0.12, which needs Python 3.12."""
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    bounds = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    flax = [bound for bound in map(Requirement, bounds) if bound.name == "flax"]
    places = {"python_version": python, "python_full_version": f"{python}.1"}
    specifiers = [bound.specifier for bound in flax if not bound.marker or bound.marker.evaluate(places)]
    assert ["0.12.8" in specifier for specifier in specifiers] == [allowed]
