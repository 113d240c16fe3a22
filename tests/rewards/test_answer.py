"""Answer scores: the hand-worked rows, the authors' rows where present, and what no row shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replay import replay

from calibadv_jax.config import RewardConfig
from calibadv_jax.rewards.score import f1, normalise_answer, score_trajectory

LOCAL = Path(__file__).resolve().parents[1] / "golden_local" / "answer_scores.json"


# Rows of the authors' values that we score otherwise, on purpose: docs/differences.md.
DIFFERENT = {
    34: (0, 0, 0.0, False),  # an answer with a protocol tag in it is an invalid turn
    47: (0, 0, 0.0, False),
    35: (0, 0, 0.0, False),  # sampling stops at the first answer; theirs scores the last one
    36: (0, 0, 0.0, False),
    37: (1, 1, 1.0, False),
    40: (0, 0, 0.0, False),  # an invalid turn and what the environment says to it: not the policy's words
    38: (0, 0, 0.0, False),  # a retrieved document cannot answer
    39: (1, 1, 1.0, True),  # nor spoil the format
}


def scores(row: dict) -> tuple[float, float, float, bool]:
    """em, cover_em, f1 and format validity, through the functions that training uses."""
    trajectory = score_trajectory(replay(row["response"], row["golden_answers"]), RewardConfig())
    metrics = trajectory.metrics
    assert trajectory.answer_score == (metrics["f1"] if trajectory.format_valid else 0.0)
    return metrics["em"], metrics["cover_em"], metrics["f1"], trajectory.format_valid


def golden(row: dict) -> tuple[float, float, float, bool]:
    return row["em"], row["cem"], row["f1"], bool(row["format_valid"])


@pytest.mark.parametrize(
    "row", json.loads(LOCAL.read_text(encoding="utf-8")), ids=lambda row: row["name"].replace(" ", "_")
)
def test_hand_worked(row):
    assert scores(row) == pytest.approx(golden(row), rel=1e-4, abs=1e-5)


def test_authors_values(shared):
    rows = json.loads((shared / "golden" / "answer_scores.json").read_text(encoding="utf-8"))
    assert len(rows) == 64
    for number, row in enumerate(rows):
        if number in DIFFERENT:
            assert golden(row) != DIFFERENT[number] == scores(row), row["response"]
        else:
            assert scores(row) == pytest.approx(golden(row), rel=1e-4, abs=1e-5), row["response"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  U.S.A. ", "usa"),
        ("a\tman, an ant\nand THE theatre", "man ant and theatre"),
        ("l'été — “99”", "lété — “99”"),  # only ASCII punctuation goes
        ("a-the", "athe"),  # punctuation goes before articles
        ("North–the–South of a  Sea", "north– –south of sea"),  # a gap where no space stands, as in SQuAD
        ("", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise_answer(text) == expected


def test_equal_fractions_are_equal_doubles():
    # 2/3 twice: precision 1/2, recall 1, and the other way round; 0.7 = 2 * 7 / 20 meets the threshold 0.7
    assert f1("rome milan", ["rome"]) == f1("rome", ["rome milan"]) == 2 / 3
    ten = [f"w{index}" for index in range(10)]
    assert f1(" ".join(ten), [" ".join(ten[:7] + ["x", "y", "z"])]) == 0.7


def test_repeated_word_counts_on_both_sides():
    """By hand: common words over the mean of both numbers of words."""
    assert f1("new new york", ["new new york"]) == 1.0
    assert f1("new new york", ["new york"]) == 2 * 2 / (3 + 2)  # one "new" has nothing to match
    assert f1("new york", ["new new york city"]) == 2 * 2 / (2 + 4)
    assert f1("bora bora", ["bora bora island"]) == 2 * 2 / (2 + 3)
    assert f1("yes yes yes yes", ["yes"]) == 2 * 1 / (4 + 1)
