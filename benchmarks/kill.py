"""Trains while parts of the run are killed at random, and compares the result with an undisturbed run.

    python -m benchmarks.kill --output FOLDER [--kills 20] [--steps 60] [--seed 0] [--pause 30] [--vllm]
    python -m benchmarks.kill --output FOLDER --store 200000 [--kills 4] [--steps 30]
    python -m benchmarks.kill --output FOLDER --disk 64 [--kills 4] [--steps 30]      # as root

A supervisor, as a cluster's scheduler would, starts the trainer, the retrieval service and, with --vllm, a
rollout worker, and starts each again when it has ended. Meanwhile it picks a part and a way to disturb it:
SIGKILL, SIGTERM, or SIGSTOP for `--pause` seconds. At the end every step must stand once in metrics.jsonl,
its file of trajectories must be there, and with the embedded sampler the parameters must be those of an
undisturbed run, bit for bit. Exit status 1 if not.

With --store the machines change instead: the run is copied to an S3 service (moto) that takes so many bytes
a second. A disturbance is either SIGKILL and the loss of run.dir, or SIGSTOP until a second trainer has taken
the run over in an empty run.dir: the first one then goes on, and must end with status 2.

With --disk run.dir lies on a disk of so many MiB. A disturbance fills it: the trainer must end with status
75, and goes on once there is room again.

The run is the quickstart's training on a small world, from a short cold start, with a checkpoint every step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orbax.checkpoint as ocp

from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.errors import ENVIRONMENT_STATUS
from calibadv_jax.policy.weights import flatten
from calibadv_jax.rollout_store.reader import read_columns
from calibadv_jax.rollout_store.schema import FOLDER, kept_steps
from calibadv_jax.snapshots.mirror_marker import MARKER

CONFIG = "configs/quickstart.yaml"
SMALL_WORLD = [
    "world.people=20",
    "world.cities=8",
    "world.companies=8",
    "world.works=6",
    "world.train_questions=40",
    "world.eval_questions=6",
]
SMALL = [
    *SMALL_WORLD,
    "policy.init.hidden_size=64",
    "policy.init.intermediate_size=64",
    "policy.init.num_hidden_layers=2",
    "sft.phases=[{steps: 200, kind: imperfect}]",  # enough to keep to the format, and to guess
    "rollout.questions_per_step=4",
    "rollout.group_size=4",
    "sampler.slots=16",
    "learner.microbatch_rows=4",
    "learner.minibatch_size=0",
    "checkpoint.every=1",
    "mesh.data=1",
    "mesh.fsdp=1",
    "log.backends=[]",
]
WAYS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}


@dataclass
class Part:
    """A process that is started again whenever it has ended."""

    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def keep_running(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=os.environ | self.environment
            )
        self.starts += 1

    @property
    def started(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def send(self, number: signal.Signals, pause: float) -> None:
        with suppress(ProcessLookupError):
            self.started.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(pause)
                self.started.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # it may be stopped
            self.process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def make_parts(folder: Path, world: Path, steps: int, with_vllm: bool) -> dict[str, Part]:
    """Return the processes of one run in `folder`, none started."""
    port, cache = free_port(), {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache["JAX_COMPILATION_CACHE_DIR"] = str(world.parent / "compiled")
    trainer = [sys.executable, "-m", "calibadv_jax.train", "--config", CONFIG, *SMALL, f"run.dir={folder}"]
    trainer += [f"learner.steps={steps}", f"retriever.url=http://127.0.0.1:{port}"]
    trainer += [f"data.train={world}/train.jsonl", f"policy.path={world.parent}/sft"]
    trainer += [f"policy.tokenizer={world}/tokenizer"]
    retriever = [sys.executable, "-m", "retriever.serve", "--port", str(port), "--threads", "1"]
    retriever += ["--corpus_path", f"{world}/corpus.jsonl", "--index_path", f"{world.parent}/index"]
    retriever += ["--build_if_missing"]
    parts = {"retriever": Part(retriever, folder / "retriever.log")}
    if with_vllm:
        worker_port = free_port()
        worker = [sys.executable, "-m", "calibadv_jax.sampler.vllm_worker", "--flavour", "cpu"]
        worker += ["--model", f"{world.parent}/sft", "--port", str(worker_port), "--dtype", "float32"]
        worker += ["--max_model_len", "320"]
        parts["worker"] = Part(worker, folder / "worker.log")
        trainer += ["sampler.name=vllm", f"sampler.urls=[http://127.0.0.1:{worker_port}]"]
    parts["trainer"] = Part(trainer, folder / "trainer.log", cache)
    folder.mkdir(parents=True, exist_ok=True)
    return parts


def trained_steps(folder: Path) -> list[int]:
    """Return steps in metrics.jsonl, in its order; a line that is being written is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line)["step"] for line in lines]


def supervise(
    parts: dict[str, Part], folder: Path, arguments: argparse.Namespace, kills: int
) -> Counter[str]:
    """Run until the trainer has ended by itself; return how often each part was disturbed in which way.

    The disturbances are spread over the first two thirds of the steps, so that all of them meet the training.

    Raises:
        TimeoutError: it has not within `arguments.deadline` seconds.
        RuntimeError: the trainer ended with an error that no kill explains.
    """
    done: Counter[str] = Counter()
    rng, begun = random.Random(arguments.seed), time.monotonic()
    trainer, per_kill = parts["trainer"], 2 * arguments.steps / 3 / max(1, kills)
    disturbed = False
    while True:
        for name, part in parts.items():
            if name != "trainer":
                part.keep_running()
        status = None if trainer.process is None else trainer.process.poll()
        if status == 0:
            return done
        if status is not None and not disturbed:
            raise RuntimeError(f"the trainer ended with status {status}; see {trainer.log}")
        if trainer.process is None or status is not None:
            trainer.keep_running()
            disturbed = False
        if done.total() < kills and len(trained_steps(folder)) > done.total() * per_kill:
            time.sleep(rng.uniform(0, 0.5))
            if arguments.disk:
                fill_disk(folder, trainer, begun + arguments.deadline)
                disturbed = True
                done["full disk"] += 1
                continue
            name, way = rng.choice(list(parts)), rng.choice(list(WAYS))
            disturbed = disturbed or name == "trainer" and way != "SIGSTOP"
            parts[name].send(WAYS[way], arguments.pause)
            done[f"{name} {way}"] += 1
        if time.monotonic() - begun > arguments.deadline:
            raise TimeoutError(f"not done within {arguments.deadline:g} s; see {trainer.log}")
        time.sleep(0.05)


def fill_disk(folder: Path, trainer: Part, deadline: float) -> None:
    """Leave no room on the disk of `folder` until the trainer has ended.

    Raises:
        RuntimeError: it has not ended by the deadline, or with another status than that of a full disk.
    """
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    while trainer.started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    ballast.unlink()
    if trainer.started.poll() != ENVIRONMENT_STATUS:
        raise RuntimeError(f"a full disk: status {trainer.started.poll()}; see {trainer.log}")


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Mount a disk of its own at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def slow_store(rate: int) -> Iterator[str]:
    """Start an S3 service that takes `rate` bytes a second in all; yield a URL in its bucket."""
    from moto.server import ThreadedMotoServer

    service, turn = ThreadedMotoServer(port=0, verbose=False), threading.Lock()
    service.start()

    def forward(source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16384):
                with turn if is_upload else nullcontext():
                    time.sleep(len(data) / rate if is_upload else 0)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = proxy.accept()
                far = socket.create_connection(service.get_host_and_port())
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=forward, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=accept, daemon=True).start()
        os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*proxy.getsockname())
        os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
        fsspec.filesystem("s3").mkdir("runs")
        yield "s3://runs/kill"
    service.stop()


def change_machines(
    output: Path, world: Path, arguments: argparse.Namespace, url: str
) -> tuple[Path, Counter[str]]:
    """Train while machines are lost or taken over; return the last run.dir, and how often either happened.

    Raises:
        RuntimeError: a trainer ended otherwise than it must, or not within `arguments.deadline` seconds.
    """
    done: Counter[str] = Counter()
    rng, deadline = random.Random(arguments.seed), time.monotonic() + arguments.deadline
    folder = output / "machine-0"
    parts = make_parts(folder, world, arguments.steps, with_vllm=False)
    command, environment = parts["trainer"].command, parts["trainer"].environment
    command += [f"run.mirror={url}", "checkpoint.keep=2"]

    def wait_for(condition: Callable[[], bool], trainer: Part) -> None:
        while True:
            has_ended = trainer.started.poll() is not None
            if condition():
                return
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the trainer ended, or is not done within the deadline; see {trainer.log}"
                )
            time.sleep(0.05)

    def wait_for_end(trainer: Part, status: int) -> None:
        wait_for(lambda: trainer.started.poll() is not None, trainer)
        if trainer.started.poll() != status:
            raise RuntimeError(f"status {trainer.started.poll()} instead of {status}; see {trainer.log}")

    processes = list(parts.values())
    for process in processes:
        process.keep_running()
    try:
        for number in range(1, arguments.kills + 1):
            before, steps = processes[-1], number * arguments.steps * 2 / 3 / arguments.kills
            wait_for(partial(has_trained, folder, steps), before)
            way = rng.choice(["lost", "taken over"])
            before.started.send_signal(signal.SIGKILL if way == "lost" else signal.SIGSTOP)
            if way == "lost":
                wait_for_end(before, -signal.SIGKILL)
                shutil.rmtree(folder)
            folder = output / f"machine-{number}"
            folder.mkdir()
            trainer = Part([*command, f"run.dir={folder}"], folder / "trainer.log", environment)
            processes.append(trainer)
            trainer.keep_running()
            wait_for(partial(is_owner, trainer, url), trainer)
            if way == "taken over":
                before.started.send_signal(signal.SIGCONT)
                wait_for_end(before, 2)
            done[way] += 1
        wait_for_end(processes[-1], 0)
    finally:
        for process in processes:
            process.stop()
    return folder, done


def has_trained(folder: Path, steps: float) -> bool:
    return len(trained_steps(folder)) >= steps


def is_owner(trainer: Part, url: str) -> bool:
    return bool(read_marker(url)["owner"]["process"] == trainer.started.pid)


def read_marker(url: str) -> dict[str, Any]:
    """Return the newest version of a store's marker."""
    files = fsspec.filesystem("s3")
    while True:
        files.invalidate_cache()
        with suppress(FileNotFoundError):  # replaced meanwhile
            marker: dict[str, Any] = json.loads(
                files.cat_file(max(files.ls(f"{url}/{MARKER}", detail=False)))
            )
            return marker


def run(folder: Path, world: Path, arguments: argparse.Namespace, kills: int) -> Counter[str]:
    """Run to the end, and end all processes afterwards."""
    parts = make_parts(folder, world, arguments.steps, arguments.vllm)
    try:
        return supervise(parts, folder, arguments, kills)
    finally:
        for part in parts.values():
            part.stop()


def final_params(folder: Path, steps: int) -> dict[str, np.ndarray]:
    """Return parameters of the last checkpoint, by dotted path."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore((folder / "checkpoints" / str(steps) / "state").absolute())
    return {path: np.asarray(leaf) for path, leaf in flatten(restored["params"]).items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="new folder of the run")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    parser.add_argument("--pause", type=float, default=30.0, help="seconds between SIGSTOP and SIGCONT")
    parser.add_argument(
        "--deadline", type=float, default=3600.0, help="seconds that the disturbed run may take"
    )
    parser.add_argument("--vllm", action="store_true", help="run with a rollout worker on the CPU")
    parser.add_argument(
        "--store", type=int, metavar="RATE", help="change machines; bytes a second to the store"
    )
    parser.add_argument("--disk", type=int, metavar="MIB", help="fill a disk of this size instead")
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        return compare(arguments, stack)


def compare(arguments: argparse.Namespace, stack: ExitStack) -> int:
    """Disturb a run and compare it with an undisturbed run; return the exit status."""
    output = arguments.output.absolute()
    start = [*SMALL, f"run.dir={output}"]
    world = write_world(load_config(CONFIG, start).world)
    subprocess.run([sys.executable, "-m", "calibadv_jax", "sft", "--config", CONFIG, *start], check=True)
    out = sys.stdout.write
    begun = time.monotonic()
    run(output / "undisturbed", world, arguments, 0)
    quiet = time.monotonic() - begun
    begun = time.monotonic()
    folder = output / "disturbed"
    if arguments.store:
        with slow_store(arguments.store) as url:
            folder, disturbances = change_machines(output, world, arguments, url)
            out(f"checkpoints in the store: {read_marker(url)['steps']}\n")
    else:
        if arguments.disk:
            stack.enter_context(small_disk(folder, arguments.disk))
        disturbances = run(folder, world, arguments, arguments.kills)
    seconds = time.monotonic() - begun
    for name, count in sorted(disturbances.items()):
        out(f"{name:20} {count}\n")
    out(f"{disturbances.total()} disturbances in {seconds:.0f} s; undisturbed {quiet:.0f} s\n")
    expected = list(range(1, arguments.steps + 1))
    folders = {"undisturbed": output / "undisturbed", "disturbed": folder}
    trained = {name: trained_steps(path) for name, path in folders.items()}
    ok = disturbances.total() >= arguments.kills and all(steps == expected for steps in trained.values())
    out(f"steps: {trained['disturbed']}\n")
    kept = sorted(path.name for path in (folder / FOLDER).iterdir())
    whole = kept == sorted(f"step_{step}.parquet" for step in expected)
    for path in kept_steps(folder).values():
        read_columns(path)  # raises where a file is damaged
    out(f"files of trajectories: those of the steps: {whole}\n")
    ok = ok and whole
    if not arguments.vllm:  # vLLM's numbers depend on what it batches together
        left, right = (final_params(path, arguments.steps) for path in folders.values())
        same = left.keys() == right.keys() and all(np.array_equal(left[path], right[path]) for path in left)
        out(f"parameters equal bit for bit: {same}\n")
        ok = ok and same
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
