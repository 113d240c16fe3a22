"""How processes learn of each other, wait for each other, join and end: alone, in threads, in processes."""

import json
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import hosts_rig
import jax
import pytest

from calibadv_jax.config import Config, DistributedConfig, SamplerConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.distributed import joining
from calibadv_jax.distributed.exchange import Hosts
from calibadv_jax.distributed.joining import (
    KEYS,
    _check,
    alone,
    describe_processes,
    init_distributed,
    own_workers,
)

ADDRESS = {"coordinator_address": "a:1"}
PAIR = ADDRESS | {"num_processes": 2, "process_id": 1}
VARIABLES = dict(zip(KEYS.values(), ("b:2", "4", "3"), strict=True))


@pytest.mark.parametrize(
    ("keys", "variables", "words"),
    [
        ({}, {}, ""),
        ({"num_processes": 1}, {}, ""),
        (PAIR, {}, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({}, VARIABLES, "several processes ON: this is number 3 of 4; they meet at b:2"),
        (PAIR, VARIABLES, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({"coordinator_address": "auto"}, VARIABLES, "several processes ON: as many as JAX detects"),
        ({}, VARIABLES | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID='first' is no number"),
        ({"num_processes": 2}, {}, "nothing says where they meet: set distributed.coordinator_address"),
        (ADDRESS | {"process_id": 0}, {}, "distributed.num_processes is missing"),
        (ADDRESS | {"num_processes": 2}, {}, "process_id is missing: give it (or JAX_PROCESS_ID)"),
        (PAIR | {"process_id": 2}, {}, "process_id is 2, but there are distributed.num_processes=2"),
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
        alone(config.distributed, "export")
    if not words:
        with init_distributed(config) as hosts:
            assert hosts.count == 1 and hosts.is_first and hosts.in_step
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
    sections = [own_workers(config, index, len(shares)) for index in range(len(shares))]
    assert [section.urls or section.worker_devices for section, _ in sections] == shares
    assert [first for _, first in sections] == [sum(map(len, shares[:index])) for index in range(len(shares))]
    if "workers" in sampler:
        assert [section.workers for section, _ in sections] == [len(share) for share in shares]
    assert own_workers(config, 0, 1) == (config, 0)


class OnMachines(Hosts):
    """All processes have the same config and devices."""

    count = 2

    def __init__(self, *machines):
        self.machines = machines


@pytest.mark.parametrize(
    ("machines", "section", "keys", "message"),
    [
        ("aa", "retriever", {}, ""),
        ("ab", "retriever", {}, "retriever.url is empty, and the processes are on 2 machines"),
        ("ab", "retriever", {"url": "http://c:1"}, ""),
        ("aa", "sampler", {"name": "vllm", "workers": 3}, "sampler.workers is 3, for 2 processes"),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:1]}, "names 1 vLLM worker for 2 .*; start 1"),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:2]}, ""),
    ],
)
def test_services_must_fit_several_processes(machines, section, keys, message):
    config = replace(Config(), **{section: replace(getattr(Config(), section), **keys)})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        _check(config, OnMachines(*machines))
    if section == "sampler" and message:
        with pytest.raises(UserError, match=message):
            describe_processes(replace(config, distributed=DistributedConfig(**PAIR)))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(joining, "PERIOD", 0.1)
    monkeypatch.setattr(joining, "PATIENCE", 4)


def outcomes(*processes, timeout=10.0):
    """The warnings and the error of `meet` in processes of (index, count) that start together."""
    address = f"127.0.0.1:{hosts_rig.free_port()}"

    def start(process):
        (index, count), lines, failure = process, [], None
        try:
            joining.meet(address, count, index, timeout, lines.append)
        except UserError as error:
            failure = error
        return lines, failure

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(start, processes))


def test_processes_wait_and_name_missing_ones():
    assert outcomes((0, 3), (1, 3), (2, 3)) == [([], None)] * 3
    (lines, error), (_, other) = outcomes((0, 4), (2, 4), timeout=0.3)
    assert len(lines) == 1 and lines[0].startswith("waiting for processes 1, 3 since")
    assert str(error).startswith("processes 1, 3 did not start within") and exit_status(error) == 75
    assert isinstance(other, EnvironmentFailure) and str(other).startswith(("another process", "process 0 ("))
    [(lines, error)] = outcomes((1, 2), timeout=0.1)
    assert lines[0].startswith("waiting for process 0 (127.0.0.1:") and exit_status(error) == 75


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes are number 1"),
        ([(0, 3), (1, 2)], "num_processes is 2 in process 1 and 3 in process 0"),
    ],
)
def test_processes_that_disagree_are_refused(processes, message):
    (_, error), *others = outcomes(*processes)
    assert message in str(error) and exit_status(error) == 2
    assert [exit_status(other) for _, other in others] == [75] * len(others)


FOREIGN = [b"GET / HTTP/1.1\n", b"calibadv\n", b"calibadv 1 3 3\n", b"calibadv one 3\n", b"other 1 3\n", b""]


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        ([b"calibadv 1 3\n"], EnvironmentFailure, "process 1 ended before all had started"),
        ([b"calibadv 0 3\n"], UserError, "two processes are number 0"),  # as on another machine
        (FOREIGN, None, ""),  # left alone
    ],
)
def test_process_0_judges_connections_that_end(texts, error, words):
    port = hosts_rig.free_port()

    def meet(index):
        return joining.meet(f"127.0.0.1:{port}", 3, index, 10.0, print)

    def connect(text):
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as place:
                return place.sendall(text)

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(meet, 0)
        for text in texts:
            connect(text)
        if error:
            with pytest.raises(error, match=words):
                first.result()
        else:
            others = [threads.submit(meet, index) for index in (1, 2)]
            assert [process.result() for process in (first, *others)] == [None] * 3


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"go", b"", None], ids=str)
def test_other_answer_than_go_is_the_end_of_process_0(answer):
    """None: its connection ends as that of a killed process."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        other = threads.submit(joining.meet, address, 3, 2, 10.0, print)
        with server.accept()[0] as connection:
            assert connection.recv(99) == b"calibadv 2 3\n"
            if answer is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                connection.sendall(answer)
        with pytest.raises(EnvironmentFailure, match="ended before all had started"):
            other.result()


def test_process_0_that_ends_before_the_greeting_is_named(monkeypatch):
    place, other = socket.socketpair()
    other.close()
    monkeypatch.setattr(joining.socket, "create_connection", lambda *_, **__: place)
    with pytest.raises(EnvironmentFailure, match="ended before all had started"):
        joining.meet("127.0.0.1:1", 3, 2, 10.0, print)


def test_port_in_use_is_an_environment_failure():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFailure, match=f"port {port} cannot be opened"):
            joining.meet(f"127.0.0.1:{port}", 2, 0, 1.0, print)
    for address in ("host", "host:99999"):
        with pytest.raises(UserError, match="names no port"):
            joining.meet(address, 2, 0, 1.0, print)


# The imports take longest: every process is a fork of one program, before it has a device.
PROGRAM = """
import json, os, signal, sys, threading
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from calibadv_jax.cli import end
from calibadv_jax.config import Config, DistributedConfig, RunConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.distributed import exchange, joining

exchange.PERIOD, exchange.LAST_WORDS, joining.MARGIN = 0.1, 0.5, 2.0
SLURM = {"STEP_NODELIST": "127.0.0.1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "JOB_ID": "1"}

def refuse():
    raise UserError("run.dir=x holds another experiment")

def save(hosts, name, folder):
    from calibadv_jax.snapshots.checkpoint import CheckpointStore

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = np.random.default_rng(0).random((hosts.count, 80_000), np.float32)
    state = {"params": jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])}
    store = CheckpointStore(Path(folder) / "checkpoints", 9, name == "asynchronous", hosts.save_barrier())
    for step in range(1, 9):
        if (name, hosts.index, step) == ("lost", 2, 2):
            raise EnvironmentFailure("no disk")
        store.save(step, state, {"step": step})
        with hosts.barrier("checkpoint"):
            store.wait()
    store.close()

def work(name, index, port):
    count = 3 if name in ("signal", "kill", "lost") else 2  # "signal": of which the last one never comes
    place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
    if name == "signal" and index:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if name in ("slurm", "undetected"):
        place = {"coordinator_address": "auto"}
    if name == "slurm":
        os.environ |= {f"SLURM_{key}": value for key, value in SLURM.items()}
    jax.config.update("jax_num_cpu_devices", 1 + index * (name == "devices"))
    section = DistributedConfig(**place, timeout=5.0)
    config = Config(distributed=section, run=RunConfig(seed=index * (name == "config")))
    with joining.init_distributed(config) as hosts:
        if name == "fault" and index:
            raise ValueError("a fault")
        if name == "disk" and index:
            raise OSError(28, "No space left on device", "metrics.jsonl")
        if name == "first":
            hosts.run_on_main_and_broadcast("folder", refuse)
        if len(sys.argv) > 2:
            return save(hosts, name, sys.argv[2])
        if name == "kill":  # while the others wait for it in a program of all devices
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            multihost_utils.process_allgather(np.zeros(9))
        values = hosts.exchange("values", np.full(5 + 9995 * index, index))  # a short and a long one
        sys.stderr.write(f"{hosts.count} of {[(len(each), int(each.sum())) for each in values]}")

places, statuses = {}, {}
for name, index, port, path in json.loads(sys.argv[1]):
    if pid := os.fork():
        places[pid] = path
    else:
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
        end(lambda: work(name, index, port))
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
    "signal": [(75, "error: process 1 ended before all had started"), (143, "stopped")],
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
    options = {"cwd": hosts_rig.ROOT, "env": hosts_rig.environment(1), "text": True, "timeout": 120}
    done = subprocess.run(command, capture_output=True, **options)
    statuses = json.loads(done.stdout.splitlines()[-1])
    names = sorted(statuses)
    return {Path(name).name: (statuses[name], Path(name).read_text()) for name in names}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ends_of(tmp_path_factory.mktemp("ended"), {name: len(ends) for name, ends in ENDS.items()})


@pytest.mark.timeout(120)
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
