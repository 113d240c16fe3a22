"""Whether the advantages push a policy to search again or to answer at once, by what each earns.

    python -m benchmarks.second_search [--believed 0.5] [--share 0.5] [--group-size 16] [--groups 4000]

Every question needs two searches, as in configs/rumours.yaml. After the first one a trajectory answers with
the rumour, which is right with the chance `believed`, or searches again and is right with the chance at the
head of the column. Both turns begin with the same decision. Shown is the mean advantage of the turns that
search again minus that of the turns that answer: where it is above 0, the policy gradient makes searching
again more frequent. Turns have the lengths of that world, and every second search finds its passage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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


def draw_group(rng: np.random.Generator, size: int, share: float, believed: float, found: float) -> Group:
    """A group of scored trajectories.

    Args:
        share: chance of searching again.
        believed, found: chance of a right answer after one search and after two.
    """
    question = Question("q", "q", ("x",), "rumour")
    trajectories = []
    for index in range(size):
        is_further = rng.random() < share
        one = Trajectory(question, np.zeros(1, np.int32), FURTHER if is_further else BELIEVE, index)
        one.format_valid = True
        one.answer_score = float(rng.random() < (found if is_further else believed))
        trajectories.append(one)
    return Group(question, trajectories)


def push(groups: Sequence[Group], config: AdvantageConfig) -> float:
    """Mean advantage of the second turns that search minus that of those that answer."""
    credits = compute_advantages(groups, config).credits
    second = [
        (len(turns) > 2, float(turns[1])) for credit in credits for turns in credit.turns if len(turns) > 1
    ]
    again, at_once = ([value for is_again, value in second if is_again is kind] for kind in (True, False))
    return float(np.mean(again) - np.mean(at_once))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--believed", type=float, default=0.5, help="default: %(default)s")
    parser.add_argument("--share", type=float, default=0.5, help="that searches again (%(default)s)")
    parser.add_argument("--group-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--groups", type=int, default=4000, help="for each column; default: %(default)s")
    arguments = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    drawn = {
        found: [
            draw_group(rng, arguments.group_size, arguments.share, arguments.believed, found)
            for _ in range(arguments.groups)
        ]
        for found in CHANCES
    }
    rows = []
    for name in ARMS:
        config = load_config(SHORT_CONFIG, Arm(name, SHORT_LR).overrides()).advantage
        rows.append([name, *(f"{push(groups, config):+.2f}" for groups in drawn.values())])
    sys.stdout.write(table(rows, ["arm", *map(str, CHANCES)]) + "\n")


if __name__ == "__main__":
    main()
