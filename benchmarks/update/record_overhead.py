"""What record and metrics cost: share of a step, and bytes a step.

    python -m benchmarks.update.record_overhead --quickstart runs/quickstart-long-calibadv/seed-0
                                         --output FOLDER [--steps 60] [--json FILE]

Two measurements:

1. The quickstart's training from its cold start, with the trajectories kept (Parquet, with credit) and all
   metrics written (metrics.jsonl and TensorBoard) at every second step, and neither at the others. The time
   of both is taken within the step; the times of the steps with and without are compared beside it, but
   rollouts differ from step to step by more than the cost.
2. A step of the paper's size (512 questions × 5 trajectories × 4,000 tokens) of random tokens,
   log-probabilities and words, which compress badly: seconds and bytes as Parquet and as JSONL.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.credit_assignment import Generator
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.commands import train
from calibadv_jax.config import Config, load_config
from calibadv_jax.core.trajectory import Document, Group
from calibadv_jax.metrics.metrics_writer import MetricsWriter
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.writer import RolloutWriter

CONFIG = "configs/quickstart_long.yaml"
PAPER = "configs/paper/qwen2.5-3b.yaml"
WARM_UP = 4  # steps that compile
VOCABULARY, PASSAGE_WORDS = 150_000, 100


def alternating(times: dict[int, dict[str, float]]) -> tuple[type, type]:
    """Make writers write at even steps only, and note the seconds of every step in `times`."""

    class Rollouts(RolloutWriter):
        def write(self, step: int, *more: Any) -> dict[str, float]:
            begun = time.perf_counter()
            written = super().write(step, *more) if step % 2 == 0 else {}
            times[step] = {"record": time.perf_counter() - begun} | written
            return written

    class Metrics(MetricsWriter):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            begun = time.perf_counter()
            if step % 2 == 0:
                super().write(step, metrics)
            seconds = time.perf_counter() - begun
            times[step] |= {"metrics": seconds, "step": metrics["timing_s/step"] + seconds}

    return Rollouts, Metrics


def measure_training(quickstart: Path, output: Path, steps: int) -> dict[str, float]:
    """Return medians over the steps after the warm-up; seconds, but for the bytes and the shares."""
    overrides = [f"run.dir={output}", f"learner.steps={steps}", "checkpoint.every=0", "log.progress=false"]
    overrides += [f"world.dir={quickstart}/world", f"policy.path={quickstart}/sft"]
    overrides += [f"policy.tokenizer={quickstart}/world/tokenizer", f"retriever.index={quickstart}/index"]
    overrides += [f"retriever.corpus={quickstart}/world/corpus.jsonl"]
    overrides += [f"data.{name}={quickstart}/world/{name}.jsonl" for name in ("train", "eval")]
    times: dict[int, dict[str, float]] = {}
    rollouts, metrics = alternating(times)
    vars(train).update(RolloutWriter=rollouts, MetricsWriter=metrics)
    train.run(load_config(CONFIG, overrides))
    kept = {step: timing for step, timing in times.items() if step > WARM_UP}
    written = [timing for step, timing in kept.items() if step % 2 == 0]
    bare = [timing for step, timing in kept.items() if step % 2]
    shares = [(timing["record"] + timing["metrics"]) / timing["step"] for timing in written]
    return {
        "steps": float(len(kept)),
        "step with": statistics.median(timing["step"] for timing in written),
        "step without": statistics.median(timing["step"] for timing in bare),
        "record": statistics.median(timing["record"] for timing in written),
        "metrics": statistics.median(timing["metrics"] for timing in written),
        "share of the step, median": statistics.median(shares),
        "share of the step, largest": max(shares),
        "bytes a step": statistics.median(timing["perf/record_bytes"] for timing in written),
    }


def paper_step(config: Config, seed: int = 0) -> list[Group]:
    """Return a scored step of the paper's size."""
    rng = np.random.default_rng(seed)
    generator = Generator(seed, 4000, 100)
    words = generator.words
    rollout = config.rollout
    groups = [generator.group(number, rollout.group_size) for number in range(rollout.questions_per_step)]

    def passage(document: Document) -> Document:
        return dataclasses.replace(document, text=" ".join(rng.choice(words, PASSAGE_WORDS)))

    for group in groups:
        pool: dict[str, Document] = {}
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                turn.token_ids = rng.integers(0, VOCABULARY, len(turn.token_ids)).astype(np.int32)
                turn.logprobs = -rng.exponential(size=len(turn.token_ids)).astype(np.float32)
                turn.observation_ids = rng.integers(0, VOCABULARY, len(turn.observation_ids)).astype(np.int32)
                for document in turn.documents:
                    pool.setdefault(document.id, passage(document))
                turn.documents = tuple(pool[document.id] for document in turn.documents)
                turn.observation_text = "\n".join(document.text for document in turn.documents)
    return score_groups(groups, config.reward, rng)


def measure_paper(groups: list[Group], config: Config) -> dict[str, float]:
    """Return seconds (the least of three) and bytes of one write."""
    credits = compute_advantages(groups, config.advantage).credits
    learner: list[list[np.ndarray | None]] = [
        [trajectory.logprobs for trajectory in group.trajectories] for group in groups
    ]
    with tempfile.TemporaryDirectory() as folder:
        writer = RolloutWriter(Path(folder), config, 1)
        seconds, written = [], {}
        for step in (1, 2, 3):
            begun = time.perf_counter()
            written = writer.write(step, groups, credits, learner, 0)
            seconds.append(time.perf_counter() - begun)
    return {"seconds": min(seconds), "bytes": written["perf/record_bytes"]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart", type=Path, help="folder of a quickstart run; without it only part 2 runs"
    )
    parser.add_argument("--output", type=Path, help="new folder to write to")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args(argv)
    report: dict[str, dict[str, float]] = {}
    if arguments.quickstart:
        if arguments.output is None:
            parser.error("--quickstart needs --output")
        folders = arguments.quickstart.absolute(), arguments.output.absolute()
        report["quickstart"] = measure_training(*folders, arguments.steps)
    config = load_config(PAPER, ["policy.path=none", "data.train=none", "data.eval=none"])
    groups = paper_step(config)
    report["paper-sized step"] = measure_paper(groups, config)
    write: Callable[[str], object] = sys.stdout.write
    for part, values in report.items():
        write(f"{part}\n")
        for name, value in values.items():
            write(f"  {name:28} {value:,.4f}\n" if value < 1000 else f"  {name:28} {value:,.0f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
