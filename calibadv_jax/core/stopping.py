"""SIGTERM and SIGINT end a run in order: `held` work is finished, then SystemExit is raised."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

CALLED = 143  # status of a process that stops because another one does: as after SIGTERM
DAEMON_THREAD = "calibadv-daemon"  # name of threads that the end of the process does not wait for
GRACE = 5.0  # seconds for which the end of the process waits for the work of daemon threads

P = ParamSpec("P")
T = TypeVar("T")


class Stop:
    """Within the block, the first signal raises SystemExit in the main thread, or at the end of `held` work.

    The status is 143 for SIGTERM and 130 for SIGINT. A second signal ends the process at once. Each signal
    is answered on standard error at once: with `finishes` within `held` work, else with `saves`. The last
    message says with `then` how the work can go on.
    """

    def __init__(self, finishes: str = "", saves: str = "", then: str = "") -> None:
        self._finishes, self._saves, self._then = finishes, saves, then
        self._loss = ", without saving" if finishes else ""
        self.status: int | None = None
        self.was_called = False  # by another process of the run, not by a signal
        self._held = 0  # blocks of `held` work that are open
        self._before: dict[int, object] = {}
        self._sent = self._sent_before = -1  # where the interpreter writes the numbers of signals

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
            received, self._sent = os.pipe()
            os.set_blocking(self._sent, False)
            self._sent_before = signal.set_wakeup_fd(self._sent, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, args=(received,), daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._sent_before)
            os.close(self._sent)
            self._watcher.join(1.0)  # its message comes before those that follow
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.status is not None and not self.was_called and kind is SystemExit:
            _say(f"stopped; {self._then}" if self._then else "stopped")

    def _watch(self, received: int) -> None:
        """Answer signals at once: the main thread runs no handler while a device computes for it."""
        is_second = False
        with os.fdopen(received, "rb", buffering=0) as numbers:
            while byte := numbers.read(1):
                number = byte[0]
                if number not in self._before:
                    continue
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                if is_second:
                    _say(f"{name}: ended at once{self._loss}")
                    os._exit(128 + number)
                answer = (self._finishes if self._held else self._saves) or "stopping"
                _say(f"{name}: {answer}; a second {name} ends at once{self._loss}")
                is_second = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay SystemExit until the outermost block is done."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.status is not None and not self._held:
            raise SystemExit(self.status)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Within `held` work, allow SystemExit, also for an earlier signal."""
        held, self._held = self._held, 0
        try:
            if self.status is not None:
                raise SystemExit(self.status)
            yield
        finally:
            self._held = held

    def call(self) -> None:
        """Stop as after a first signal, for another process of the run; after a signal it does nothing."""
        if self.status is None:
            self.was_called = True
            self._stop(CALLED)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.was_called = False
        self._stop(128 + number)

    def _stop(self, status: int) -> None:
        first, self.status = self.status is None, status
        if first and not self._held:
            # The exception may come between the making of a coroutine and its hand-over to the event loop.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            raise SystemExit(status)


def _say(text: str) -> None:
    """Write a line to standard error directly, over a progress bar."""
    with suppress(OSError):  # its reader is gone
        start = "\r\x1b[2K" if os.isatty(2) else ""
        os.write(2, f"{start}{text}\n".encode())


def start_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run work in a thread of its own; `exit_process` ends the process before it is done."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled from here on
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work, *args, **kwargs))
        except BaseException as error:  # any error is passed to the caller
            future.set_exception(error)

    threading.Thread(target=run, name=DAEMON_THREAD, daemon=True).start()
    return future


async def await_in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work as `asyncio.to_thread`, but `start_daemon_thread`.

    A program of the device cannot be interrupted, and the threads of `to_thread` are joined at exit.
    """
    return await asyncio.wrap_future(start_daemon_thread(work, *args, **kwargs))


def exit_process(status: str | int | None) -> NoReturn:
    """End the process as `sys.exit`; if daemon threads still work after some seconds, without exit handlers.

    Those of Python and JAX would wait for the device's program. The run has saved its state before.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further Ctrl-C ends without a traceback
    deadline = time.monotonic() + GRACE
    working = [thread for thread in threading.enumerate() if thread.name == DAEMON_THREAD]
    for thread in working:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in working):
        sys.exit(status)
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    exit_process_now(1 if isinstance(status, str) else status or 0)


def exit_process_now(status: int) -> NoReturn:
    """End the process without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(status)
