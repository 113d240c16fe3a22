"""How long the learner waits for rollouts, by `rollout.max_staleness`: a timed simulation.

    python -m benchmarks.async_idle [--delays FILE] [--steps 30] [--update 1.0] [--speed 1.0]

The stream and its bookkeeping are the trainer's own; a group's rollout is a pause drawn from `--delays`, a
JSON list of seconds (default: a log-normal with a tail of five times its median), on a sampler that serves
`--slots` groups at a time. The learner's update is a pause of `--update` seconds. `--speed` is the sampler's
throughput relative to the learner's: above 1 the learner is the bottleneck and need not wait.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from calibadv_jax.rollout.stream import RolloutStream
from calibadv_jax.trajectory import Group, Question


def draw(path: Path | None) -> np.ndarray:
    """Seconds a group takes."""
    if path is not None:
        return np.asarray(json.loads(path.read_text()), np.float64)
    return np.exp(np.random.default_rng(1).normal(0.0, 0.7, 2000))


def simulate(delays: np.ndarray, staleness: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """(share of the time the learner waits, mean staleness in steps of the groups it trains)."""
    rng = np.random.default_rng(0)
    scale = arguments.update * arguments.slots / arguments.per_step / delays.mean() / arguments.speed
    pool = ThreadPoolExecutor(arguments.slots)
    begun_at: dict[int, int] = {}
    step, lock = 0, threading.Lock()
    drawn = 0

    def rollout(question: Question, seconds: float) -> Group:
        with lock:
            begun_at[int(question.id)] = step
        time.sleep(seconds)
        return Group(question, [])

    def begin(number: int, question: Question) -> Future[Group]:
        return pool.submit(rollout, question, scale * float(rng.choice(delays)))

    def questions() -> list[Question]:
        nonlocal drawn
        first, drawn = drawn, drawn + arguments.per_step
        return [Question(str(number), "?", ("x",), "simulation") for number in range(first, drawn)]

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
        time.sleep(arguments.update)
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
    parser.add_argument("--delays", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--update", type=float, default=1.0, help="seconds of an update")
    parser.add_argument("--per-step", type=int, default=64, help="groups")
    parser.add_argument("--slots", type=int, default=64, help="groups that the sampler serves at a time")
    parser.add_argument("--speed", type=float, default=1.5)
    arguments = parser.parse_args()
    delays = draw(arguments.delays)
    for staleness in (0, 1, 2):
        idle, mean = simulate(delays, staleness, arguments)
        sys.stdout.write(
            f"max_staleness {staleness}: learner waits {100 * idle:.1f} % of the time,"
            f" mean staleness {mean:.2f}\n"
        )


if __name__ == "__main__":
    main()
