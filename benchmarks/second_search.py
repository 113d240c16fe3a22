"""Whether the advantages push a policy to search again or to answer at once, by what each earns.

    python -m benchmarks.second_search [--truth 0.65] [--quoted 0.85] [--share 0.5] [--questions 5]

Every question needs two searches, as in configs/rumours.yaml. After the first one a trajectory answers with
the rumour, or searches again and is right with the chance at the head of the column. Both turns begin with
the same decision: what a group adds to the policy gradient of its log-odds is the mean over its trajectories
of advantage × (whether it searched again - share). Shown is the mean over groups, and in brackets that of a
step over its standard deviation: how much of a step is direction, and how much chance. Turns have the lengths
of that world, and every second search finds its passage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence import SHORT_CONFIG
from benchmarks.evidence_arms import SHORT_LR, Arm
from calibadv_jax.advantages.registry import compute_advantages
from calibadv_jax.config import AdvantageConfig, load_config
from calibadv_jax.metrics.console import table
from calibadv_jax.trajectory import Document, Group, Question, Trajectory, Turn, TurnKind

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

    truth: float = 0.65  # share of the questions whose rumour is true
    quoted: float = 0.85  # of those who believe it, the share that quotes it without a mistake
    share: float = 0.5  # that searches again
    group_size: int = 16


def draw_group(rng: np.random.Generator, world: World, found: float) -> Group:
    """A group of scored trajectories; `found`: the chance of a right answer after two searches."""
    question = Question("q", "q", ("x",), "rumour")
    believed = world.quoted * (rng.random() < world.truth)  # the rumour is the same for the whole group
    trajectories = []
    for index in range(world.group_size):
        is_further = rng.random() < world.share
        one = Trajectory(question, np.zeros(1, np.int32), FURTHER if is_further else BELIEVE, index)
        one.format_valid = True
        one.answer_score = float(rng.random() < (found if is_further else believed))
        trajectories.append(one)
    return Group(question, trajectories)


def push(groups: Sequence[Group], share: float, config: AdvantageConfig) -> np.ndarray:
    """float64 [number of groups]: what each adds to the gradient of the log-odds of searching again."""
    return np.array(
        [
            np.mean([turns[1] * ((len(turns) > 2) - share) for turns in credit.turns])
            for credit in compute_advantages(groups, config).credits
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, what in (
        ("truth", "share of rumours that are true"),
        ("quoted", "of these, quoted without a mistake"),
        ("share", "that searches again"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=getattr(World, name), help=f"{what}; %(default)s"
        )
    parser.add_argument("--group-size", type=int, default=World.group_size, help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=5, help="of a step; default: %(default)s")
    parser.add_argument("--groups", type=int, default=4000, help="for each column; default: %(default)s")
    arguments = parser.parse_args(argv)
    world = World(arguments.truth, arguments.quoted, arguments.share, arguments.group_size)
    rng = np.random.default_rng(0)
    drawn = {found: [draw_group(rng, world, found) for _ in range(arguments.groups)] for found in CHANCES}
    rows = []
    for name in ARMS:
        config = load_config(SHORT_CONFIG, Arm(name, SHORT_LR).overrides()).advantage
        pushes = [push(groups, world.share, config) for groups in drawn.values()]
        steps = [one.mean() / one.std() * math.sqrt(arguments.questions) for one in pushes]
        rows.append(
            [name, *(f"{one.mean():+.3f} ({step:+.1f})" for one, step in zip(pushes, steps, strict=True))]
        )
    sys.stdout.write(table(rows, ["arm", *map(str, CHANCES)]) + "\n")


if __name__ == "__main__":
    main()
