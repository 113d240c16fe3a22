"""Exchange values between the processes of a run, and stop all of them at the same place.

All processes run the same program. Work of one process, such as its share of the rollouts, stands in a
`local_work` block; there a signal or an error stops a process at once. At the end of the block is a barrier:
if one process stops, all stop, at the same step and with the same parameters, so that they can save them
together. Programs of all devices stand outside of these blocks: a signal waits for the next barrier, and an
error leaves the others waiting in the middle of a program, so that `Watch` must end them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from calibadv_jax.core import trajectory
from calibadv_jax.core.errors import (
    ENVIRONMENT_STATUS,
    INPUT_STATUS,
    EnvironmentFailure,
    UserError,
    cause_text,
    exit_status,
)
from calibadv_jax.core.stopping import CALLED, Stop
from calibadv_jax.core.trajectory import Group, Question

T = TypeVar("T")

INLINE = 2**14  # bytes; longer values go from device to device: the coordination service is slow
WAIT = 2000  # milliseconds; between two waits a signal's handler may run
PERIOD = 1.0  # seconds between two checks
LAST_WORDS = 4 * PERIOD  # for which process 0, which keeps the notes, outlives the others
ALIVE, ENDED, STOPPING, DONE = "alive", "ended", "stopping", "done"
_ROOT = "calibadv_watch"
# Anyone who reaches the coordination service can write there, so bytes must not name a function to call.
_TRAJECTORIES = {"Document", "Group", "Message", "Question", "Trajectory", "Turn"}
_ARRAYS = {("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.numeric", "_frombuffer")}
_ARRAYS |= {("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")}


class Hosts:
    """One process alone: nothing to exchange, and nobody to wait for."""

    index, count = 0, 1
    in_step = True  # after an error: all processes have stopped at the same place and can still save together

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def exchange(self, name: str, value: T) -> list[T]:
        """Return the values of all processes, which call this in one order; raises if another stops here."""
        return [value]

    def run_on_main_and_broadcast(self, name: str, work: Callable[[], T]) -> T:
        """Do `work` in process 0 alone, and return its result in all; raises its error, or as `exchange`."""
        return work()

    def out_of_step(self) -> None:
        """Note that an operation of all processes has failed in this one."""

    def save_barrier(self) -> SaveBarrier | None:
        """Return a new barrier for the threads that save checkpoints; None for one process."""
        return None

    @contextmanager
    def steps(self, stop: Stop) -> Iterator[None]:
        """Within the block a signal ends the process in `local_work` or at a barrier only."""
        yield

    @contextmanager
    def local_work(self, name: str) -> Iterator[None]:
        """As `barrier`; a signal ends the block at once, in all processes."""
        yield

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        """Wait for all processes at the end of the block. If it failed in one, it fails in all."""
        yield

    def assert_equal(self, name: str, value: Callable[[], object]) -> None:
        """Refuse (UserError) a value that is not the same in all processes; alone, it is not computed."""

    def share(self, key: str, folder: Path) -> None:
        """Refuse (UserError) a folder, the value of a config key, that is not the same for all processes."""


ALONE = Hosts()


class Joined(Hosts):
    """One of several processes that JAX has brought together; `client` is of its coordination service."""

    def __init__(self, client: Any, index: int, count: int, timeout: float):
        self.index, self.count, self.in_step = index, count, False
        self._client, self._timeout = client, timeout
        self._all_gather = _AllGather(client, "calibadv_exchange", index, count)
        self.machines = [""] * count
        self._stop = Stop()  # no signal reaches it, until there are steps
        self._starting = ExitStack()
        self._starting.enter_context(self._stop.held())
        self._agreed: BaseException | None = None  # the error with which all have stopped
        self.watch = Watch(client, self, timeout)
        self.watch.start()
        self.machines = self.exchange("names", socket.gethostname())

    def named(self, index: int) -> str:
        return f"process {index}" + (f" ({self.machines[index]})" if self.machines[index] else "")

    def exchange(self, name: str, value: T) -> list[T]:
        data = to_bytes(value)
        with self._stop.held():  # the others rely on this process now
            heads = self._meet(name, len(data), data if len(data) <= INLINE else b"")
            parts = [head.short for head in heads]
            longest = max(head.length for head in heads)
            if longest > INLINE:
                # Few different lengths: each is a program.
                padded = np.zeros(2 ** int(np.ceil(np.log2(longest))), np.uint8)
                padded[: len(data)] = np.frombuffer(data, np.uint8)
                rows = multihost_utils.process_allgather(padded)
                parts = [row[: head.length].tobytes() for row, head in zip(rows, heads, strict=True)]
        return [from_bytes(part) for part in parts]

    def run_on_main_and_broadcast(self, name: str, work: Callable[[], T]) -> T:
        with self.local_work(name):
            value: Any = work() if self.is_first else None
        return self.exchange(name, value)[0]

    def out_of_step(self) -> None:
        self.in_step = False

    def save_barrier(self) -> SaveBarrier:
        return SaveBarrier(self._client, self.index, self.count, self.named)

    @contextmanager
    def steps(self, stop: Stop) -> Iterator[None]:
        self._stop = stop
        with stop.held():
            yield
            self._meet("the last step")

    @contextmanager
    def local_work(self, name: str) -> Iterator[None]:
        with self.barrier(name), self._stop.released():
            yield

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is not self._agreed:
                self._leave(name, error)
            raise
        self._meet(name)

    def assert_equal(self, name: str, value: Callable[[], object]) -> None:
        with self.barrier(name):
            local_value = value()
            for index, other_value in enumerate(self.exchange(name, local_value)):
                if other_value != local_value:
                    fault = f"{self.named(index)} has another {name} than {self.named(self.index)}"
                    raise UserError(f"{fault}: start all processes with the same config and the same files")

    def share(self, key: str, folder: Path) -> None:
        file = folder / self.run_on_main_and_broadcast(key, lambda: f".seen_by_all_{secrets.token_hex(8)}")
        try:
            self.run_on_main_and_broadcast(key, file.touch)
            with self.barrier(key):
                until = time.monotonic() + self._timeout  # a network's file system may be slow
                while not file.exists():
                    if time.monotonic() > until:
                        raise UserError(
                            f"{key}={folder}: {self.named(self.index)} does not see there what"
                            f" {self.named(0)} writes: all processes must share one folder"
                        )
                    time.sleep(0.1)
        finally:
            if self.is_first:
                file.unlink(missing_ok=True)

    def final_barrier(self) -> None:
        """Wait for all processes at the end of the run, and watch them no more."""
        self._send(_Head("the end"))
        self.watch.close()

    def _meet(self, name: str, length: int = 0, short: bytes = b"") -> list[_Head]:
        """Wait until all processes are here; raise as `exchange`."""
        # A signal after this process has sent its head counts at the next barrier: all must see the same.
        heads = self._send(_Head(name, length, short, status=self._own_status()))
        if any(head.error or head.status is not None for head in heads):
            self._stop_with(heads)
        for index, head in enumerate(heads):
            if head.name != name:
                raise RuntimeError(f"{self.named(index)} came for {head.name!r}, this process for {name!r}")
        return heads

    def _leave(self, name: str, error: BaseException) -> None:
        """Say at the next barrier that this process stops, and wait for the others; raises if called."""
        with suppress(jax.errors.JaxRuntimeError):
            self.watch.note(STOPPING, "")
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        message = "" if status is not None else f"{kind}{' '.join(str(error).split())}"
        called = self._stop.was_called and status is not None
        failure = exit_status(error) if isinstance(error, UserError) else ENVIRONMENT_STATUS
        head = _Head(name, error=message, status=None if called else status, failure=failure)
        try:
            heads = self._send(head, time.monotonic() + 2 * self._timeout)
        except (TimeoutError, jax.errors.JaxRuntimeError):
            return  # not in step: `Watch` ends the others
        if called:
            self._stop_with(heads)
        self._agreed, self.in_step = error, True

    def _stop_with(self, heads: list[_Head]) -> NoReturn:
        failed = {index: head.error for index, head in enumerate(heads) if head.error}
        statuses = (*(head.status for head in heads), self._own_status())
        error: BaseException = SystemExit(next(filter(None, statuses), CALLED))
        for index, message in failed.items():
            kind = UserError if heads[index].failure == INPUT_STATUS else EnvironmentFailure
            error = kind(f"{self.named(index)} has ended: {message}")
        self._agreed, self.in_step = error, True
        raise error

    def stopping(self) -> None:
        """Another process stops. Its note may come late: after the barrier it breaks off nothing.

        Nor does it take the place of an error with which this process ends already.
        """
        if self._agreed is None and sys.exc_info()[1] is None:
            self._stop.call()

    def _own_status(self) -> int | None:
        return None if self._stop.was_called else self._stop.status

    def _send(self, head: _Head, until: float = math.inf) -> list[_Head]:
        """Return the heads of all processes; TimeoutError if one is missing at `until` (monotonic)."""

        def check() -> None:
            if self._stop.status is not None:  # a signal came meanwhile: the others must not take their time
                self.watch.note(STOPPING, "")
            if time.monotonic() >= until:
                raise TimeoutError(head.name)

        return [_Head(*values) for values in self._all_gather(astuple(head), check)]


@dataclass(frozen=True)
class _Head:
    name: str  # of the barrier
    length: int = 0  # bytes of its value
    short: bytes = b""  # the value, if it is short
    error: str = ""  # why it stops here
    failure: int = 0  # exit status of that error
    status: int | None = None  # with which it stops here


class _AllGather:
    """All-gather of short values through JAX' coordination service; every call is a barrier."""

    def __init__(self, client: Any, root: str, index: int, count: int):
        self._client, self._root, self._index, self._count = client, root, index, count
        self._number = 0  # of the next call

    def __call__(self, value: Any, check: Callable[[], object]) -> list[Any]:
        """Return the values of all processes, by their numbers; `check` may raise, after every WAIT."""
        number, self._number = self._number, self._number + 1
        self._client.key_value_set_bytes(f"{self._root}/{number}/{self._index}", to_bytes(value))
        values = [self._wait(f"{self._root}/{number}/{index}", check) for index in range(self._count)]
        if number:  # whoever is here has read all of the call before
            self._client.key_value_delete(f"{self._root}/{number - 1}/{self._index}")
        return values

    def _wait(self, key: str, check: Callable[[], object]) -> Any:
        while True:
            try:
                return from_bytes(self._client.blocking_key_value_get_bytes(key, WAIT))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            check()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS or (module == trajectory.__name__ and name in _TRAJECTORIES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that processes of a run send each other")


def to_bytes(value: Any) -> bytes:
    """Serialise plain values, NumPy arrays and groups of trajectories."""
    return pickle.dumps(value, protocol=5)


def from_bytes(data: bytes) -> Any:
    """Deserialise `to_bytes`; raise pickle.UnpicklingError for anything else."""
    return _Reader(io.BytesIO(data)).load()


class SaveBarrier:
    """The barrier of the threads with which all processes save a checkpoint; an error in one ends all waits.

    In place of Orbax' own, where the others wait 20 minutes for a thread that has failed.
    """

    def __init__(self, client: Any, index: int, count: int, named: Callable[[int], str]):
        self._all_gather, self._named = _AllGather(client, "calibadv_save", index, count), named
        self._failure: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        return self._failure is not None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes; raise OSError if one could not write, or the error of this one."""
        if self._failure is not None:
            raise self._failure
        # Orbax comes to its last barrier with the error that its thread met.
        is_main = threading.current_thread() is threading.main_thread()
        failure = None if is_main else sys.exc_info()[1]
        text = "" if failure is None else cause_text(failure)
        states = self._all_gather((key, text), _check_main_thread)
        failed = [f"{self._named(index)}: {text}" for index, (_, text) in enumerate(states) if text]
        if failed or len({key for key, _ in states}) > 1:
            self._failure = failure or OSError("; ".join(failed) or "another process could not save its part")
            raise self._failure

    def reset(self) -> None:
        """Begin a new save: all processes have seen how the one before ended."""
        self._failure = None


def _check_main_thread() -> None:
    if not threading.main_thread().is_alive():  # the process ends, and waits for this thread
        raise threading.BrokenBarrierError


class Watch:
    """Notes of all processes about themselves, and the thread that reads them, once a second.

    A program of all devices waits for ever for a process that is gone, and no Python runs meanwhile in the
    thread that began it. So this thread ends the process.

    Process 0 keeps the notes (`client`). Without news for `timeout` seconds a process is lost. The `stopping`
    of `hosts` is called in the main thread when another process stops.
    """

    def __init__(self, client: Any, hosts: Joined, timeout: float):
        self._client, self._hosts, self._timeout = client, hosts, timeout
        self._over = threading.Event()
        self._has_called = False
        self._thread = threading.Thread(target=self._watch, name="watch of the other processes", daemon=True)

    def start(self) -> None:
        self.note(ALIVE, "0")
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            signal.signal(signal.SIGUSR1, lambda *_: self._hosts.stopping())
        self._thread.start()

    def close(self) -> None:
        """Stop watching, when this process and the others no longer need each other."""
        self.note(DONE, "")
        self._over.set()
        self._thread.join()

    def note(self, kind: str, text: str) -> None:
        self._client.key_value_set(f"{_ROOT}/{kind}/{self._hosts.index}", text, allow_overwrite=True)

    def last_words(self, text: str) -> None:
        """Report why this process ends, which ends the others, and wait until they have read it."""
        self._over.set()  # this process has an error line of its own
        with suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, and the notes with it
            self.note(ENDED, text)
        if self._hosts.index == 0:
            time.sleep(LAST_WORDS)

    def _watch(self) -> None:
        heard: dict[int, tuple[str, float]] = {}  # last sign of life and its time, by process
        checked = time.monotonic()
        for number in range(1, sys.maxsize):
            if self._over.wait(PERIOD):
                return
            try:
                self.note(ALIVE, str(number))
                notes = self._notes()
            except jax.errors.JaxRuntimeError as error:
                why = str(error).partition("\n")[0][:200]
                self._end(f"{self._hosts.named(0)} is gone, or cannot be reached ({why})")
                return
            now = time.monotonic()
            was_paused, checked = now - checked > self._timeout / 2, now
            for index in range(self._hosts.count):
                text = notes.get((ALIVE, index), "")
                if was_paused or index not in heard or heard[index][0] != text:
                    heard[index] = text, now
            self._act(notes, {index: now - since for index, (_, since) in heard.items()})

    def _act(self, notes: dict[tuple[str, int], str], silent: dict[int, float]) -> None:
        for (kind, index), text in notes.items():
            if kind == ENDED and index != self._hosts.index:
                self._end(f"{self._hosts.named(index)} has ended: {text}")
        for index, seconds in silent.items():
            if seconds > self._timeout and (DONE, index) not in notes:
                self._end(f"{self._hosts.named(index)} is lost: no sign of life for {seconds:.0f} s")
        others_stop = any(kind == STOPPING and index != self._hosts.index for kind, index in notes)
        if others_stop and not self._has_called:
            self._has_called = True
            # A signal ends what the main thread waits for.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _notes(self) -> dict[tuple[str, int], str]:
        notes = {}
        for path, text in self._client.key_value_dir_get(f"{_ROOT}/"):
            *_, kind, index = path.split("/")
            notes[kind, int(index)] = text
        return notes

    def _end(self, why: str) -> None:
        line = f"error: {why}; start all processes again: the run goes on from its newest checkpoint\n"
        with suppress(OSError):
            os.write(sys.stderr.fileno(), line.encode(errors="replace"))
        if self._hosts.index == 0:
            time.sleep(LAST_WORDS)
        os._exit(ENVIRONMENT_STATUS)


LOOK = 1.0  # seconds between two exchanges of what is complete, where groups run ahead


class SharedGroups:
    """Begin the groups whose number falls to this process, and exchange complete groups.

    All processes begin the same groups in the same order. `begin` starts the rollout of (number, question)
    here. Unless groups of later steps `run_ahead`, a step waits for all of its own, and exchanges them once.
    """

    def __init__(self, begin: Callable[[int, Question], Future[Group]], hosts: Hosts, run_ahead: bool):
        self._begin, self._hosts, self._run_ahead = begin, hosts, run_ahead
        self._own: dict[int, Future[Group]] = {}
        self._all: dict[int, Future[Group]] = {}

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Return a future that all processes fulfil in the same call of `wait`; it can be cancelled."""
        shared = self._all[number] = Future()
        if number % self._hosts.count == self._hosts.index:
            rollout = self._own[number] = self._begin(number, question)
            shared.add_done_callback(lambda future: future.cancelled() and rollout.cancel())
        return shared

    def wait(self, _: list[Future[Group]]) -> None:
        """Wait until all groups are there (one, where some run ahead); raises the error of any rollout."""
        seconds, until = (LOOK, FIRST_COMPLETED) if self._run_ahead else (None, ALL_COMPLETED)
        while True:
            wait(self._own.values(), seconds, until)
            done = {number: future.result() for number, future in self._own.items() if future.done()}
            self._own = {number: future for number, future in self._own.items() if number not in done}
            completed = self._hosts.exchange("groups", done)
            for groups in completed:
                for number, group in groups.items():
                    self._all.pop(number).set_result(group)
            if any(completed):
                return
