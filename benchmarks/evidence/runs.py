"""Runs the experiments of docs/evidence.md, one after the other, and goes on where it was stopped.

    python -m benchmarks.evidence.runs OUTPUT [--part PART] [--seeds "3 4 5"] [--list]

OUTPUT/cold/seed-N/ is the run.dir of a cold start, with its world and index; OUTPUT/runs/ARM/seed-N/ that of
a training from it and of its evaluation on held-out questions at temperature 1. What is finished is skipped,
and a training that was interrupted goes on from its newest checkpoint. The command may be started several
times with the same OUTPUT: every run has a lock, which the system gives back when its processes have ended.
With --workers the runs share out the cores. `python -m benchmarks.evidence.report OUTPUT` reads the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.evidence.arms import LONG, PARTS, ROOT, SHORT, Job, plan
from benchmarks.evidence.report import write_short
from benchmarks.evidence.results import evaluated_step, held_out_f1
from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import duration, table
from calibadv_jax.report.evaluations import read_json

EVALUATE_EVERY = 20  # steps
WAIT_SECONDS = 5.0  # between looks at a cold start that somebody else makes
COMMON = ["evaluate.temperatures=[1.0]", "log.backends=[]"]  # of every command


class Failed(Exception):
    """A command ended with an error; the message names its log."""


def cold_folder(output: Path, seed: int) -> Path:
    return output / "cold" / f"seed-{seed}"


def run_folder(output: Path, job: Job) -> Path:
    return output / "runs" / job.name


def is_cold_done(output: Path, seed: int) -> bool:
    folder = cold_folder(output, seed)
    return (folder / "sft/config.json").is_file() and read_json(folder / "evaluation.json") is not None


def is_done(output: Path, job: Job) -> bool:
    """Whether the policy of the last step has been evaluated, which is the last thing that is done."""
    return evaluated_step(read_json(run_folder(output, job) / "evaluation.json")) >= job.steps


def cold_command(output: Path, seed: int, config: str) -> list[str]:
    values = {"run.dir": cold_folder(output, seed), "run.seed": seed, "world.seed": seed}
    return _command(["benchmarks.evidence.cold"], config, values)


def train_command(output: Path, job: Job, config: str) -> list[str]:
    return [*_command(["calibadv_jax", "train"], config, _values(output, job)), *job.arm.overrides()]


def evaluate_command(output: Path, job: Job, config: str) -> list[str]:
    return [*_command(["calibadv_jax", "evaluate"], config, _values(output, job)), *job.arm.overrides()]


def _values(output: Path, job: Job) -> dict[str, Any]:
    cold = cold_folder(output, job.cold_seed)
    return {
        "run.dir": run_folder(output, job),
        "run.seed": job.seed,
        "policy.path": cold / "sft",
        "policy.tokenizer": cold / "world/tokenizer",
        "data.train": cold / "world/train.jsonl",
        "data.eval": cold / "world/eval.jsonl",
        "retriever.corpus": cold / "world/corpus.jsonl",
        "retriever.index": cold / "index",
        "world.dir": "",
        "learner.steps": job.steps,
        "checkpoint.keep": 1,
        "log.rollouts_keep": 0,  # all: the lengths of wrong and right trajectories come from them
        # The last policy is evaluated in any case.
        "evaluate.every": EVALUATE_EVERY if job.steps > EVALUATE_EVERY else 0,
        "evaluate.sample_size": 100,
    }


def _command(program: list[str], config: str, values: dict[str, Any]) -> list[str]:
    overrides = [f"{key}={value}" for key, value in values.items()]
    return [sys.executable, "-m", *program, "--config", config, *overrides, *COMMON]


@contextmanager
def lock(output: Path, name: str) -> Iterator[int | None]:
    """The lock of a run as an open file; None where somebody else has it.

    A command that is started with it holds it too: should this program be killed, nobody else begins the run
    before the command has ended.
    """
    path = output / "locks" / f"{name.replace('/', '.')}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


class Harness:
    """The runs of a plan, shared by the workers of this process.

    Args:
        output: absolute.
        config: the base of all commands.
        num_workers: runs at a time.
    """

    def __init__(self, output: Path, jobs: Sequence[Job], config: str, num_workers: int = 1):
        self.output, self.config, self.num_workers = output, config, num_workers
        self.jobs = list(dict.fromkeys(jobs))
        self.failures: list[str] = []
        self._tried: set[str] = set()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._guard = threading.Lock()
        self._stop = threading.Event()

    def run(self) -> None:
        """All cold starts first, each on as many cores as there are workers; then the runs."""
        with ThreadPoolExecutor(self.num_workers) as workers:
            try:
                for seed in self._missing():
                    self._make_cold(seed)
                for done in [workers.submit(self._work, index) for index in range(self.num_workers)]:
                    done.result()
            finally:  # after a signal: the trainers save their state
                self.stop()

    def stop(self) -> None:
        """Ends what runs, in order, and begins nothing more."""
        self._stop.set()
        with self._guard:
            for child in self._children:
                child.terminate()

    def num_done(self) -> int:
        return sum(is_done(self.output, job) for job in self.jobs)

    def _missing(self) -> list[int]:
        """Seeds of the cold starts that are still to be made."""
        seeds = dict.fromkeys(job.cold_seed for job in self.jobs if not is_done(self.output, job))
        return [seed for seed in seeds if not is_cold_done(self.output, seed)]

    def _make_cold(self, seed: int) -> bool:
        """Makes a cold start, unless somebody else does; False where it has failed."""
        name = f"cold/seed-{seed}"
        if name in self._tried:
            return False
        with lock(self.output, name) as held:
            if held is None or is_cold_done(self.output, seed):
                return True
            begun = time.monotonic()
            log = cold_folder(self.output, seed) / "evidence.log"
            try:
                self.call(cold_command(self.output, seed, self.config), log, held, self.num_workers)
            except Failed as error:
                self._tried.add(name)
                self._fail(f"cold start of seed {seed}: {error}")
                return False
            say(f"cold start of seed {seed}: {duration(time.monotonic() - begun)}")
            return True

    def _work(self, index: int) -> None:
        if self.num_workers > 1 and hasattr(os, "sched_setaffinity"):  # on Linux: of this thread
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[index :: self.num_workers] or cores)
        while not self._stop.is_set():
            missing = self._missing()  # before the look, so that what is made meanwhile is looked at again
            if self._next():
                continue
            if not any([self._make_cold(seed) for seed in missing]):
                return
            self._stop.wait(WAIT_SECONDS)

    def _next(self) -> bool:
        """Does the first run that is free; False where there is none."""
        for job in self.jobs:
            if self._stop.is_set():
                return False
            if job.name in self._tried or is_done(self.output, job):
                continue
            if not is_cold_done(self.output, job.cold_seed):
                continue
            with lock(self.output, f"runs/{job.name}") as held:
                if held is not None and not is_done(self.output, job):
                    self._tried.add(job.name)
                    self._do(job, held)
                    return True
        return False

    def _do(self, job: Job, held: int) -> None:
        begun = time.monotonic()
        log = run_folder(self.output, job) / "evidence.log"
        try:
            self.call(train_command(self.output, job, self.config), log, held)
            self.call(evaluate_command(self.output, job, self.config), log, held)
        except Failed as error:
            self._fail(f"{job.name}: {error}")
            return
        seconds = duration(time.monotonic() - begun)
        f1 = held_out_f1(read_json(run_folder(self.output, job) / "evaluation.json"))
        done = f"{self.num_done()} of {len(self.jobs)} runs done"
        say(f"{job.name}: held-out F1 {f1:.3f} after {seconds}; {done}")

    def call(self, command: Sequence[str], log: Path, held: int, num_devices: int = 1) -> None:
        """Runs a command to its end, with its output appended to `log`.

        Raises:
            Failed: it ended with another status than 0.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.output / "compiled"),  # the arms share most programs
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with log.open("ab") as file:
            with self._guard:
                if self._stop.is_set():
                    raise Failed("stopped")
                child = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=(held,),
                    start_new_session=True,  # Ctrl-C reaches it once, through `stop`
                    cwd=ROOT,
                    env=os.environ | environment,
                )
                self._children.add(child)
            status = child.wait()
            with self._guard:
                self._children.discard(child)
        if status:
            raise Failed(f"ended with status {status}; see {log}")

    def _fail(self, message: str) -> None:
        if self._stop.is_set():
            return  # stopped by us
        with self._guard:
            self.failures.append(message)
        say(f"error: {message}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is not given is as the part has it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="all",
        help="part of the experiments (default: %(default)s but short)",
    )
    for name, kind, metavar, what in (
        ("seeds", str, '"N N …"', "seeds; "),
        ("lr", str, "LR", "learning rate of halves, lambda, remedies and short; "),
        ("steps", _count, "N", "steps of each run; "),
        ("workers", _count, "N", "number of runs at a time; "),
        ("config", Path, "FILE", "config of the runs; "),
    ):
        long, short = (_shown(getattr(one, name)) for one in (LONG, SHORT))
        text = f"{what}default: {long}; short: {short}"
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    parser.add_argument("--list", action="store_true", help="show the runs in their order, and stop")
    arguments = parser.parse_args(argv)
    for name, value in dataclasses.asdict(SHORT if arguments.part == "short" else LONG).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    seeds = arguments.seeds.split()
    if not seeds or not all(one.isdecimal() for one in seeds):
        parser.error(f"--seeds {arguments.seeds!r}: must be numbers with spaces between them")
    arguments.seeds = [int(one) for one in seeds]
    # The commands run in another folder.
    arguments.output, arguments.config = arguments.output.resolve(), str(arguments.config.resolve())
    return arguments


def _shown(default: object) -> object:
    return default.name if isinstance(default, Path) else default


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def check(jobs: Sequence[Job], config: str) -> None:
    """Finds a bad config or learning rate before hours of runs.

    Raises:
        UserError: as `load_config`.
    """
    for arm in dict.fromkeys(job.arm for job in jobs):
        load_config(config, arm.overrides())


def list_runs(output: Path, jobs: Sequence[Job]) -> str:
    rows = []
    for job in jobs:
        metrics = run_folder(output, job) / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").count("\n") if metrics.is_file() else 0
        state = "done" if is_done(output, job) else f"{lines} steps" if lines else "-"
        rows.append([job.name, f"seed-{job.cold_seed}", job.steps, state])
    return table(rows, ["run", "cold start", "steps", "state"])


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when all runs of the plan are done."""
    arguments = parse(argv)
    jobs = plan(arguments.part, arguments.seeds, arguments.lr, arguments.steps)
    if arguments.list:
        sys.stdout.write(list_runs(arguments.output, jobs) + "\n")
        return 0
    check(jobs, arguments.config)
    if arguments.part == "short" and importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed; pip install 'calibadv-jax[report]'")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    harness = Harness(arguments.output, jobs, arguments.config, arguments.workers)
    harness.run()
    num_done = harness.num_done()
    say(f"{num_done} of {len(jobs)} runs done, {len(harness.failures)} failed")
    if arguments.part == "short" and num_done == len(jobs):
        text, picture = write_short(arguments.output, [job.arm.name for job in jobs])
        sys.stdout.write(text)
        say(f"the picture: {picture}")
    return 0 if num_done == len(jobs) else 1


if __name__ == "__main__":
    cli.end(lambda: sys.exit(main()))
