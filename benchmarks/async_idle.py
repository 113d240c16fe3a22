"""How long the learner waits for rollouts, by `rollout.max_staleness`: a timed simulation.

    python -m benchmarks.async_idle --run FOLDER [--steps 30] [--time-scale 0.2]
    python -m benchmarks.async_idle [--speed 1.5] [--steps 30]

The stream and its bookkeeping are the trainer's own; a group's rollout and the learner's update are pauses,
on a sampler that serves `--slots` groups at a time. With `--run`, a group takes as long as one of that run's
groups did (`seconds` in its rollouts), an update the median of its updates and publications, and both pass
`1 / --time-scale` times as fast. Without it, groups are drawn from a log-normal (sigma 0.7: the slowest of 64
takes about four times the mean), an update takes a second, and `--speed` is the sampler's throughput relative
to the learner's: above 1 the learner is the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from calibadv_jax.rollout.stream import RolloutStream
from calibadv_jax.trajectory import Group, Question


def recorded(run: Path) -> tuple[np.ndarray, float]:
    """Seconds of every group of a run, and the median seconds of its update and publication."""
    groups: dict[tuple[str, str], float] = {}
    for path in (run / "rollouts").glob("step_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            key = (path.name, one["question_id"])
            groups[key] = max(groups.get(key, 0.0), one["seconds"])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [one["timing_s/update"] + one["timing_s/publish"] for one in steps if "timing_s/update" in one]
    return np.array(list(groups.values())), statistics.median(updates)


def drawn(arguments: argparse.Namespace) -> tuple[np.ndarray, float]:
    """Seconds of groups from a log-normal whose mean fits `--speed`, and of an update."""
    delays = np.exp(np.random.default_rng(1).normal(0.0, 0.7, 2000))
    return delays / delays.mean() * arguments.slots / arguments.per_step / arguments.speed, 1.0


def simulate(
    delays: np.ndarray, update: float, staleness: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """(share of the time the learner waits, mean staleness in steps of the groups it trains)."""
    rng = np.random.default_rng(0)
    pool = ThreadPoolExecutor(arguments.slots)
    begun_at: dict[int, int] = {}
    step, lock = 0, threading.Lock()
    asked = 0

    def rollout(question: Question, seconds: float) -> Group:
        with lock:
            begun_at[int(question.id)] = step
        time.sleep(seconds)
        return Group(question, [])

    def begin(number: int, question: Question) -> Future[Group]:
        return pool.submit(rollout, question, float(rng.choice(delays)))

    def questions() -> list[Question]:
        nonlocal asked
        first, asked = asked, asked + arguments.per_step
        return [Question(str(number), "?", ("x",), "simulation") for number in range(first, asked)]

    stream = RolloutStream(begin, questions, arguments.per_step, staleness)
    waited, stale, warm_up = 0.0, [], 3
    begun = time.monotonic()
    for number in range(arguments.steps + warm_up):
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
    parser.add_argument("--per-step", type=int, default=64, help="groups")
    parser.add_argument("--slots", type=int, default=64, help="groups that the sampler serves at a time")
    parser.add_argument("--speed", type=float, default=1.5)
    arguments = parser.parse_args()
    delays, update = recorded(arguments.run) if arguments.run else drawn(arguments)
    low, high = np.quantile(delays, (0.5, 0.99))
    sys.stdout.write(f"{len(delays)} groups: p50 {low:.2f} s, p99 {high:.2f} s; update {update:.2f} s\n")
    scale = arguments.time_scale
    for staleness in (0, 1, 2):
        idle, mean = simulate(scale * delays, scale * update, staleness, arguments)
        sys.stdout.write(
            f"max_staleness {staleness}: learner waits {100 * idle:.1f} % of the time,"
            f" mean staleness {mean:.2f}\n"
        )


if __name__ == "__main__":
    main()
