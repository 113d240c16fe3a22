"""A table of a step's trajectories, for services that show metrics: Weights & Biases, MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.core.trajectory import Group, Trajectory

MAX_ROWS = 64  # of a table, which holds whole groups
MAX_TRANSCRIPT = 4000  # letters of a trajectory's text
COLUMNS = (
    "step",
    "group",
    "trajectory",
    "source",
    "question",
    "accepted answers",
    "answer",
    "score",
    "valid format",
    "searches",
    "queries",
    "advantage",
    "advantage of each turn",
    "softened turns",
    "error",
    "transcript",
)

TableRow = list[Any]  # a value for each of COLUMNS: texts, numbers, booleans or None


def trajectory_table(step: int, groups: Sequence[Group], credits: Sequence[GroupCredit]) -> list[TableRow]:
    """Return rows for the first groups of a step, at most MAX_ROWS trajectories unless one group has more.

    Args:
        step: number of the step.
        groups: scored groups.
        credits: credit of the finished trajectories of each group.
    """
    rows: list[TableRow] = []
    for number, (group, credit) in enumerate(zip(groups, credits, strict=True)):
        if rows and len(rows) + len(group.attempts) > MAX_ROWS:
            break
        places = {id(trajectory): place for place, trajectory in enumerate(group.trajectories)}
        for trajectory in group.attempts:
            rows.append(_row(step, number, trajectory, credit, places.get(id(trajectory))))
    return rows


def _row(step: int, group: int, trajectory: Trajectory, credit: GroupCredit, place: int | None) -> TableRow:
    """Return the row of a trajectory; `place`: its place in the credit, None if it has failed."""
    question = trajectory.question
    advantage = None
    changes = ""
    num_softened = 0
    if place is not None:
        advantage = round(float(credit.raw[place]), 4)
        changes = _changes(credit.before[place], credit.turns[place])
        num_softened = int(np.sum(credit.softened[place])) if credit.softened else 0
    return [
        step,
        group,
        trajectory.index,
        question.data_source,
        question.text,
        " | ".join(question.golden_answers),
        trajectory.answer,
        round(float(trajectory.answer_score), 4),
        bool(trajectory.format_valid),
        trajectory.num_searches,
        "\n".join(turn.query for turn in trajectory.turns if turn.is_action),
        advantage,
        changes,
        num_softened,
        trajectory.error,
        "".join(turn.text + turn.observation_text for turn in trajectory.turns)[:MAX_TRANSCRIPT],
    ]


def _changes(before: np.ndarray, after: np.ndarray) -> str:
    """Return the advantage of each turn, such as "-0.447 -> 0.000, -0.447"."""
    texts = []
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        texts.append(f"{new:.3f}" if old == new else f"{old:.3f} -> {new:.3f}")
    return ", ".join(texts)
