"""How processes learn of each other, join and end: alone, and in processes."""

import json
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import hosts_rig
import jax
import pytest

from calibadv_jax.config import Config, DistributedConfig, SamplerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.distributed.joining import (
    KEYS,
    _check_processes,
    describe_processes,
    init_distributed,
    require_single_process,
    workers_of_process,
)
from calibadv_jax.distributed.process_group import ProcessGroup

ADDRESS = {"coordinator_address": "a:1"}
PAIR = ADDRESS | {"num_processes": 2, "process_id": 1}
VARIABLES = dict(zip(KEYS.values(), ("b:2", "4", "3"), strict=True))


@pytest.mark.parametrize(
    ("keys", "variables", "words"),
    [
        ({}, {}, ""),
        ({"num_processes": 1}, {}, ""),
        ({}, {"JAX_NUM_PROCESSES": "1"}, ""),
        (PAIR, {}, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({}, VARIABLES, "several processes ON: this is number 3 of 4; they meet at b:2"),
        (PAIR, VARIABLES, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({"coordinator_address": "auto"}, VARIABLES, "several processes ON: as many as JAX detects"),
        ({}, VARIABLES | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID='first' is no number"),
        ({"num_processes": 2}, {}, "nothing says where they meet: set distributed.coordinator_address"),
        (ADDRESS | {"process_id": 0}, {}, "distributed.num_processes is missing"),
        (ADDRESS | {"num_processes": 2}, {}, "process_id is missing: give it (or JAX_PROCESS_ID)"),
        (PAIR | {"process_id": 2}, {}, "distributed.num_processes=2: they are numbered 0 to 1"),
    ],
)
def test_keys_and_environment_number_the_process(monkeypatch, keys, variables, words):
    for variable in KEYS.values():
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    config = Config(distributed=DistributedConfig(**keys))
    if words and not words.startswith("several"):
        with pytest.raises(UserError) as refused, init_distributed(config):
            pass
        assert words in str(refused.value)
        return
    assert describe_processes(config) == [words] * bool(words)
    with pytest.raises(UserError, match="calibadv export runs in") if words else nullcontext():
        require_single_process(config.distributed, "export")
    if not words:
        with init_distributed(config) as process_group:
            assert (
                process_group.process_count == 1 and process_group.is_main and process_group.can_save_together
            )
        assert jax._src.distributed.global_state.client is None


WORKERS = [f"http://node{number}:8100" for number in range(5)]


@pytest.mark.parametrize(
    ("sampler", "shares"),
    [
        ({"urls": WORKERS}, [WORKERS[:2], WORKERS[2:]]),
        ({"urls": WORKERS}, [[worker] for worker in WORKERS]),
        ({"workers": 4, "worker_devices": ["0", "1", "2", "3"]}, [["0", "1"], ["2", "3"]]),
        ({"workers": 4, "worker_devices": ["0", "1", "2", "3"]}, [["0"], ["1"], ["2"], ["3"]]),
    ],
)
def test_process_has_its_own_vllm_workers(sampler, shares):
    config = SamplerConfig(name="vllm", **sampler)
    sections = [workers_of_process(config, index, len(shares)) for index in range(len(shares))]
    assert [section.urls or section.worker_devices for section, _ in sections] == shares
    assert [first for _, first in sections] == [sum(map(len, shares[:index])) for index in range(len(shares))]
    if "workers" in sampler:
        assert [section.workers for section, _ in sections] == [len(share) for share in shares]
    assert workers_of_process(config, 0, 1) == (config, 0)


class OnMachines(ProcessGroup):
    """All processes have the same config and devices."""

    process_count = 2

    def __init__(self, *machines):
        self.machines = machines


TOO_FEW = "names 1 vLLM worker for 2 processes: each process needs one .*; start 1"
UNEVEN = "sampler.workers is 3, for 2 processes .* as many each: set it to a multiple of 2"


@pytest.mark.parametrize(
    ("machines", "section", "keys", "message"),
    [
        ("aa", "retriever", {}, ""),
        ("ab", "retriever", {}, "retriever.url is empty, and the processes are on 2 machines"),
        ("ab", "retriever", {"url": "http://c:1"}, ""),
        ("aa", "sampler", {"name": "vllm", "workers": 3}, UNEVEN),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:1]}, TOO_FEW),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:2]}, ""),
    ],
)
def test_services_must_fit_several_processes(machines, section, keys, message):
    config = replace(Config(), **{section: replace(getattr(Config(), section), **keys)})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        _check_processes(config, OnMachines(*machines))
    if section == "sampler" and message:
        with pytest.raises(UserError, match=message):
            describe_processes(replace(config, distributed=DistributedConfig(**PAIR)))


# The imports take longest: every process is a fork of one program, before it has a device.
PROGRAM = """
import json, os, select, signal, sys, threading
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from calibadv_jax.cli import run_and_exit
from calibadv_jax.config import Config, DistributedConfig, RunConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.distributed import joining, watchdog

watchdog.HEARTBEAT_SECONDS, watchdog.READ_NOTES_SECONDS = 0.1, 2.0
# An error waits until the watchdog says which process is lost, however busy the machine is.
joining.LOST_PROCESS_SECONDS = 100.0
SLURM = {"STEP_NODELIST": "127.0.0.1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "JOB_ID": "1"}

def refuse():
    raise UserError("run.dir=x holds another experiment")

def save(process_group, name, folder):
    from calibadv_jax.snapshots.checkpoint import CheckpointStore

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = np.random.default_rng(0).random((process_group.process_count, 80_000), np.float32)
    state = {"params": jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])}
    barrier = process_group.save_barrier()
    store = CheckpointStore(Path(folder) / "checkpoints", 9, name == "asynchronous", barrier)
    for step in range(1, 9):
        if (name, process_group.process_index, step) == ("lost", 2, 2):
            raise EnvironmentFailure("no disk")
        store.save(step, state, {"step": step})
        with process_group.barrier("checkpoint"):
            store.wait()
    store.close()

def signal_during(wait):
    # A process calls it only once it has greeted process 0.
    def signalled_wait(*arguments):
        select.select = wait
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        return wait(*arguments)
    return signalled_wait

def work(name, index, port):
    count = 3 if name in ("signal", "kill", "lost") else 2  # "signal": of which the last one never comes
    place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
    if name == "signal" and index:
        select.select = signal_during(select.select)
    if name in ("slurm", "undetected"):
        place = {"coordinator_address": "auto"}
    if name == "slurm":
        os.environ |= {f"SLURM_{key}": value for key, value in SLURM.items()}
    jax.config.update("jax_num_cpu_devices", 1 + index * (name == "devices"))
    # Only a killed process is found by its silence; all other ends are told, at once.
    section = DistributedConfig(**place, timeout=8.0 if name in ("kill", "lost") else 30.0)
    config = Config(distributed=section, run=RunConfig(seed=index * (name == "config")))
    with joining.init_distributed(config) as process_group:
        if name == "fault" and index:
            raise ValueError("a fault")
        if name == "disk" and index:
            raise OSError(28, "No space left on device", "metrics.jsonl")
        if name == "first":
            process_group.run_on_main_and_broadcast("folder", refuse)
        if len(sys.argv) > 2:
            return save(process_group, name, sys.argv[2])
        if name == "kill":  # while the others wait for it in a program of all devices
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            multihost_utils.process_allgather(np.zeros(9))
        values = process_group.all_gather("values", np.full(5 + 9995 * index, index))  # short, long
        sums = [(len(each), int(each.sum())) for each in values]
        sys.stderr.write(f"{process_group.process_count} of {sums}")

places, statuses = {}, {}
for name, index, port, path in json.loads(sys.argv[1]):
    if pid := os.fork():
        places[pid] = path
    else:
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
        run_and_exit(lambda: work(name, index, port))
while places:
    pid, status = os.wait()
    statuses[places.pop(pid)] = os.waitstatus_to_exitcode(status)
print(json.dumps(statuses))
"""
BOTH = "2 of [(5, 0), (10000, 10000)]"
AGAIN = "start all processes again"
LOST = "error: process 1 (HOST) is lost: no sign of life for"
ENDS = {  # of each process: its status, and the end of what it says
    "agree": [(0, BOTH), (0, BOTH)],
    "config": [
        (2, "process 1 (HOST) has another section 'run' in its config than process 0 (HOST): start"),
        (2, "process 0 (HOST) has another section 'run' in its config than process 1 (HOST): start"),
    ],
    "devices": [(2, "the processes have [1, 2] devices")] * 2,
    "fault": [(75, f"process 1 (HOST) has ended: ValueError a fault; {AGAIN}"), (1, "ValueError: a fault")],
    "disk": [(75, "process 1 (HOST) has ended: OSError"), (75, "error: metrics.jsonl: No space left")],
    "first": [(2, "error: run.dir=x"), (2, "process 0 (HOST) has ended: run.dir=x")],
    "signal": [
        (75, "error: process 1 ended, or lost the connection, before"),
        (143, "stopped"),
    ],
    "kill": [(75, LOST), (-9, ""), (75, LOST)],
    "slurm": [(0, "1 of [(5, 0)]")],
    "undetected": [(75, "could not join the job's processes (auto)")],
}


def ends_of(folder, counts, *place):
    """Status and standard error of each process that a start ends with, by its name and number."""
    starts = []
    for name, count in counts.items():
        port = hosts_rig.free_port()
        starts += [(name, index, port, str(folder / f"{name}{index}")) for index in range(count)]
    command = [sys.executable, "-c", PROGRAM, json.dumps(starts), *map(str, place)]
    options = {"cwd": hosts_rig.ROOT, "env": hosts_rig.environment(1), "text": True, "timeout": 240}
    done = subprocess.run(command, capture_output=True, **options)
    statuses = json.loads(done.stdout.splitlines()[-1])
    names = sorted(statuses)
    return {Path(name).name: (statuses[name], Path(name).read_text()) for name in names}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ends_of(tmp_path_factory.mktemp("ended"), {name: len(ends) for name, ends in ENDS.items()})


@pytest.mark.parametrize("name", ENDS)
def test_processes_end_together_with_their_status(ended, name):
    for index, (status, words) in enumerate(ENDS[name]):
        actual, errors = ended[f"{name}{index}"]
        assert actual == status and words in errors.replace(f"({socket.gethostname()})", "(HOST)"), errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_full_disk_ends_both_processes(small_disk, tmp_path, name):
    """With one line each and status 75; the checkpoints before are whole."""
    for status, errors in ends_of(tmp_path, {name: 2}, small_disk).values():
        lines = errors.splitlines()
        assert status == 75 and len(lines) == 1 and lines[0].startswith("error: "), errors
        assert "No space left on device" in lines[0] or "has ended" in lines[0], errors
    steps = [path.name for path in (small_disk / "checkpoints").iterdir() if path.name.isdigit()]
    assert sorted(steps) == [str(step) for step in range(1, len(steps) + 1)] and 0 < len(steps) < 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lost_process_is_named_by_the_others(tmp_path):
    """A save without one of three processes fails in JAX; that is no failure of the disk."""
    *others, last = ends_of(tmp_path, {"lost": 3}, tmp_path / "saved").values()
    assert last == (75, "error: no disk\n")
    for status, errors in others:
        assert status == 75 and errors.startswith("error: process 2 (") and "no disk" in errors, errors
