"""Runs the experiments of experiments/evidence.md, and goes on where it was stopped.

    python -m experiments.runs OUTPUT [--part PART] [--seeds "3 4 5"] [--list]

OUTPUT/cold/seed-N/ is the run.dir of a cold start, with its world and index; OUTPUT/runs/ARM/seed-N/ that of
a training from it and of its evaluation on held-out questions at temperature 1. What is finished is skipped,
and a training that was interrupted goes on from its newest checkpoint. `python -m experiments.report OUTPUT`
reads the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import duration, table
from experiments.arms import LONG, OF_PART, PARTS, ROOT, Job, plan
from experiments.report import write_short
from experiments.results import evaluated_step, held_out_f1, read_evaluation

EVALUATE_EVERY = 20  # steps
COMMON = ["evaluate.temperatures=[1.0]", "log.backends=[]"]  # of every command


def cold_folder(output: Path, seed: int) -> Path:
    return output / "cold" / f"seed-{seed}"


def run_folder(output: Path, job: Job) -> Path:
    return output / "runs" / job.name


def is_cold_done(output: Path, seed: int) -> bool:
    folder = cold_folder(output, seed)
    has_evaluation = bool(read_evaluation(folder / "evaluation.json"))
    return has_evaluation and (folder / "sft/config.json").is_file()


def is_done(output: Path, job: Job) -> bool:
    """Return whether the policy of the last step has been evaluated, which is the last stage."""
    return evaluated_step(read_evaluation(run_folder(output, job) / "evaluation.json")) >= job.steps


def cold_command(output: Path, seed: int, config: str) -> list[str]:
    values = {"run.dir": cold_folder(output, seed), "run.seed": seed, "world.seed": seed}
    return _command(["experiments.cold"], config, values)


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


class Runs:
    """The runs of a plan.

    Args:
        output: absolute.
        config: the base of all commands.
        workers: runs at a time.
    """

    def __init__(self, output: Path, jobs: Sequence[Job], config: str, workers: int = 1):
        self.output, self.config, self.workers = output, config, workers
        self.jobs = list(dict.fromkeys(jobs))
        self.failures: list[str] = []
        self._children: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self._starting = threading.Lock()  # what begins is seen by the one who ends it, or does not begin

    def run(self) -> None:
        """Run all cold starts first, each on as many cores as there are workers; then the runs."""
        seeds = dict.fromkeys(job.cold_seed for job in self.jobs if not is_done(self.output, job))
        with ThreadPoolExecutor(self.workers) as workers:
            try:
                for seed in seeds:
                    if not is_cold_done(self.output, seed):
                        command = cold_command(self.output, seed, self.config)
                        folder = cold_folder(self.output, seed)
                        self._try(f"cold start of seed {seed}", folder, self.workers, command)
                list(workers.map(self._do, self.jobs))
            finally:  # after a signal nothing more begins, and the trainers save their state
                self._end_children()

    def num_done(self) -> int:
        return sum(is_done(self.output, job) for job in self.jobs)

    def _do(self, job: Job) -> None:
        """Train and evaluate a run, unless it is done or its cold start has failed."""
        if is_done(self.output, job) or not is_cold_done(self.output, job.cold_seed):
            return
        commands = [make(self.output, job, self.config) for make in (train_command, evaluate_command)]
        if self._try(job.name, run_folder(self.output, job), 1, *commands):
            f1 = held_out_f1(read_evaluation(run_folder(self.output, job) / "evaluation.json"))
            say(f"{job.name}: held-out F1 {f1:.3f}; {self.num_done()} of {len(self.jobs)} runs done")

    def _try(self, name: str, folder: Path, num_devices: int, *commands: Sequence[str]) -> bool:
        """Run commands one after the other, logged in `folder`; return whether all end well."""
        begun, log = time.monotonic(), folder / "evidence.log"
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.output / "compiled"),  # the arms share most programs
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for command in commands:
            with self._starting, log.open("ab") as file:
                if self._ending:
                    return False
                child = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches it once, through `_end_children`
                    cwd=ROOT,
                    env=environment,
                )
                self._children.add(child)
            if status := child.wait():
                self.failures.append(f"{name}: ended with status {status}; see {log}")
                say(f"error: {self.failures[-1]}")
                return False
        say(f"{name}: {duration(time.monotonic() - begun)}")
        return True

    def _end_children(self) -> None:
        with self._starting:
            self._ending = True
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.wait()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the part's defaults replace omitted options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="all",
        help="part of the experiments (default: %(default)s: all but short, rivals and each)",
    )
    for name, kind, metavar, meaning in (
        ("seeds", str, '"N N …"', "seeds; "),
        ("lr", str, "LR", "learning rate of all parts but all and frontier; "),
        ("steps", whole_number, "N", "steps of each run; "),
        ("workers", whole_number, "N", "number of runs at a time; "),
        ("config", Path, "FILE", "config of the runs; "),
    ):
        own = "".join(f"; {part}: {_shown(getattr(default, name))}" for part, default in OF_PART.items())
        text = f"{meaning}default: {_shown(getattr(LONG, name))}{own}"
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    parser.add_argument("--list", action="store_true", help="show the runs in their order, and stop")
    arguments = parser.parse_args(argv)
    for name, value in dataclasses.asdict(OF_PART.get(arguments.part, LONG)).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    seeds = arguments.seeds.split()
    if not seeds or not all(seed.isdecimal() for seed in seeds):
        parser.error(f"--seeds {arguments.seeds!r}: must be numbers with spaces between them")
    arguments.seeds = [int(seed) for seed in seeds]
    # The commands run in another folder.
    arguments.output, arguments.config = arguments.output.resolve(), str(arguments.config.resolve())
    return arguments


def _shown(default: object) -> object:
    return default.name if isinstance(default, Path) else default


def whole_number(text: str) -> int:
    """Convert a number of the command line, above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def check(jobs: Sequence[Job], config: str) -> None:
    """Find a bad config or learning rate before hours of runs.

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
    """Return exit status 0 when all runs of the plan are done."""
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
    runs = Runs(arguments.output, jobs, arguments.config, arguments.workers)
    runs.run()
    num_done = runs.num_done()
    say(f"{num_done} of {len(jobs)} runs done, {len(runs.failures)} failed")
    if arguments.part == "short" and num_done == len(jobs):
        text, picture = write_short(arguments.output, [job.arm.name for job in jobs])
        sys.stdout.write(text)
        say(f"the picture: {picture}")
    return 0 if num_done == len(jobs) else 1


if __name__ == "__main__":
    cli.run_and_exit(lambda: sys.exit(main()))
