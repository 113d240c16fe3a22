"""docs/calibadv.md: every number of its worked group is what the code computes from its first table."""

import re
from pathlib import Path

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


def test_page_shows_computed_numbers(credit_of):
    credit, softened = credit_of(), credit_of(rebalance=False)
    trajectories = credit.group.trajectories
    scores = [trajectory.answer_score for trajectory in trajectories]
    assert_columns(SCORES, {"F1": [f1(row["answer"], (GOLDEN,)) for row in SCORES], "score": scores})
    (advantages,), (silver,) = tables("Step 2: GRPO"), tables("Step 3: silver documents")
    assert_columns(advantages, {"score": scores, "advantage": credit.raw})
    assert {row["document"]: float(row["weight"]) for row in silver} == credit.silver

    searches, variants = tables("Step 4: correctness")
    columns = {"correctness": credit.correctness}
    columns["repeats"] = [[name or "" for name in turns] for turns in credit.repeated]
    columns["silver documents found first"] = [
        [" ".join(ids) for ids in turns] for turns in credit.found_silver
    ]
    assert_turns(searches, columns)
    assert_turns(
        variants, {how: credit_of(correctness=how).correctness for how in ("fraction", "max", "mean")}
    )
    (penalty,) = tables("Step 5: the soft penalty")
    columns = {"GRPO": softened.before, "correctness": softened.correctness}
    assert_turns(penalty, columns | {"after the soft penalty": softened.turns})

    answers, ratios = tables("Step 6: the rebalance")
    tokens = [len(trajectory.turns[last_sampled_turn(trajectory)].token_ids) for trajectory in trajectories]
    columns = {"sampled tokens": map(str, tokens), "advantage": credit.raw}
    columns |= {"advantage × tokens": credit.raw * tokens, "after the rebalance": credit.answer_advantages()}
    assert_columns(answers, columns)
    for row in ratios:
        rebalanced = credit_of(target_ratio=float(row["λ"]), adjust=row["adjusted side"])
        advantages = rebalanced.answer_advantages()
        positive, negative = answer_turn_sums(rebalanced.group, advantages)
        columns = {"answers of 1 and 2": [advantages[0]], "answers of 4 and 5": [advantages[3]]}
        columns |= {"positive mass": [f"{positive:.0f}"], "negative mass": [f"{negative:.0f}"]}
        assert_columns([row], columns | {"ratio": [negative / positive]})

    result, metrics = tables("The result")
    assert_turns(result, {"GRPO": credit_of(name="grpo").turns, "CalibAdv": credit.turns})
    values = compute_advantages([credit.group], AdvantageConfig()).metrics
    assert_columns(metrics, {"value": [values[row["metric"].strip("`")] for row in metrics]})


def test_page_python_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    printed = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed
