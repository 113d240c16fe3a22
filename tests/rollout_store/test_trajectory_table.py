"""The table of trajectories that services show."""

import json
from dataclasses import replace

import numpy as np

from benchmarks.generated_run import make_group, make_tokenizer
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig, Config
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.trajectory_table import COLUMNS, MAX_ROWS, MAX_TRANSCRIPT, trajectory_table


def scored_groups(number):
    tokenizer = make_tokenizer()
    groups = [make_group(tokenizer, index, np.random.default_rng(index)) for index in range(number)]
    return score_groups(groups, Config().reward, np.random.default_rng(0))


def table_of(groups):
    """Rows as dicts."""
    credits = compute_advantages(groups, AdvantageConfig()).credits
    rows = trajectory_table(7, groups, credits)
    json.dumps(rows, allow_nan=False)  # plain types
    return credits, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def test_row_shows_question_answer_and_credit():
    groups = scored_groups(2)
    credits, rows = table_of(groups)
    trajectory = groups[1].attempts[2]
    place = [each.index for each in groups[1].trajectories].index(2)
    row = rows[len(groups[0].attempts) + 2]
    assert (row["step"], row["group"], row["trajectory"]) == (7, 1, 2)
    assert row["question"] == trajectory.question.text and row["answer"] == trajectory.answer
    assert row["accepted answers"] == trajectory.question.golden_answers[0]
    assert row["searches"] == trajectory.num_searches == len(row["queries"].splitlines())
    assert row["advantage"] == round(credits[1].raw[place], 4)
    shown = [float(text.split(" -> ")[-1]) for text in row["advantage of each turn"].split(", ")]
    np.testing.assert_allclose(shown, credits[1].turns[place], atol=6e-4)
    assert row["softened turns"] == sum(credits[1].softened[place])
    assert row["transcript"].startswith(trajectory.turns[0].text)
    assert max(len(each["transcript"]) for each in rows) <= MAX_TRANSCRIPT


def test_estimator_that_softens_nothing_has_no_softened_turns():
    groups = scored_groups(1)
    credits = compute_advantages(groups, AdvantageConfig(name="grpo")).credits
    rows = trajectory_table(7, groups, [replace(credit, softened=[]) for credit in credits])
    assert {row[COLUMNS.index("softened turns")] for row in rows} == {0}


def test_failed_trajectory_has_an_error_and_no_credit():
    groups = scored_groups(1)
    failed = groups[0].trajectories.pop()
    failed.error = "retriever: gone"
    groups[0].failed.append(failed)
    _, rows = table_of(groups)
    (row,) = [row for row in rows if row["error"]]
    assert (row["error"], row["advantage"], row["advantage of each turn"]) == ("retriever: gone", None, "")


def test_table_holds_whole_groups():
    groups = scored_groups(20)
    _, rows = table_of(groups)
    sizes = np.cumsum([len(group.attempts) for group in groups])
    assert len(rows) in sizes and MAX_ROWS - 5 < len(rows) <= MAX_ROWS
