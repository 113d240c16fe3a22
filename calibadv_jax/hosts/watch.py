"""Watch the other processes of a run, and end this one if one of them is lost.

A program of all devices waits for ever for a process that is gone, and no Python runs meanwhile in the thread
that began it. So another thread watches, once a second, and ends the process.
"""

from __future__ import annotations

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

PERIOD = 1.0  # seconds between two checks
LAST_WORDS = 4 * PERIOD  # for which process 0, which keeps the notes, outlives the others
ALIVE, ENDED, STOPPING, DONE = "alive", "ended", "stopping", "done"
_ROOT = "calibadv_watch"


class Watch:
    """Notes of all processes about themselves, and the thread that reads them.

    Process 0 keeps the notes (`client`). `named` returns a process's name for messages. Without news for
    `timeout` seconds a process is lost. `stopping` is called in the main thread when another process stops.
    """

    def __init__(
        self,
        client: Any,
        index: int,
        count: int,
        named: Callable[[int], str],
        timeout: float,
        stopping: Callable[[], None],
    ):
        self._client, self._index, self._count, self._named = client, index, count, named
        self._timeout, self._stopping = timeout, stopping
        self._over = threading.Event()
        self._has_called = False
        self._thread = threading.Thread(target=self._watch, name="watch of the other processes", daemon=True)

    def start(self) -> None:
        self.note(ALIVE, "0")
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            signal.signal(signal.SIGUSR1, lambda *_: self._stopping())
        self._thread.start()

    def close(self) -> None:
        """Stop watching, when this process and the others no longer need each other."""
        self.note(DONE, "")
        self._over.set()
        self._thread.join()

    def note(self, kind: str, text: str) -> None:
        self._client.key_value_set(f"{_ROOT}/{kind}/{self._index}", text, allow_overwrite=True)

    def last_words(self, text: str) -> None:
        """Report why this process ends, which ends the others, and wait until they have read it."""
        self._over.set()  # this process has an error line of its own
        with suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, and the notes with it
            self.note(ENDED, text)
        if self._index == 0:
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
                self._end(f"{self._named(0)} is gone, or cannot be reached ({why})")
                return
            now = time.monotonic()
            was_paused, checked = now - checked > self._timeout / 2, now
            for index in range(self._count):
                text = notes.get((ALIVE, index), "")
                if was_paused or index not in heard or heard[index][0] != text:
                    heard[index] = text, now
            self._act(notes, {index: now - since for index, (_, since) in heard.items()})

    def _act(self, notes: dict[tuple[str, int], str], silent: dict[int, float]) -> None:
        for (kind, index), text in notes.items():
            if kind == ENDED and index != self._index:
                self._end(f"{self._named(index)} has ended: {text}")
        for index, seconds in silent.items():
            if seconds > self._timeout and (DONE, index) not in notes:
                self._end(f"{self._named(index)} is lost: no sign of life for {seconds:.0f} s")
        if not self._has_called and any(kind == STOPPING and index != self._index for kind, index in notes):
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
        """End this process, whatever it waits for."""
        line = f"error: {why}; start all processes again: the run goes on from its newest checkpoint\n"
        with suppress(OSError):
            os.write(sys.stderr.fileno(), line.encode(errors="replace"))
        if self._index == 0:
            time.sleep(LAST_WORDS)
        os._exit(ENVIRONMENT_STATUS)
