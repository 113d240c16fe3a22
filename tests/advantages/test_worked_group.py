"""docs/calibadv.md: every number of its worked group is what the code computes from its first table."""

import re
from pathlib import Path

import pytest

from calibadv_jax.advantages.credit import answer_mass, last_sampled_turn
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.rewards.score import f1

PAGE = Path(__file__).resolve().parents[2] / "docs/calibadv.md"
PAGE_TEXT = PAGE.read_text(encoding="utf-8")
TEXT = " ".join(PAGE_TEXT.split())


def tables(heading):
    """The tables of a section: lists of rows, each a dict by column; cells are text."""
    (section,) = re.findall(rf"(?ms)^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE_TEXT)
    parsed = []
    for block in re.findall(r"(?m)(?:^\|.*\n)+", section):
        head, _, *rows = [
            [cell.strip() for cell in row.strip("|\n").split("|")] for row in block.splitlines()
        ]
        parsed.append([dict(zip(head, row, strict=True)) for row in rows])
    return parsed


(TURNS,) = tables("The group")
(SCORES,) = tables("Step 1: scores")
(GOLDEN,) = re.findall(r'the accepted answer is "([^"]+)"', TEXT)


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


def turn_of(values, row):
    """Of values by trajectory and turn, that of a row of a table."""
    return values[int(row["trajectory"]) - 1][int(row["turn"]) - 1]


def shown(value):
    return f"{value:.2f}".replace("-0.00", "0.00")


def assert_column(rows, name, values):
    assert [row[name] for row in rows] == [
        value if isinstance(value, str) else shown(value) for value in values
    ]


def assert_turns(rows, name, values):
    assert_column(rows, name, [turn_of(values, row) for row in rows])


def places(rows):
    return [(row["trajectory"], row["turn"], row.get("kind", "search")) for row in rows]


def test_page_scores_and_grpo_advantages(credit):
    scores = [trajectory.answer_score for trajectory in credit.group.trajectories]
    assert_column(SCORES, "F1", [f1(row["answer"], (GOLDEN,)) for row in SCORES])
    assert_column(SCORES, "score", scores)
    (rows,) = tables("Step 2: GRPO")
    assert_column(rows, "score", scores)
    assert_column(rows, "advantage", credit.raw)
    assert "The mean is 0.5." in TEXT and "standard deviation is 0.5." in TEXT  # advantages are ±1 and 0


def test_page_silver_documents(credit):
    (rows,) = tables("Step 3: silver documents")
    assert {row["document"] for row in rows} == credit.silver.keys()
    assert_column(rows, "weight", [credit.silver[row["document"]] for row in rows])
    for row in rows:
        seen = [turn["trajectory"] for turn in TURNS if row["document"] in turn["documents"].split()]
        assert row["seen by"] == " ".join(number for number in seen if number in ("1", "2"))  # the best


def test_page_correctness(credit, credit_of):
    rows, variants = tables("Step 4: correctness")
    assert places(rows) == [place for place in places(TURNS) if place[2] == "search"]
    assert_turns(rows, "correctness", credit.correctness)
    assert_turns(rows, "repeats", [[name or "" for name in turns] for turns in credit.repeated])
    found_silver = [[" ".join(names) for names in turns] for turns in credit.found_silver]
    assert_turns(rows, "silver documents found first", found_silver)
    for how in ("fraction", "max", "mean"):
        assert_turns(variants, how, credit_of(correctness=how).correctness)


def test_page_soft_penalty(credit_of):
    softened = credit_of(rebalance=False)
    (rows,) = tables("Step 5: the soft penalty")
    negative = [turn for turn in TURNS if softened.raw[int(turn["trajectory"]) - 1] < 0]
    assert places(rows) == [place for place in places(negative) if place[2] == "search"]
    assert_turns(rows, "GRPO", softened.before)
    assert_turns(rows, "correctness", softened.correctness)
    assert_turns(rows, "after the soft penalty", softened.turns)


def test_page_rebalance(credit, credit_of):
    rows, ratios = tables("Step 6: the rebalance")
    answers = [trajectory.turns[last_sampled_turn(trajectory)] for trajectory in credit.group.trajectories]
    tokens = [len(turn.token_ids) for turn in answers]
    assert_column(rows, "sampled tokens", map(str, tokens))
    assert_column(rows, "advantage", credit.raw)
    assert_column(rows, "advantage × tokens", credit.raw * tokens)
    assert_column(rows, "after the rebalance", credit.answer_advantages())
    positive, negative = answer_mass(credit.group, credit.raw.tolist())
    assert f"The positive mass is {positive:.0f} and the negative mass is {negative:.0f}." in TEXT
    assert f"= {negative:.0f} / {positive:.0f} = {negative / positive:g}." in TEXT
    assert len(ratios) == 4
    for row in ratios:
        rebalanced = credit_of(target_ratio=float(row["λ"]), adjust=row["adjusted side"])
        first, second, _, fourth, fifth = map(shown, rebalanced.answer_advantages())
        assert first == second == row["answers of 1 and 2"] and fourth == fifth == row["answers of 4 and 5"]
        positive, negative = answer_mass(rebalanced.group, rebalanced.answer_advantages())
        assert (row["positive mass"], row["negative mass"]) == (f"{positive:.0f}", f"{negative:.0f}")
        assert row["ratio"] == shown(negative / positive)


def test_page_result(credit_of, credit):
    rows, metrics = tables("The result")
    assert places(rows) == places(TURNS)
    assert_turns(rows, "GRPO", credit_of(name="grpo").turns)
    assert_turns(rows, "CalibAdv", credit.turns)
    values = compute_advantages([credit.group], AdvantageConfig()).metrics
    assert_column(metrics, "value", [values[row["metric"].strip("`")] for row in metrics])
    assert len(metrics) == 5


def test_page_python_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE_TEXT, re.DOTALL)
    printed = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed
