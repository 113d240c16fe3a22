"""docs/calibadv.md: every number of its worked group is what the code computes from its first table."""

import re
from pathlib import Path

import numpy as np
import pytest

from calibadv_jax.advantages.credit import answer_mass, last_sampled_turn
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.rewards.score import f1

PAGE = Path(__file__).resolve().parents[2] / "docs/calibadv.md"
TEXT = PAGE.read_text(encoding="utf-8")


def tables(heading):
    """The tables of a section: lists of rows, each a dict by column; cells are text."""
    (section,) = re.findall(rf"(?ms)^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT)
    parsed = []
    for block in re.findall(r"(?m)(?:^\|.*\n)+", section):
        head, _, *rows = [
            [cell.strip() for cell in row.strip("|\n").split("|")] for row in block.splitlines()
        ]
        parsed.append([dict(zip(head, row, strict=True)) for row in rows])
    return parsed


(TURNS,) = tables("The group")
(SCORES,) = tables("Step 1: scores")
(GOLDEN,) = re.findall(r'the accepted answer is "([^"]+)"', " ".join(TEXT.split()))


@pytest.fixture(scope="module")
def credit_of(build):
    """The credit of the first table's group, with the scores of the code, under settings of the advantage."""
    members = []
    for row in SCORES:
        turns = [
            build.turn(turn["kind"], turn["thought"], turn["documents"].split(), int(turn["sampled tokens"]))
            for turn in TURNS
            if turn["trajectory"] == row["trajectory"]
        ]
        is_valid = row["format"] == "1"
        members.append((f1(row["answer"], (GOLDEN,)) * is_valid, is_valid, turns))
    group = build.group(*members)
    return lambda **settings: compute_advantages([group], AdvantageConfig(**settings)).credits[0]


@pytest.fixture(scope="module")
def credit(credit_of):
    return credit_of()


def cell(values, row):
    """Of values by trajectory and turn, that of a row of a table."""
    return values[int(row["trajectory"]) - 1][int(row["turn"]) - 1]


def shown(value):
    return f"{value:.2f}".replace("-0.00", "0.00")


def test_page_scores(credit):
    for row, trajectory in zip(SCORES, credit.group.trajectories, strict=True):
        assert row["F1"] == shown(f1(row["answer"], (GOLDEN,)))
        assert row["score"] == shown(trajectory.answer_score)


def test_page_grpo_advantages(credit):
    scores = np.array([trajectory.answer_score for trajectory in credit.group.trajectories])
    text = " ".join(TEXT.split())
    assert f"The mean is {scores.mean():g}." in text
    assert f"standard deviation is {scores.std(ddof=1):g}." in text
    (rows,) = tables("Step 2: GRPO")
    assert [row["score"] for row in rows] == [shown(score) for score in scores]
    assert [row["advantage"] for row in rows] == [shown(value) for value in credit.raw]


def test_page_silver_documents(credit):
    (rows,) = tables("Step 3: silver documents")
    assert {row["document"]: row["weight"] for row in rows} == {
        document: shown(weight) for document, weight in credit.silver.items()
    }
    best = ("1", "2")  # as the page says
    for row in rows:
        seen = [turn["trajectory"] for turn in TURNS if row["document"] in turn["documents"].split()]
        assert row["seen by"] == " ".join(number for number in seen if number in best)


def test_page_correctness(credit):
    rows, _ = tables("Step 4: correctness")
    searches = [(turn["trajectory"], turn["turn"]) for turn in TURNS if turn["kind"] == "search"]
    assert [(row["trajectory"], row["turn"]) for row in rows] == searches
    for row in rows:
        assert row["correctness"] == shown(cell(credit.correctness, row))
        assert row["repeats"] == (cell(credit.repeated, row) or "")
        assert row["silver documents found first"] == " ".join(cell(credit.found_silver, row))


@pytest.mark.parametrize("how", ["fraction", "max", "mean"])
def test_page_correctness_variants(credit_of, how):
    _, rows = tables("Step 4: correctness")
    correctness = credit_of(correctness=how).correctness
    assert [row[how] for row in rows] == [shown(cell(correctness, row)) for row in rows]


def test_page_soft_penalty(credit_of):
    softened = credit_of(rebalance=False)
    (rows,) = tables("Step 5: the soft penalty")
    negative_turns = [
        turn for turn in TURNS if turn["kind"] == "search" and softened.raw[int(turn["trajectory"]) - 1] < 0
    ]
    assert [(turn["trajectory"], turn["turn"]) for turn in negative_turns] == [
        (row["trajectory"], row["turn"]) for row in rows
    ]
    for row in rows:
        assert row["GRPO"] == shown(softened.raw[int(row["trajectory"]) - 1])
        assert row["correctness"] == shown(cell(softened.correctness, row))
        assert row["after the soft penalty"] == shown(cell(softened.turns, row))


def test_page_answer_mass(credit):
    rows, _ = tables("Step 6: the rebalance")
    after = credit.answer_advantages()
    for row, trajectory, raw, value in zip(rows, credit.group.trajectories, credit.raw, after, strict=True):
        tokens = len(trajectory.turns[last_sampled_turn(trajectory)].token_ids)
        assert int(row["sampled tokens"]) == tokens
        assert row["advantage"] == shown(raw)
        assert row["advantage × tokens"] == shown(raw * tokens)
        assert row["after the rebalance"] == shown(value)
    positive, negative = answer_mass(credit.group, credit.raw.tolist())
    text = " ".join(TEXT.split())
    assert f"The positive mass is {positive:.0f} and the negative mass is {negative:.0f}." in text
    assert f"= {negative:.0f} / {positive:.0f} = {negative / positive:g}." in text


def test_page_rebalance(credit_of):
    _, rows = tables("Step 6: the rebalance")
    assert len(rows) == 4
    for row in rows:
        rebalanced = credit_of(target_ratio=float(row["λ"]), adjust=row["adjusted side"])
        first, two, _, four, five = map(shown, rebalanced.answer_advantages())
        assert first == two == row["answers of 1 and 2"]
        assert four == five == row["answers of 4 and 5"]
        positive, negative = answer_mass(rebalanced.group, rebalanced.answer_advantages())
        assert (row["positive mass"], row["negative mass"]) == (f"{positive:.0f}", f"{negative:.0f}")
        assert row["ratio"] == shown(negative / positive)


def test_page_result(credit_of, credit):
    rows, metrics = tables("The result")
    assert [(row["trajectory"], row["turn"], row["kind"]) for row in rows] == [
        (turn["trajectory"], turn["turn"], turn["kind"]) for turn in TURNS
    ]
    assert [row["GRPO"] for row in rows] == [shown(cell(credit_of(name="grpo").turns, row)) for row in rows]
    assert [row["CalibAdv"] for row in rows] == [shown(cell(credit.turns, row)) for row in rows]
    values = compute_advantages([credit.group], AdvantageConfig()).metrics
    assert [row["value"] for row in metrics] == [shown(values[row["metric"].strip("`")]) for row in metrics]
    assert len(metrics) == 5


def test_page_python_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    printed = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed
