"""Orderly end of a run after SIGTERM or SIGINT: `held` work is finished, then SystemExit is raised."""

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

# Exit status of a process that stops because another process of the run does: that of SIGTERM.
REMOTE_STOP_STATUS = 143
# Name of the threads for which `exit_process` waits no longer than GRACE_SECONDS.
DAEMON_THREAD = "calibadv-daemon"
# Seconds for which `exit_process` waits for the daemon threads.
GRACE_SECONDS = 5.0
# Returns the cursor to the start of the line and clears it, which removes a progress bar.
_CLEAR_LINE = "\r\x1b[2K"

P = ParamSpec("P")
T = TypeVar("T")


class Stop:
    """A block in which the first signal raises SystemExit in the main thread, or at the end of `held` work.

    The exit status is 143 for SIGTERM and 130 for SIGINT. A second signal ends the process at once. Each
    signal is answered on standard error at once.

    Args:
        finishes: What the process finishes first, for the answer to a signal within `held` work.
        saves: What the process does, for the answer to a signal outside of `held` work.
        then: How the work can go on, for the last message.

    Attributes:
        status: Exit status once the process has to stop; None before.
        was_requested: Whether another process of the run asked for the stop, and not a signal.
    """

    def __init__(self, finishes: str = "", saves: str = "", then: str = "") -> None:
        self._finishes = finishes
        self._saves = saves
        self._then = then
        # Warns that a second signal loses work.
        self._loss = ", without saving" if finishes else ""
        self.status: int | None = None
        self.was_requested = False
        # Number of open blocks of `held` work.
        self._held = 0
        # Signal -> handler before this block.
        self._earlier_handlers: dict[int, object] = {}
        # File descriptor to which the interpreter writes the numbers of signals, and the one before.
        self._wakeup_fd = -1
        self._earlier_wakeup_fd = -1

    def __enter__(self) -> Stop:
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier_handlers[number] = signal.signal(number, self._handle)
            read_fd, self._wakeup_fd = os.pipe()
            os.set_blocking(self._wakeup_fd, False)
            self._earlier_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, args=(read_fd,), daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._earlier_handlers:
            signal.set_wakeup_fd(self._earlier_wakeup_fd)
            os.close(self._wakeup_fd)
            # Its message has to appear before the messages that follow.
            self._watcher.join(1.0)
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        was_stopped_by_signal = self.status is not None and not self.was_requested
        if was_stopped_by_signal and kind is SystemExit:
            _print_line(f"stopped; {self._then}" if self._then else "stopped")

    def _watch(self, read_fd: int) -> None:
        """Answer signals at once, since the main thread runs no handler while it waits for a device."""
        is_second = False
        with os.fdopen(read_fd, "rb", buffering=0) as signal_numbers:
            while byte := signal_numbers.read(1):
                number = byte[0]
                if number not in self._earlier_handlers:
                    continue
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                if is_second:
                    _print_line(f"{name}: ended at once{self._loss}")
                    os._exit(128 + number)
                answer = self._finishes if self._held else self._saves
                _print_line(f"{name}: {answer or 'stopping'}; a second {name} ends at once{self._loss}")
                is_second = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay SystemExit until the outermost block of held work is done.

        Raises:
            SystemExit: A signal came during the block, or another process of the run stops.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.status is not None and not self._held:
            raise SystemExit(self.status)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Allow SystemExit within `held` work, also for a signal that came earlier.

        Raises:
            SystemExit: A signal has come, or another process of the run stops.
        """
        held = self._held
        self._held = 0
        try:
            if self.status is not None:
                raise SystemExit(self.status)
            yield
        finally:
            self._held = held

    def request_stop(self) -> None:
        """Stop as after a first signal, because another process of the run stops.

        It does nothing if this process stops already.

        Raises:
            SystemExit: There is no `held` work.
        """
        if self.status is None:
            self.was_requested = True
            self._stop(REMOTE_STOP_STATUS)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.was_requested = False
        self._stop(128 + number)

    def _stop(self, status: int) -> None:
        is_first = self.status is None
        self.status = status
        if is_first and not self._held:
            # The exception may be raised after a coroutine is made and before the event loop has it.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            raise SystemExit(status)


def _print_line(text: str) -> None:
    """Write a line to standard error directly, in place of a progress bar."""
    # An OSError says that nobody reads standard error any more.
    with suppress(OSError):
        start = _CLEAR_LINE if os.isatty(2) else ""
        os.write(2, f"{start}{text}\n".encode())


def start_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run work in a thread of its own, which does not keep the process from ending; see `exit_process`.

    Args:
        work: Function to run, in a copy of the current context.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        The future of the function's result or exception. It cannot be cancelled.
    """
    future: Future[T] = Future()
    # Running futures cannot be cancelled.
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work, *args, **kwargs))
        except BaseException as error:  # the future passes any error to the caller
            future.set_exception(error)

    threading.Thread(target=run, name=DAEMON_THREAD, daemon=True).start()
    return future


async def await_in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work in a daemon thread and wait for its result.

    It replaces `asyncio.to_thread`, whose threads are joined at exit: a program on a device cannot be
    interrupted, so that the process would have to wait for it. For the arguments see `start_daemon_thread`.
    """
    return await asyncio.wrap_future(start_daemon_thread(work, *args, **kwargs))


def exit_process(status: str | int | None) -> NoReturn:
    """End the process as `sys.exit` does, but wait only some seconds for daemon threads.

    If a daemon thread still works then, the process ends without exit handlers: those of Python and JAX would
    wait for the program on the device. The run has saved its state before.

    Args:
        status: Exit status; None: 0; a text is printed on standard error, and the status is 1.
    """
    if threading.current_thread() is threading.main_thread():
        # Another Ctrl-C ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    deadline = time.monotonic() + GRACE_SECONDS
    daemon_threads = [thread for thread in threading.enumerate() if thread.name == DAEMON_THREAD]
    for thread in daemon_threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in daemon_threads):
        sys.exit(status)
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
        number = 1
    else:
        number = status or 0
    exit_process_now(number)


def exit_process_now(status: int) -> NoReturn:
    """End the process with an exit status, without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody reads it any more.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
