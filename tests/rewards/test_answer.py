"""Answer scores: the hand-worked rows, the authors' rows where present, and what no row shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibadv_jax.rewards.answer import cover_em, exact_match, f1, normalise_answer
from calibadv_jax.rewards.format import extract_answer, is_format_valid

LOCAL = Path(__file__).resolve().parents[1] / "golden_local" / "answer_scores.json"


def assert_agrees(row: dict) -> None:
    answer = extract_answer(row["response"])
    golden = row["golden_answers"]
    scores = (0.0, 0.0, 0.0)
    if answer is not None:
        scores = (exact_match(answer, golden), cover_em(answer, golden), f1(answer, golden))
    assert scores == pytest.approx((row["em"], row["cem"], row["f1"]), rel=1e-4, abs=1e-5), row["response"]
    assert is_format_valid(row["response"]) == bool(row["format_valid"]), row["response"]


@pytest.mark.parametrize(
    "row", json.loads(LOCAL.read_text(encoding="utf-8")), ids=lambda row: row["name"].replace(" ", "_")
)
def test_hand_worked(row):
    assert_agrees(row)


def test_authors_values(shared):
    rows = json.loads((shared / "golden" / "answer_scores.json").read_text(encoding="utf-8"))
    assert len(rows) == 64
    for row in rows:
        assert_agrees(row)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  U.S.A. ", "usa"),
        ("a\tman, an ant\nand THE theatre", "man ant and theatre"),
        ("l'été — “99”", "lété — “99”"),  # only ASCII punctuation goes
        ("a-the", "athe"),  # punctuation goes before articles
        ("", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise_answer(text) == expected


@pytest.mark.parametrize("score", [exact_match, cover_em, f1])
def test_no_golden_answers_is_an_error(score):
    with pytest.raises(ValueError, match="golden answers"):
        score("Rome", [])


def test_equal_fractions_are_equal_doubles():
    # 2/3 twice: precision 1/2, recall 1, and the other way round; 0.7 = 2 * 7 / 20 meets the threshold 0.7
    assert f1("rome milan", ["rome"]) == f1("rome", ["rome milan"]) == 2 / 3
    ten = [f"w{index}" for index in range(10)]
    assert f1(" ".join(ten), [" ".join(ten[:7] + ["x", "y", "z"])]) == 0.7
