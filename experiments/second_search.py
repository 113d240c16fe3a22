"""Whether the advantages push a policy to search again or to answer at once, by what each earns.

    python -m experiments.second_search [--truth 0.85] [--quoted 0.85] [--share 0.5] [--questions 10]

After its first search a trajectory answers, or searches again. Both turns begin with the same decision: what
a group adds to the policy gradient of its log-odds is the mean over its trajectories of
advantage × (whether it searched again - share that does).

The groups are drawn: every question needs two searches, as in configs/rumours.yaml; after the first one a
trajectory answers with the rumour, or searches again and is right with the chance at the head of the column.
Shown is the mean over groups, and in brackets that of a step over its standard deviation: how much of a step
is direction, and how much chance. Turns have the lengths of that world, and every second search finds its
passage. What was pushed in runs: `python -m experiments.second_search_runs`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig, load_config
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn, TurnKind
from calibadv_jax.metrics.console import table
from experiments.arms import SHORT, Arm

SHOWN_FIRST, SHOWN_SECOND = "abc", "dea"  # a second search mostly shows one passage of the first again
TOKENS = {"search": 9, "search again": 13, "believe": 18, "answer": 12}
CHANCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
ARMS = ("grpo", "rebalance", "soft", "calibadv", "calibadv-lambda0.5", "calibadv-lambda2")


def make_turn(kind: TurnKind, think: str, documents: str = "") -> Turn:
    ids = np.zeros(TOKENS[think], np.int32)
    shown = tuple(Document(name, name, name) for name in documents)
    return Turn(kind, ids, np.zeros(len(ids), np.float32), think=think, documents=shown)


FIRST = make_turn("search", "search", SHOWN_FIRST)
BELIEVE = [FIRST, make_turn("answer", "believe")]
FURTHER = [FIRST, make_turn("search", "search again", SHOWN_SECOND), make_turn("answer", "answer")]


@dataclass(frozen=True)
class World:
    """What is drawn."""

    truth: float = 0.85  # share of the questions whose rumour is true
    quoted: float = 0.85  # of those who believe it, the share that quotes it without a mistake
    share: float = 0.5  # that searches again
    group_size: int = 16


def draw_group(rng: np.random.Generator, world: World, chance: float) -> Group:
    """Draw a group of scored trajectories; `chance` is that of a right answer after two searches."""
    question = Question("q", "q", ("x",), "rumour")
    believed = world.quoted * (rng.random() < world.truth)  # the rumour is the same for the whole group
    trajectories = []
    for index in range(world.group_size):
        is_further = rng.random() < world.share
        trajectory = Trajectory(question, np.zeros(1, np.int32), FURTHER if is_further else BELIEVE, index)
        trajectory.format_valid = True
        trajectory.answer_score = float(rng.random() < (chance if is_further else believed))
        trajectories.append(trajectory)
    return Group(question, trajectories)


def searches_again(trajectory: Trajectory) -> bool | None:
    """Return the decision after the first search; None where there was nothing to decide."""
    kinds = [turn.kind for turn in trajectory.turns[:2]]
    return kinds[1] == "search" if len(kinds) == 2 and kinds[0] == "search" else None


def push(groups: Sequence[Group], credits: Sequence[GroupCredit], share: float) -> np.ndarray:
    """Return float64 [groups]: what each adds to the gradient of the log-odds of searching again.

    Args:
        groups: of finished trajectories.
        share: of the trajectories that have the choice, those that search again.
    """
    pushes = []
    for group, credit in zip(groups, credits, strict=True):
        decided = [
            advantages[1] * (is_further - share)
            for trajectory, advantages in zip(group.trajectories, credit.turns, strict=True)
            if (is_further := searches_again(trajectory)) is not None
        ]
        pushes.append(sum(decided) / max(len(credit.turns), 1))
    return np.array(pushes)


def drawn_table(world: World, num_groups: int, num_questions: int) -> str:
    rng = np.random.default_rng(0)
    drawn = {chance: [draw_group(rng, world, chance) for _ in range(num_groups)] for chance in CHANCES}
    rows = []
    for name in ARMS:
        pushes = [push(groups, credit_of(name, groups), world.share) for groups in drawn.values()]
        steps = [push.mean() / push.std() * math.sqrt(num_questions) for push in pushes]
        rows.append(
            [name, *(f"{push.mean():+.3f} ({step:+.1f})" for push, step in zip(pushes, steps, strict=True))]
        )
    return table(rows, ["arm", *map(str, CHANCES)])


def credit_of(arm: str, groups: Sequence[Group]) -> list[GroupCredit]:
    """Return the credit that an arm assigns to scored groups."""
    return compute_advantages(groups, _advantage_config(arm)).credits


@cache  # a table asks for it once in every cell
def _advantage_config(arm: str) -> AdvantageConfig:
    return load_config(SHORT.config, Arm(arm, SHORT.lr).overrides()).advantage


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, meaning in (
        ("truth", "share of rumours that are true"),
        ("quoted", "of these, quoted without a mistake"),
        ("share", "that searches again"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=getattr(World, name), help=f"{meaning} (default: %(default)s)"
        )
    parser.add_argument(
        "--group-size",
        type=int,
        default=World.group_size,
        help="trajectories of a group (default: %(default)s)",
    )
    parser.add_argument(
        "--questions", type=int, default=10, help="number of questions of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--groups", type=int, default=4000, help="number of groups for each column (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    world = World(arguments.truth, arguments.quoted, arguments.share, arguments.group_size)
    sys.stdout.write(drawn_table(world, arguments.groups, arguments.questions) + "\n")


if __name__ == "__main__":
    main()
