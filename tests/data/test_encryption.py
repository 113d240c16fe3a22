"""Benchmarks that are published encrypted: opened with their canary, or refused."""

import base64
import csv
import hashlib
import itertools

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import load_questions

QUESTION = "Which town has the mill that Ada Berk built?"


def encrypted(text, key):
    return base64.b64encode(
        bytes(a ^ b for a, b in zip(text.encode(), itertools.cycle(key), strict=False))
    ).decode()


def by_canary(text, canary):
    return encrypted(text, canary.encode())


def by_hash(text, canary):
    return encrypted(text, hashlib.sha256(canary.encode()).digest())


@pytest.mark.parametrize("encrypt", [by_canary, by_hash])
@pytest.mark.parametrize("space", ["", " ", "\n"])
@pytest.mark.parametrize(
    "keys", [("prompt", "answer"), ("Question", "Answer"), ("problem", "answer"), ("query", "answers")]
)
def test_rows_are_opened_with_the_canary(tmp_path, encrypt, space, keys):
    canary = "plain-words-as-key-7"
    rows = []
    for number, (text, answer) in enumerate([(QUESTION, "Rye"), ("谁建造了磨坊？　第一", "李 雷")]):
        row = {key: encrypt(value, canary) for key, value in zip(keys, (text, answer), strict=True)}
        rows.append({"id": f"abcd{number}"} | row | {"canary": canary + space})
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    first, second = load_questions(tmp_path / "x.csv")
    assert (first.text, first.golden_answers) == (QUESTION, ("Rye",))
    assert (second.text, second.golden_answers) == ("谁建造了磨坊？　第一", ("李 雷",))
    assert [question.id[-5:] for question in (first, second)] == ["abcd0", "abcd1"]


def test_key_that_holds_the_space_opens_too(tmp_path):
    row = {"prompt": by_hash(QUESTION, "key "), "answer": by_hash("Rye", "key "), "canary": "key "}
    assert load_questions(write_rows(tmp_path / "x.jsonl", row))[0].golden_answers == ("Rye",)


def test_plain_rows_with_a_canary_stay(tmp_path):
    row = {"prompt": "Who built it?", "answer": "Adam", "canary": "key"}
    assert load_questions(write_rows(tmp_path / "x.jsonl", row))[0].golden_answers == ("Adam",)


def test_named_columns_are_opened(tmp_path):
    row = {"asked": by_hash(QUESTION, "k"), "gold": [by_hash("Rye", "k")], "canary": "k"}
    (question,) = load_questions(write_rows(tmp_path / "x.jsonl", row), ColumnsConfig("asked", "gold"))
    assert (question.text, question.golden_answers) == (QUESTION, ("Rye",))


@pytest.mark.parametrize("canary", [{}, {"canary": "another key"}])
def test_rows_that_stay_encrypted_are_refused(tmp_path, canary):
    row = {"question": by_hash(QUESTION, "key"), "answer": by_hash("Rye", "key")} | canary
    with pytest.raises(UserError, match="x.jsonl:1: the question is encrypted, or base64 .*'canary'"):
        load_questions(write_rows(tmp_path / "x.jsonl", row))
