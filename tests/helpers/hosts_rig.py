"""A training run in several processes: how tests start them, and the reward that also ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

UNTIMED = ("timing_s/", "perf/")

_calls = 0


def noisy(trajectory):
    """A reward that depends on the sampled tokens, as that of a real policy does.

    The environment variable HOSTS_RIG, "calls:signal", sends this process a signal at a call.
    """
    global _calls
    _calls += 1
    at, _, number = os.environ.get("HOSTS_RIG", "0:0").partition(":")
    if _calls == int(at):
        signal.raise_signal(int(number))
    return float(trajectory.response_ids.sum() % 7) / 7


def coarse(trajectory):
    """As `noisy`, but 0 or 1, and mostly 0, so that some groups are tied."""
    return float(noisy(trajectory) > 0.6)


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def places(home):
    """Overrides of the files of a world in a folder."""
    keys = [f"world.dir={home}/world", f"retriever.index={home}/index", "retriever.url="]
    keys += [f"data.{name}={home}/world/{name}.jsonl" for name in ("train", "eval")]
    return [*keys, f"policy.tokenizer={home}/world/tokenizer", f"retriever.corpus={home}/world/corpus.jsonl"]


def spawn(command, variables):
    """Start a program of this project, whose standard error is read."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=variables, **pipes)


def environment(devices):
    """The environment of a process with so many simulated devices."""
    jax = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | jax | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "tests/helpers")}


def start(arguments, processes, devices, signals=None):
    """Start `calibadv train` in processes of so many simulated devices; `signals`: HOSTS_RIG by process."""
    variables = environment(devices) | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    command = ["-m", "calibadv_jax.train", "--config", "configs/quickstart.yaml", *arguments]
    running = []
    for index in range(processes):
        variables |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(index)}
        running.append(spawn(command, variables | {"HOSTS_RIG": (signals or {}).get(index, "0:0")}))
    return running


def ends(running, seconds=400):
    """(status, standard error) of each process; none may take longer."""
    try:
        return [(process.communicate(timeout=seconds)[1], process.returncode) for process in running]
    finally:
        for process in running:
            process.kill()


def rows(folder):
    """Metrics of every step, without times."""
    written = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{n: value for n, value in row.items() if not n.startswith(UNTIMED)} for row in written]
