"""scripts/slurm/train.sbatch under an srun and a scontrol that start real processes here."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hosts_rig import free_port, places
from small_run import SMALL

from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.rollout_store.schema import kept_steps

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/slurm/train.sbatch"
SRUN = f"""#!{sys.executable}
# As many processes as are asked for, each with its number; a signal goes to all; the status is the largest.
import os, signal, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--")]
first = next(at for at, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
asked = dict(word[2:].partition("=")[::2] for word in options)
with open(os.environ["CALLS"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
count = int(asked["ntasks"])
if os.environ.get("DRY"):
    until = time.monotonic() + 250
    # The services start beside the trainer, whose end ends them. The test fails before the time is over.
    while "calibadv_jax train" in " ".join(sys.argv) and time.monotonic() < until:
        if open(os.environ["CALLS"]).read().count("--overlap") > int(os.environ["SERVICES"]):
            break
        time.sleep(0.05)
    sys.exit(int(os.environ["DRY"]) if count == int(asked["nodes"]) else 99)
running = [
    subprocess.Popen(sys.argv[first:], env=os.environ | {{"SLURM_PROCID": str(number)}})
    for number in range(count)
]
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda got, _: [one.send_signal(got) for one in running])
sys.exit(max(abs(one.wait()) for one in running))
"""
TINY = [
    *SMALL,
    *("rollout.questions_per_step=2", "rollout.group_size=2", "sampler.slots=4", "learner.microbatch_rows=4"),
    *("learner.row_widths=1", "evaluate.every=0", "checkpoint.every=1000", "mesh.fsdp=-1"),
]
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
if [[ "$1 $2" == "show hostnames" ]]; then tr , '\\n' <<<"$3"; fi
"""


@pytest.fixture
def cluster(tmp_path):
    """The environment of a job on these nodes, and the file of all calls."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")

    def environment(nodes, **more):
        slurm = {"JOB_ID": "77", "JOB_NODELIST": nodes, "SUBMIT_DIR": str(ROOT)}
        own = {f"SLURM_{name}": value for name, value in slurm.items()}
        own |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "VENV": sys.prefix}
        return os.environ | own | {"LOGS": str(tmp_path / "logs"), **more}

    return environment, calls


def submitted(environment, *arguments):
    call = ["bash", str(SCRIPT), "--config", str(ROOT / "configs/paper/qwen2.5-7b.yaml"), *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True)


@pytest.mark.medium
@pytest.mark.parametrize("trainers", [1, 2])
def test_job_starts_parts_on_their_nodes(cluster, trainers):
    environment, calls = cluster
    nodes = ["n1", "n2", "n3"]
    ports = range(8100, 8102 if trainers == 1 else 8104)
    services = {"RETRIEVER": "--config configs/retriever.yaml", "WORKERS_PER_NODE": str(len(ports))}
    job = environment("n1,n2,n3", DRY="7", SERVICES="5", WORKER_NODES=str(3 - trainers), **services)
    done = submitted(job, "learner.steps=3")
    assert done.returncode == 7, done.stderr  # that of the trainer
    lines = [line for line in calls.read_text().splitlines() if not line.startswith("scontrol")]
    (trainer,) = [line for line in lines if "calibadv_jax train" in line]
    tasks = f"--nodes={trainers} --ntasks={trainers} --ntasks-per-node=1"
    assert f"{tasks} --nodelist={','.join(nodes[:trainers])} " in trainer
    urls = ",".join(f"http://{node}:{port}" for node in nodes[trainers:] for port in ports)
    assert f"learner.steps=3 retriever.url=http://n1:8000 sampler.urls=[{urls}]" in trainer
    (retriever,) = [line for line in lines if "retriever.serve" in line]
    assert "--nodelist=n1 " in retriever and retriever.endswith("--host 0.0.0.0 --port 8000")
    workers = [line for line in lines if "vllm_worker" in line]
    options = "--model Qwen/Qwen2.5-7B --max_model_len 16384"
    assert len(workers) == 4 and all(options in worker for worker in workers)


@pytest.mark.medium
def test_bad_job_is_refused_before_the_start(cluster):
    environment, calls = cluster
    few = {"WORKER_NODES": "1", "WORKERS_PER_NODE": "1"}
    for nodes, more, arguments, message in (
        (
            "n1,n2,n3",
            few,
            [],
            "1 vLLM workers for 2 nodes of the trainer: set WORKER_NODES, sampler.workers or sampler.name",
        ),
        ("n1,n2", {}, ["sampler.name=jax"], "no retriever for 2 nodes: set RETRIEVER"),
        ("n1", {"WORKER_NODES": "1"}, [], "WORKER_NODES=1 of 1 nodes leaves none for the trainer"),
        ("n1", {}, ["mesh.fspd=8"], "the config cannot be used"),
        ("n1", {"VENV": "/nowhere"}, [], "VENV=/nowhere has no bin/python"),
        ("n1", {"SLURM_JOB_ID": ""}, [], "no SLURM job: start this with sbatch"),
    ):
        done = submitted(environment(nodes, **more), *arguments)
        assert done.returncode == 2 and message in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nodes=" not in calls.read_text()


@pytest.mark.slow
def test_time_limit_stops_and_resumes_two_processes(cluster, tmp_path):
    pytest.importorskip("faiss")
    pytest.importorskip("fastapi")
    environment, calls = cluster
    world, run = tmp_path / "world", tmp_path / "run"
    settings = [*TINY, *places(tmp_path), f"run.dir={run}", "learner.steps=500"]
    config = ROOT / "configs/quickstart.yaml"
    write_world(load_config(config, settings).world)
    retriever = f"--corpus_path {world}/corpus.jsonl --index_path {tmp_path}/index --retriever_name hashed"
    job = environment(
        "127.0.0.1",
        RETRIEVER=f"{retriever} --build_if_missing",
        RETRIEVER_PORT=str(free_port()),
        COORDINATOR_PORT=str(free_port()),
        REQUEUE="1",
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="2",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )
    call = ["bash", str(SCRIPT), "--config", str(config), *settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(call, env=job, start_new_session=True, **pipes)
    try:
        while not (run / "rollouts/step_2.parquet").exists():
            assert running.poll() is None, running.communicate()[0][-3000:]
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)  # as SLURM does before the time limit
        message = running.communicate()[0]
        assert running.returncode == 143, message[-3000:]
        assert "scontrol requeue 77" in calls.read_text()
        with pytest.raises(ProcessLookupError):  # no service is left
            os.killpg(running.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    done = max(kept_steps(run))
    again = [*call, f"learner.steps={done + 1}"]
    two = job | {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "REQUEUE": "0"}
    ended = subprocess.run(again, env=two, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert max(kept_steps(run)) == done + 1
    assert "--nodes=2 --ntasks=2" in calls.read_text()
