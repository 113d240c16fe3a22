"""The wait for processes that have not started: who is missing, and what ends it."""

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import hosts_rig
import pytest

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.hosts import joining


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


def test_processes_that_all_start_go_on():
    assert outcomes((0, 3), (1, 3), (2, 3)) == [([], None)] * 3


def test_missing_processes_are_named():
    (lines, error), (_, other) = outcomes((0, 4), (2, 4), timeout=0.3)
    assert len(lines) == 1 and lines[0].startswith("waiting for processes 1, 3 since")
    assert str(error).startswith("processes 1, 3 did not start within") and exit_status(error) == 75
    assert isinstance(other, EnvironmentFailure) and "another process" in str(other) or "1, 3" in str(other)
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
    # Who waits already hears why.
    heard = [str(other).startswith(f"process 0 has ended: {error}") for _, other in others]
    assert any(heard) == (len(processes) == 3) and all(exit_status(other) == 75 for _, other in others)


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
            with (
                suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", port)) as connection,
            ):
                return connection.sendall(text)

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


RESET = None  # the connection ends as that of a killed process
EARLY = "ended before all had started"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b"go", b"\n"], ""),
        ([b"process 0 has ended: no room\n"], "^process 0 has ended: no room$"),
        ([b"HTTP/1.1 400 Bad Request\n"], EARLY),
        ([], EARLY),
        ([b"go", RESET], EARLY),
    ],
    ids=str,
)
def test_answer_of_process_0_is_read_whole(parts, words):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        other = threads.submit(joining.meet, address, 3, 2, 10.0, print)
        with server.accept()[0] as connection:
            assert connection.recv(99) == b"calibadv 2 3\n"
            for part in parts:
                time.sleep(0.05)
                if part is RESET:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    connection.sendall(part)
        with pytest.raises(EnvironmentFailure, match=words) if words else nullcontext():
            other.result()


def test_port_in_use_is_an_environment_failure():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFailure, match=f"port {port} cannot be opened"):
            joining.meet(f"127.0.0.1:{port}", 2, 0, 1.0, print)
    with pytest.raises(UserError, match="names no port"):
        joining.meet("host", 2, 0, 1.0, print)
