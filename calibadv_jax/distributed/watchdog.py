"""Notes of all processes about their state, and the thread that ends this process when another is lost."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from calibadv_jax.core.errors import ENVIRONMENT_STATUS

HEARTBEAT_SECONDS = 1.0  # between two checks of the other processes' notes
# Seconds for which process 0, which keeps the notes, outlives an error so that the others can read why.
READ_NOTES_SECONDS = 4 * HEARTBEAT_SECONDS

# Kinds of notes.
ALIVE = "alive"  # text: a number that grows with every check
ENDED = "ended"  # text: the error with which the process ends
STOPPING = "stopping"  # the process has received a signal, or ends at the next barrier with an error
DONE = "done"  # the process has passed the final barrier

_ROOT = "calibadv_watch"  # prefix of the keys


class Watchdog:
    """Notes of all processes about their state, and the thread that reads them once a second.

    A program of all devices waits for ever for a process that is gone, and no Python runs meanwhile in the
    thread that started the program. So the watchdog's thread ends the process.

    Process 0 keeps the notes, in JAX's coordination service.

    Args:
        client: Client of the coordination service.
        index: Number of this process.
        count: Number of processes.
        timeout: Seconds without a sign of life after which a process is lost.
        describe_process: Returns the name of a process in messages, given its number.
        on_stop: Called in the main thread when another process stops; at most once.
    """

    def __init__(
        self,
        client: Any,
        index: int,
        count: int,
        timeout: float,
        describe_process: Callable[[int], str],
        on_stop: Callable[[], object],
    ):
        self._client = client
        self._index = index
        self._count = count
        self._timeout = timeout
        self._describe_process = describe_process
        self._on_stop = on_stop
        self._has_called_on_stop = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog of the other processes", daemon=True)

    def start(self) -> None:
        """Write the first sign of life, and start the thread.

        In the main thread it also sets the handler of SIGUSR1, which calls `on_stop`.

        Raises:
            jax.errors.JaxRuntimeError: The coordination service cannot be reached.
        """
        self.write_note(ALIVE, "0")
        # Only the main thread may set handlers of signals.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda *_: self._on_stop())
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this process and the others no longer need each other.

        Raises:
            jax.errors.JaxRuntimeError: The coordination service cannot be reached.
        """
        self.write_note(DONE, "")
        self._is_closed.set()
        self._thread.join()

    def write_note(self, kind: str, text: str) -> None:
        """Write or replace this process's note of a kind.

        Args:
            kind: ALIVE, ENDED, STOPPING or DONE.
            text: What the other processes read; see the kinds. It may be empty.

        Raises:
            jax.errors.JaxRuntimeError: The coordination service cannot be reached: process 0 has ended.
        """
        self._client.key_value_set(f"{_ROOT}/{kind}/{self._index}", text, allow_overwrite=True)

    def report_failure(self, text: str) -> None:
        """Write why this process ends, which ends the others.

        Process 0 keeps the notes, so it waits READ_NOTES_SECONDS until the others have read them.

        Args:
            text: The error, in one line.
        """
        # This process reports an error of its own: the thread must not end it for another reason meanwhile.
        self._is_closed.set()
        with suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, and the notes with it
            self.write_note(ENDED, text)
        self._wait_for_readers()

    def _run(self) -> None:
        last_texts: dict[int, str] = {}  # newest ALIVE note of each process
        changed_at: dict[int, float] = {}  # when that note was first seen
        checked_at = time.monotonic()
        for number in itertools.count(1):
            if self._is_closed.wait(HEARTBEAT_SECONDS):
                return
            try:
                self.write_note(ALIVE, str(number))
                notes = self._read_notes()
            except jax.errors.JaxRuntimeError as error:
                cause = str(error).partition("\n")[0][:200]
                self._exit_process(f"{self._describe_process(0)} is gone, or cannot be reached ({cause})")
                return
            now = time.monotonic()
            # After a pause of this process, such as SIGSTOP, the old times say nothing about the others.
            was_paused = now - checked_at > self._timeout / 2
            checked_at = now
            for index in range(self._count):
                text = notes.get((ALIVE, index), "")
                if was_paused or index not in last_texts or last_texts[index] != text:
                    last_texts[index] = text
                    changed_at[index] = now
            self._react(notes, {index: now - since for index, since in changed_at.items()})

    def _react(self, notes: dict[tuple[str, int], str], silences: dict[int, float]) -> None:
        """End this process if another one has ended or is lost; call `on_stop` if another one stops.

        Args:
            notes: Text of each note, by its kind and the number of its process.
            silences: Seconds since the last sign of life of each process.
        """
        for (kind, index), text in notes.items():
            if kind == ENDED and index != self._index:
                self._exit_process(f"{self._describe_process(index)} has ended: {text}")
        for index, seconds in silences.items():
            if seconds > self._timeout and (DONE, index) not in notes:
                name = self._describe_process(index)
                self._exit_process(f"{name} is lost: no sign of life for {seconds:.0f} s")
        is_other_stopping = any(kind == STOPPING and index != self._index for kind, index in notes)
        if is_other_stopping and not self._has_called_on_stop:
            self._has_called_on_stop = True
            # The handler of this signal calls `on_stop`. A signal also ends what the main thread waits for.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _read_notes(self) -> dict[tuple[str, int], str]:
        notes = {}
        for path, text in self._client.key_value_dir_get(f"{_ROOT}/"):
            *_, kind, index = path.split("/")
            notes[kind, int(index)] = text
        return notes

    def _exit_process(self, cause: str) -> None:
        line = f"error: {cause}; start all processes again: the run goes on from its newest checkpoint\n"
        with suppress(OSError):
            os.write(sys.stderr.fileno(), line.encode(errors="replace"))
        self._wait_for_readers()
        os._exit(ENVIRONMENT_STATUS)

    def _wait_for_readers(self) -> None:
        """In process 0, wait until the others have read the notes, which end with this process."""
        if self._index == 0:
            time.sleep(READ_NOTES_SECONDS)
