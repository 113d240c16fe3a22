"""The wait for processes that have not started: who is missing, and what ends it."""

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hosts_rig
import pytest

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.hosts import joining


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(joining, "PERIOD", 0.02)
    monkeypatch.setattr(joining, "PATIENCE", 4)


def outcomes(*processes, timeout=10.0):
    """What `meet` warns or raises in processes of (index, count) that start together."""
    address = f"127.0.0.1:{hosts_rig.free_port()}"

    def start(process):
        index, count = process
        lines = []
        try:
            joining.meet(address, count, index, timeout, lines.append)
        except UserError as error:
            return lines, error
        return lines, None

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(start, processes))


def test_processes_that_all_start_go_on():
    assert outcomes((0, 3), (1, 3), (2, 3)) == [([], None)] * 3


def test_missing_processes_are_named():
    (lines, error), (_, other) = outcomes((0, 4), (2, 4), timeout=0.3)
    assert len(lines) == 1 and lines[0].startswith("waiting for processes 1, 3 since")
    assert str(error).startswith("processes 1, 3 did not start within") and exit_status(error) == 75
    assert isinstance(other, EnvironmentFailure) and "another process" in str(other) or "1, 3" in str(other)


def test_missing_process_0_is_named():
    [(lines, error)] = outcomes((1, 2), timeout=0.1)
    assert lines[0].startswith("waiting for process 0 (127.0.0.1:") and exit_status(error) == 75


def test_process_that_ends_while_waiting_ends_all():
    port = hosts_rig.free_port()

    def leave():
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"calibadv 1 3\n")
                    return
            except ConnectionRefusedError:
                continue

    with ThreadPoolExecutor(1) as threads:
        gone = threads.submit(leave)
        with pytest.raises(EnvironmentFailure, match="process 1 ended before all had started"):
            joining.meet(f"127.0.0.1:{port}", 3, 0, 10.0, print)
        gone.result()


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes are number 1"),
        ([(0, 3), (1, 2)], "num_processes is 2 in process 1 and 3 in process 0"),
    ],
)
def test_processes_that_disagree_are_refused(processes, message):
    assert message in str(outcomes(*processes)[0][1])


def test_port_in_use_is_an_environment_failure():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFailure, match=f"port {port} cannot be opened"):
            joining.meet(f"127.0.0.1:{port}", 2, 0, 1.0, print)
    with pytest.raises(UserError, match="names no port"):
        joining.meet("host", 2, 0, 1.0, print)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigterm_ends_the_wait_for_others():
    """Process 1 is stopped while process 2 is missing; process 0 ends too, with one line."""
    address = f"127.0.0.1:{hosts_rig.free_port()}"
    program = (
        "import sys\nfrom calibadv_jax.cli import end\n"
        "from calibadv_jax.config import Config, DistributedConfig\n"
        "from calibadv_jax.hosts.joining import joined\n"
        "place = {'coordinator_address': sys.argv[1], 'num_processes': 3, 'process_id': int(sys.argv[2])}\n"
        "config = Config(distributed=DistributedConfig(**place, timeout=5.0))\n"
        "end(lambda: joined(config).__enter__())"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(index)],
            cwd=hosts_rig.ROOT,
            env=hosts_rig.environment(1),
            text=True,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    assert "waiting for another process" in running[1].stderr.readline()
    running[1].send_signal(signal.SIGTERM)
    (errors, status), (_, stopped) = hosts_rig.ends(running, 60)
    assert (status, stopped) == (75, 143)
    assert errors.splitlines()[-1].startswith("error: process 1 ended before all had started"), errors
