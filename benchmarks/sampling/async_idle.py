"""How long the learner waits for rollouts, by `rollout.max_staleness`: a timed simulation.

    python -m benchmarks.sampling.async_idle --run FOLDER [--steps 30] [--time-scale 0.2]
    python -m benchmarks.sampling.async_idle [--speed 1.5] [--steps 30]

The stream and its bookkeeping are the trainer's own; a group's rollout and the learner's update are pauses,
on a sampler that serves as many groups at a time as a step has. With `--run`, the groups asked for together
take as long as those of one step of that run did (`seconds` in its rollouts), an update the median of its
updates and publications, and all of it passes `1 / --time-scale` times as fast. Without it, a step has 64
groups with log-normal seconds (sigma 0.7: the slowest takes about four times the mean), an update takes a
second, and `--speed` is the sampler's throughput relative to the learner's: above 1 the learner is slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

from calibadv_jax.config import RolloutConfig
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.rollout.runner import RolloutStream
from calibadv_jax.rollout_store.reader import read_columns
from calibadv_jax.rollout_store.schema import kept_steps


def recorded(run: Path) -> tuple[np.ndarray, float]:
    """Return seconds [steps, groups] of a run's groups, and median seconds of update and publication."""
    steps = []
    for path in kept_steps(run).values():
        groups: dict[str, float] = {}
        for row in read_columns(path, ["question_id", "seconds"]).to_pylist():
            groups[row["question_id"]] = max(groups.get(row["question_id"], 0.0), row["seconds"])
        steps.append(list(groups.values()))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row["timing_s/update"] + row["timing_s/publish"] for row in metrics]
    return np.array(steps), statistics.median(updates)


def drawn(speed: float) -> tuple[np.ndarray, float]:
    """Return log-normal seconds [steps, groups], a step's in the mean, and the second of an update."""
    delays = np.exp(np.random.default_rng(1).normal(0.0, 0.7, (100, 64)))
    return delays / delays.mean() / speed, 1.0


def simulate(delays: np.ndarray, update: float, staleness: int, steps: int) -> tuple[float, float]:
    """Return the share of the time the learner waits, and the mean staleness in steps of its groups."""
    rng = np.random.default_rng(0)
    per_step = delays.shape[1]
    pool = ThreadPoolExecutor(per_step)
    begun_at: dict[int, int] = {}
    seconds: list[float] = []
    step, lock = 0, threading.Lock()

    def rollout(number: int) -> Group:
        with lock:
            begun_at[number] = step
        time.sleep(seconds[number])
        return Group(Question(str(number), "?", ("x",), "simulation"), [])

    def begin(number: int, _: Question) -> Future[Group]:
        return pool.submit(rollout, number)

    def questions() -> Iterator[Question]:
        for number in count():
            if number == len(seconds):
                seconds.extend(rng.choice(delays).tolist())
            yield Question(str(number), "?", ("x",), "simulation")

    config = RolloutConfig(questions_per_step=per_step, max_staleness=staleness, max_failed_share=0.0)
    stream = RolloutStream(begin, questions(), config)
    waited, warm_up = 0.0, 3
    stale: list[int] = []
    begun = time.monotonic()
    for number in range(steps + warm_up):
        if number == warm_up:
            waited, begun, stale = 0.0, time.monotonic(), []
        before = time.monotonic()
        groups = stream.take(step)
        waited += time.monotonic() - before
        stale += [step - begun_at[int(group.question.id)] for group in groups]
        time.sleep(update)
        stream.commit()
        with lock:
            step += 1
    total = time.monotonic() - begun
    stream.close()
    pool.shutdown()
    return waited / total, float(np.mean(stale))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of a run with log.rollouts")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds that a simulated second takes")
    parser.add_argument("--speed", type=float, default=1.5)
    arguments = parser.parse_args()
    delays, update = recorded(arguments.run) if arguments.run else drawn(arguments.speed)
    low, high = np.quantile(delays, (0.5, 0.99))
    sys.stdout.write(
        f"{delays.shape[1]} groups a step: p50 {low:.2f} s, p99 {high:.2f} s; slowest of a step"
        f" {np.median(delays.max(axis=1)):.2f} s (median); update {update:.2f} s\n"
    )
    scale = arguments.time_scale
    for staleness in (0, 1, 2):
        idle, mean = simulate(scale * delays, scale * update, staleness, arguments.steps)
        sys.stdout.write(
            f"max_staleness {staleness}: learner waits {100 * idle:.1f} % of the time,"
            f" mean staleness {mean:.2f}\n"
        )


if __name__ == "__main__":
    main()
