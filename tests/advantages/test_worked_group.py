"""docs/calibadv.md: every number of its worked group is what the code computes from its first table."""

import re
from pathlib import Path

import numpy as np
import pytest

from calibadv_jax.advantages.credit import answer_turn_sums, last_sampled_turn
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
(GOLDEN,) = re.findall(r'the accepted\s+answer is "([^"]+)"', TEXT)


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


def assert_columns(rows, columns):
    for name, values in columns.items():
        shown = [value if isinstance(value, str) else f"{value:.2f}" for value in values]
        assert [row[name] for row in rows] == [cell.replace("-0.00", "0.00") for cell in shown], name


def assert_turns(rows, columns):
    """Columns of values by trajectory and turn, of which a table may show some."""
    places = [(int(row["trajectory"]) - 1, int(row["turn"]) - 1) for row in rows]
    by_row = {name: [values[index][turn] for index, turn in places] for name, values in columns.items()}
    assert_columns(rows, by_row)


@pytest.fixture(scope="module")
def credit(credit_of):
    return credit_of()


def places(rows):
    return [(row["trajectory"], row["turn"]) for row in rows]


def answer_tokens(credit):
    trajectories = credit.group.trajectories
    return [len(trajectory.turns[last_sampled_turn(trajectory)].token_ids) for trajectory in trajectories]


def test_page_scores(credit):
    scores = [trajectory.answer_score for trajectory in credit.group.trajectories]
    assert_columns(SCORES, {"F1": [f1(row["answer"], (GOLDEN,)) for row in SCORES], "score": scores})


def test_page_statistics_and_advantages_of_grpo(credit):
    scores = np.array([trajectory.answer_score for trajectory in credit.group.trajectories])
    text = " ".join(TEXT.split())
    assert f"The mean is {scores.mean():g}." in text
    assert f"the standard deviation is {scores.std(ddof=1):g}." in text
    (advantages,) = tables("Step 2: GRPO")
    assert_columns(advantages, {"score": scores, "advantage": credit.raw})


def test_page_silver_documents(credit):
    (silver,) = tables("Step 3: silver documents")
    assert {row["document"]: float(row["weight"]) for row in silver} == credit.silver
    best = ("1", "2")  # as the page says
    for row in silver:
        seen_by = []
        for turn in TURNS:
            if row["document"] in turn["documents"].split() and turn["trajectory"] in best:
                seen_by.append(turn["trajectory"])
        assert row["seen by"] == " ".join(seen_by)


def test_page_correctness_of_every_search(credit):
    searches, _ = tables("Step 4: correctness")
    assert places(searches) == places([turn for turn in TURNS if turn["kind"] == "search"])
    columns = {"correctness": credit.correctness}
    columns["repeats"] = [[name or "" for name in turns] for turns in credit.repeated]
    columns["silver documents found first"] = [
        [" ".join(ids) for ids in turns] for turns in credit.found_silver
    ]
    assert_turns(searches, columns)


def test_page_variants_of_correctness(credit_of):
    _, variants = tables("Step 4: correctness")
    names = ("fraction", "max", "mean")
    assert_turns(variants, {name: credit_of(correctness=name).correctness for name in names})


def test_page_soft_penalty_shows_every_negative_search(credit_of):
    softened = credit_of(rebalance=False)
    (penalty,) = tables("Step 5: the soft penalty")
    negative = []
    for turn in TURNS:
        if turn["kind"] == "search" and softened.raw[int(turn["trajectory"]) - 1] < 0:
            negative.append(turn)
    assert places(penalty) == places(negative)
    columns = {"GRPO": softened.before, "correctness": softened.correctness}
    assert_turns(penalty, columns | {"after the soft penalty": softened.turns})


def test_page_answer_turns_and_their_masses(credit):
    answers, _ = tables("Step 6: the rebalance")
    tokens = answer_tokens(credit)
    columns = {"sampled tokens": map(str, tokens), "advantage": credit.raw}
    columns |= {"advantage × tokens": credit.raw * tokens, "after the rebalance": credit.answer_advantages()}
    assert_columns(answers, columns)
    positive, negative = answer_turn_sums(credit.group, credit.raw.tolist())
    assert f"The positive mass is {positive:.0f} and the negative mass is {negative:.0f}." in TEXT
    assert f"= {negative:.0f} / {positive:.0f} = {negative / positive:g}." in TEXT


def test_page_rebalance_by_ratio_and_side(credit_of):
    _, ratios = tables("Step 6: the rebalance")
    assert len(ratios) == 4
    for row in ratios:
        rebalanced = credit_of(target_ratio=float(row["λ"]), adjust=row["adjusted side"])
        advantages = rebalanced.answer_advantages()
        positive, negative = answer_turn_sums(rebalanced.group, advantages)
        for index in (0, 1):
            assert_columns([row], {"answers of 1 and 2": [advantages[index]]})
        for index in (3, 4):
            assert_columns([row], {"answers of 4 and 5": [advantages[index]]})
        columns = {"positive mass": [f"{positive:.0f}"], "negative mass": [f"{negative:.0f}"]}
        assert_columns([row], columns | {"ratio": [negative / positive]})


def test_page_result_shows_every_turn(credit_of, credit):
    result, _ = tables("The result")
    assert places(result) == places(TURNS)
    assert [row["kind"] for row in result] == [turn["kind"] for turn in TURNS]
    assert_turns(result, {"GRPO": credit_of(name="grpo").turns, "CalibAdv": credit.turns})


def test_page_metrics(credit):
    _, metrics = tables("The result")
    assert len(metrics) == 5
    values = compute_advantages([credit.group], AdvantageConfig()).metrics
    assert_columns(metrics, {"value": [values[row["metric"].strip("`")] for row in metrics]})


def test_page_python_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    printed = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed
