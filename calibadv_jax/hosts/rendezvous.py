"""Waits until all processes of a run have started, and names those that are missing.

JAX waits five minutes in silence, and then ends the process with a C++ stack. So the processes come to
process 0 at the coordinator's port before JAX opens it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from calibadv_jax.core.errors import EnvironmentFailure, UserError

PERIOD = 0.5  # seconds between two looks
PATIENCE = 10  # times the timeout after which a process is given up
LINE = 300  # bytes of a message at most
_HELLO, _GO = b"calibadv", b"go\n"


def meet(address: str, count: int, index: int, timeout: float, warn: Callable[[str], object]) -> None:
    """Wait until all processes have started.

    Args:
        address: of process 0, as host:port.
        timeout: seconds after which `warn` gets a line that names the missing processes; they are given up
            after `PATIENCE` times as long.

    Raises:
        UserError: `address` has no port, or the processes disagree about their numbers.
        EnvironmentFailure: processes are missing, or one has ended while it waited.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UserError(f"distributed.coordinator_address={address} names no port; set it to host:port")
    wait = _Wait(timeout, warn)
    if index:
        _come(host.strip("[]"), int(port), count, index, wait)
    else:
        bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address).rpartition(":")[2]
        _receive(int(bound), count, wait)


class _Wait:
    def __init__(self, timeout: float, warn: Callable[[str], object]):
        self._timeout, self._warn, self._begun, self._has_warned = timeout, warn, time.monotonic(), False

    def check(self, missing: str) -> None:
        seconds = time.monotonic() - self._begun
        if seconds > PATIENCE * self._timeout:
            raise EnvironmentFailure(
                f"{missing} did not start within {seconds:.0f} s; start every process, with the same"
                " distributed.coordinator_address and num_processes, at an address that all reach"
            )
        if seconds > self._timeout and not self._has_warned:
            self._has_warned = True
            self._warn(f"waiting for {missing} since {seconds:.0f} s")


def _receive(port: int, count: int, wait: _Wait) -> None:
    """Wait in process 0 until all others are connected, and let them go."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise EnvironmentFailure(
            f"distributed.coordinator_address: port {port} cannot be opened ({error.strerror}); end the"
            " process that has it, or choose another port"
        ) from error
    present: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        stack.enter_context(listener).settimeout(PERIOD)
        try:
            while len(present) < count - 1:
                wait.check(_names(index for index in range(1, count) if index not in present))
                if gone := [index for index, connection in present.items() if _has_ended(connection)]:
                    raise EnvironmentFailure(
                        f"{_names(gone)} ended before all had started; start all processes again"
                    )
                with suppress(TimeoutError):
                    connection = stack.enter_context(listener.accept()[0])
                    _admit(connection, count, present)
        except UserError as error:
            _send(present.values(), f"process 0 has ended: {error}\n".encode())
            raise
        _send(present.values(), _GO)
        for connection in present.values():  # they close first, so that JAX can open the port at once
            with suppress(OSError):
                connection.settimeout(PERIOD)
                connection.recv(1)


def _admit(connection: socket.socket, count: int, present: dict[int, socket.socket]) -> None:
    """Read which process this is; anything else that connects is left alone."""
    connection.settimeout(PERIOD)
    with suppress(OSError):
        hello, *numbers = connection.recv(LINE).split() or [b""]
        if hello != _HELLO or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            return
        index, other = map(int, numbers)
        if other != count or not 0 < index < count or index in present:
            raise UserError(
                f"distributed: two processes are number {index}"
                if index in present
                else f"distributed.num_processes is {other} in process {index} and {count} in process 0"
            )
        present[index] = connection


def _come(host: str, port: int, count: int, index: int, wait: _Wait) -> None:
    """Connect to process 0, and wait until it lets all processes go."""
    while True:
        wait.check(f"process 0 ({host}:{port})")
        try:
            connection = socket.create_connection((host, port), timeout=2.0)
            break
        except OSError:  # not started yet, or its name is not known yet
            time.sleep(PERIOD)
    answer = b""
    with connection:
        connection.sendall(b"%s %d %d\n" % (_HELLO, index, count))
        connection.settimeout(PERIOD)
        while not answer.endswith(b"\n") and len(answer) < LINE:
            wait.check("another process (process 0 says which)")
            try:
                part = connection.recv(LINE)
            except TimeoutError:
                continue
            except OSError:
                part = b""
            if not part:
                break
            answer += part
    if answer != _GO:
        text = answer.decode(errors="replace").strip() if answer.startswith(b"process 0") else ""
        raise EnvironmentFailure(
            text or f"process 0 ({host}:{port}) ended before all had started; start all processes again"
        )


def _send(connections: Iterable[socket.socket], text: bytes) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.sendall(text)


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _names(indices: Iterable[int]) -> str:
    names = [str(index) for index in indices]
    return f"process {names[0]}" if len(names) == 1 else f"processes {', '.join(names)}"
