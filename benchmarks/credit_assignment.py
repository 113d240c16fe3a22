"""Times the host side of a step: scoring and credit assignment of a paper-sized batch of trajectories.

    python -m benchmarks.credit_assignment [--questions 512] [--group-size 5] [--tokens 8192]

Trajectories are synthetic but shaped like real ones: 1 to 4 searches of 3 documents from a pool shared by
the group, thinks of some hundred words with natural word frequencies, one in ten a near copy of the one
before, answers that are right, partly right or wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig, RewardConfig
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn, TurnKind
from calibadv_jax.rewards.score import score_groups

GOLDEN = "alan turing memorial prize"
ANSWERS = (GOLDEN, GOLDEN, "the turing prize", "marie curie", "nobody")
VOCABULARY = 8000
OBSERVATION_SHARE = 0.6  # of a search turn's tokens


class Generator:
    """Draws trajectories; one seed, one batch."""

    def __init__(self, seed: int, tokens: int, think_words: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tokens = tokens
        self.think_words = think_words
        self.words = np.array([f"w{rank}" for rank in range(VOCABULARY)])
        frequencies = 1 / np.arange(1, VOCABULARY + 1)
        self.cumulative = np.cumsum(frequencies / frequencies.sum())

    def group(self, number: int, size: int) -> Group:
        question = Question(f"q{number}", "Which prize?", (GOLDEN, "turing award"), "synthetic")
        pool = [Document(f"q{number}-d{index}", f"Title {index}", "A passage.") for index in range(12)]
        return Group(question, [self.trajectory(question, index, pool) for index in range(size)])

    def trajectory(self, question: Question, index: int, pool: list[Document]) -> Trajectory:
        searches = int(self.rng.integers(1, 5))
        lengths = self.rng.multinomial(self.tokens, np.full(searches + 1, 1 / (searches + 1)))
        trajectory = Trajectory(question, np.zeros(600, np.int32), index=index)
        previous: list[str] = []
        for length in lengths[:-1]:
            think = self.think(previous)
            chosen = self.rng.choice(len(pool), 3, replace=False)
            observed = int(length * OBSERVATION_SHARE)
            trajectory.turns.append(
                self.turn(
                    "search",
                    think,
                    "<search> who won the prize </search>",
                    length - observed,
                    query="who won the prize",
                    documents=tuple(pool[position] for position in chosen),
                    observation_ids=np.ones(observed, np.int32),
                )
            )
            previous = think
        answer = ANSWERS[self.rng.integers(len(ANSWERS))]
        action = f"<answer> {answer} </answer>"
        trajectory.turns.append(self.turn("answer", self.think([]), action, lengths[-1], answer=answer))
        return trajectory

    def think(self, previous: list[str]) -> list[str]:
        if previous and self.rng.random() < 0.1:
            return [word if self.rng.random() < 0.8 else "changed" for word in previous]
        size = int(self.rng.integers(self.think_words // 2, self.think_words * 3 // 2))
        ranks = np.searchsorted(self.cumulative, self.rng.random(size))
        return self.words[np.minimum(ranks, VOCABULARY - 1)].tolist()

    def turn(self, kind: TurnKind, think: list[str], action: str, length: int, **fields: Any) -> Turn:
        text = " ".join(think)
        return Turn(
            kind,
            np.ones(length, np.int32),
            np.zeros(length, np.float32),
            text=f"<think> {text} </think>\n{action}",
            think=text,
            **fields,
        )


def median_seconds(function: Callable[[], object], runs: int) -> float:
    """Return median wall-clock seconds of `runs` calls, after one that does not count."""
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(groups: list[Group], runs: int) -> dict[str, float]:
    """Return median seconds of each part."""
    rng = np.random.default_rng(0)
    parts: dict[str, Callable[[], object]] = {
        "scoring (F1, EM, cover-EM, format)": lambda: score_groups(groups, RewardConfig(), rng),
        "grpo": lambda: compute_advantages(groups, AdvantageConfig(name="grpo")),
        "calibadv": lambda: compute_advantages(groups, AdvantageConfig()),
    }
    return {name: median_seconds(part, runs) for name, part in parts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.credit_assignment", description=__doc__)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="number of response tokens of a trajectory")
    parser.add_argument("--think-words", type=int, default=300, help="mean number of words of a think")
    parser.add_argument("--runs", type=int, default=5, help="number of timed runs; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)

    generator = Generator(options.seed, options.tokens, options.think_words)
    groups = [generator.group(number, options.group_size) for number in range(options.questions)]
    trajectories = options.questions * options.group_size
    groups = score_groups(groups, RewardConfig(), np.random.default_rng(0))
    seconds = measure(groups, options.runs)
    metrics = compute_advantages(groups, AdvantageConfig()).metrics
    lines = [f"{'part':<36}{'seconds':>10}{'trajectories/s':>16}"]
    lines += [f"{name:<36}{value:>10.3f}{trajectories / value:>16,.0f}" for name, value in seconds.items()]
    report = {
        "machine": {"python": platform.python_version(), "cpu": platform.machine(), "numpy": np.__version__},
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "trajectories": trajectories,
        "seconds": seconds,
        "workload": {
            name: metrics[f"advantage/{name}"]
            for name in ("correctness/mean", "correctness/zero_share", "silver/group_share")
            if f"advantage/{name}" in metrics
        },
    }
    sys.stdout.write("\n".join([*lines, json.dumps(report), ""]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
