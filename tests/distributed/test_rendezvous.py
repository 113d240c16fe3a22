"""How processes wait for each other before they join, with threads in their place."""

import queue
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import hosts_rig
import pytest

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.distributed import rendezvous
from calibadv_jax.distributed.rendezvous import wait_for_processes


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "GIVE_UP_FACTOR", 4)


def outcomes(*processes, timeout=10.0):
    """The warnings and the error of `wait_for_processes` in processes of (index, count)."""
    address = f"127.0.0.1:{hosts_rig.free_port()}"

    def start(process):
        (index, count), lines, failure = process, [], None
        try:
            wait_for_processes(address, count, index, timeout, lines.append)
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
        (
            [b"calibadv 1 3\n"],
            EnvironmentFailure,
            "process 1 ended, or lost the connection",
        ),
        ([b"calibadv 0 3\n"], UserError, "two processes are number 0"),  # as on another machine
        (FOREIGN, None, ""),  # left alone
    ],
)
def test_process_0_judges_connections_that_end(texts, error, words):
    address = f"127.0.0.1:{hosts_rig.free_port()}"

    def meet(index):
        return wait_for_processes(address, 3, index, 10.0, print)

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(meet, 0)
        for text in texts:
            with connected(address) as connection:
                connection.sendall(text)
        if error:
            with pytest.raises(error, match=words):
                first.result()
        else:
            others = [threads.submit(meet, index) for index in (1, 2)]
            assert [process.result() for process in (first, *others)] == [None] * 3


@pytest.mark.parametrize("beginning", [b"", b"calibadv 1 "], ids=["late", "in two parts"])
def test_busy_process_is_admitted_when_its_greeting_is_whole(monkeypatch, beginning):
    """Also beside a program that stays connected and never says a word."""
    monkeypatch.setattr(rendezvous, "GIVE_UP_FACTOR", 200)
    address = f"127.0.0.1:{hosts_rig.free_port()}"
    warnings = queue.Queue()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(wait_for_processes, address, 2, 0, 0.3, warnings.put)
        silent, busy = connected(address), connected(address)
        with silent, busy:
            busy.sendall(beginning)
            # Process 0 has looked several times before it warns.
            assert warnings.get().startswith("waiting for process 1 since")
            busy.sendall(b"calibadv 1 2\n"[len(beginning) :])
            assert busy.recv(99) == b"go\n"
            busy.shutdown(socket.SHUT_WR)
            assert first.result() is None


def connected(address):
    """A connection to process 0, which may not listen yet."""
    host, _, port = address.partition(":")
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"go", b"", None], ids=str)
def test_other_answer_than_go_is_the_end_of_process_0(answer):
    """None: its connection ends as that of a killed process."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        other = threads.submit(wait_for_processes, address, 3, 2, 10.0, print)
        with server.accept()[0] as connection:
            assert connection.recv(99) == b"calibadv 2 3\n"
            if answer is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                connection.sendall(answer)
        with pytest.raises(EnvironmentFailure, match="process 0 .* ended, or the connection was lost"):
            other.result()


def test_idle_connections_are_kept_alive(monkeypatch):
    """Both ends: a process may wait for hours for the last one."""
    kept, keep_alive = [], rendezvous._keep_alive

    def note(connection):
        keep_alive(connection)
        is_kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        kept.append((bool(is_kept), connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)))

    monkeypatch.setattr(rendezvous, "_keep_alive", note)
    assert outcomes((0, 2), (1, 2)) == [([], None)] * 2
    assert kept == [(True, 30)] * 2


def test_process_0_that_ends_before_the_greeting_is_named(monkeypatch):
    server, place = socket.create_server(("127.0.0.1", 0)), socket.socket()
    place.connect(server.getsockname())
    other, _ = server.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    server.close()
    monkeypatch.setattr(rendezvous.socket, "create_connection", lambda *_, **__: place)
    with pytest.raises(EnvironmentFailure, match="process 0 .* ended, or the connection was lost"):
        wait_for_processes("127.0.0.1:1", 3, 2, 10.0, print)


def test_port_in_use_is_an_environment_failure():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFailure, match=f"port {port} cannot be opened"):
            wait_for_processes(f"127.0.0.1:{port}", 2, 0, 1.0, print)
    for address in ("host", "host:99999"):
        with pytest.raises(UserError, match="names no port"):
            wait_for_processes(address, 2, 0, 1.0, print)
