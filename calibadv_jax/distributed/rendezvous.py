"""Wait over TCP until all processes of a run have started, before JAX connects them.

It names the processes that are missing, and it ends all processes as soon as one of them ends.

Process 0 listens at the coordinator's address. Every other process connects, and sends its number and the
number of processes. When all are connected, process 0 sends "go", the connections are closed, and JAX opens
the port.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from calibadv_jax.core.errors import EnvironmentFailure, UserError

POLL_SECONDS = 0.5  # between two checks whether a process is still missing
CONNECT_SECONDS = 2.0  # longest attempt to connect to process 0
GIVE_UP_FACTOR = 10  # a missing process is given up after this multiple of the timeout
LONGEST_MESSAGE = 300  # bytes
KEEPALIVE_SECONDS = 30  # between two probes of an idle connection, which networks between machines may drop

_HELLO = re.compile(rb"calibadv (\d+) (\d+)\s*")  # number of the process that connects, number of processes
_GO = b"go\n"


def wait_for_processes(
    address: str, count: int, index: int, timeout: float, warn: Callable[[str], object]
) -> None:
    """Wait until all processes of the run have started.

    Args:
        address: host:port of process 0.
        count: Number of processes.
        index: Number of this process.
        timeout: Seconds after which `warn` is called once.
        warn: Takes a line for the user that names the missing processes.

    Raises:
        UserError: The address has no port, or the processes disagree about their numbers.
        EnvironmentFailure: A process is missing after `timeout` × GIVE_UP_FACTOR, a process has ended, or the
            port cannot be opened.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UserError(f"distributed.coordinator_address={address} names no port; set it to host:port")
    timer = _StartTimer(timeout, warn)
    if index == 0:
        bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
        _accept_processes(int(bind_address.rpartition(":")[2]), count, timer)
    else:
        _report_to_main(host.strip("[]"), int(port), count, index, timer)


class _StartTimer:
    """The time that a process has waited: warns after `timeout` seconds, and gives up in the end."""

    def __init__(self, timeout: float, warn: Callable[[str], object]):
        self._timeout = timeout
        self._warn = warn
        self._started_at = time.monotonic()
        self._has_warned = False

    def check(self, missing: str) -> None:
        """Warn once after `timeout` seconds, and give up in the end.

        Args:
            missing: Names the missing processes in messages.

        Raises:
            EnvironmentFailure: More than GIVE_UP_FACTOR × `timeout` seconds have passed.
        """
        seconds = time.monotonic() - self._started_at
        if seconds > GIVE_UP_FACTOR * self._timeout:
            raise EnvironmentFailure(
                f"{missing} did not start within {seconds:.0f} s; start every process, with the same"
                " distributed.coordinator_address and num_processes, at an address that all reach"
            )
        if seconds > self._timeout and not self._has_warned:
            self._has_warned = True
            self._warn(f"waiting for {missing} since {seconds:.0f} s")


def _accept_processes(port: int, count: int, timer: _StartTimer) -> None:
    """In process 0: wait until all other processes have connected, and let them go on."""
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_ipv6)
    except OSError as error:
        raise EnvironmentFailure(
            f"distributed.coordinator_address: port {port} cannot be opened ({error.strerror}); end the"
            " process that has it, or choose another port"
        ) from error
    present: dict[socket.socket, int] = {}  # number of the process at the other end of each connection
    # What has come so far of the greeting of each other connection: a busy process may send it much later.
    greetings: dict[socket.socket, bytes] = {}
    with ExitStack() as stack:
        stack.enter_context(listener)
        while len(present) < count - 1:
            readable, _, _ = select.select([listener, *present, *greetings], [], [], POLL_SECONDS)
            missing = set(range(1, count)) - set(present.values())
            timer.check(_process_names(missing))
            # A connected process only waits, so its connection is readable only at its end. No process tries
            # to connect again: at the other end the run has ended too, and a scheduler starts all of it.
            ended = [present[connection] for connection in readable if connection in present]
            if ended:
                raise EnvironmentFailure(
                    f"{_process_names(ended)} ended, or lost the connection, before all had started; start"
                    " all processes again"
                )
            if listener in readable:
                connection, _ = listener.accept()
                _keep_alive(connection)
                connection.setblocking(False)
                stack.enter_context(connection)
                greetings[connection] = b""
            for connection in readable:
                if connection in greetings:
                    _admit(connection, count, present, greetings)
        for connection in present:
            connection.settimeout(POLL_SECONDS)
            with suppress(OSError):
                connection.sendall(_GO)
        # The others close their ends first, so that JAX can open the port at once.
        for connection in present:
            with suppress(OSError):
                connection.recv(1)


def _admit(
    connection: socket.socket,
    count: int,
    present: dict[socket.socket, int],
    greetings: dict[socket.socket, bytes],
) -> None:
    """Read on from a connection, and add it to `present` once its greeting is whole.

    The connection of another program is closed.
    """
    received = b""
    with suppress(OSError):
        received = connection.recv(LONGEST_MESSAGE)
    greeting = greetings.pop(connection) + received
    if received and b"\n" not in greeting and len(greeting) < LONGEST_MESSAGE:
        greetings[connection] = greeting
        return
    hello = _HELLO.fullmatch(greeting)
    if hello is None:
        connection.close()
        return
    index = int(hello[1])
    other_count = int(hello[2])
    if index in present.values() or (other_count == count and index == 0):
        raise UserError(f"distributed: two processes are number {index}")
    if other_count != count or index >= count:
        raise UserError(
            f"distributed.num_processes is {other_count} in process {index} and {count} in process 0"
        )
    present[connection] = index


def _report_to_main(host: str, port: int, count: int, index: int, timer: _StartTimer) -> None:
    """In another process: connect to process 0, and wait until it says that all have started."""
    while True:
        timer.check(f"process 0 ({host}:{port})")
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            break
        except OSError:  # process 0 has not started yet, or its name is not known yet
            time.sleep(POLL_SECONDS)
    _keep_alive(connection)
    with connection, connection.makefile("rb") as lines, suppress(OSError):
        connection.sendall(b"calibadv %d %d\n" % (index, count))
        while not select.select([connection], [], [], POLL_SECONDS)[0]:
            timer.check("another process (process 0 says which)")
        if lines.readline(LONGEST_MESSAGE) == _GO:
            return
    raise EnvironmentFailure(
        f"process 0 ({host}:{port}) ended, or the connection was lost, before all had started; see its error,"
        " and start all processes again"
    )


def _keep_alive(connection: socket.socket) -> None:
    """Let the system probe an idle connection, so that it is not dropped, or its loss is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):  # macOS lacks the first one
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEPALIVE_SECONDS)


def _process_names(indices: Iterable[int]) -> str:
    numbers = sorted(indices)
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    return f"processes {', '.join(map(str, numbers))}"
