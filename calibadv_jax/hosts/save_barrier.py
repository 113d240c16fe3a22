"""Where the threads of all processes that save a checkpoint wait for each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from calibadv_jax.core.errors import cause_text
from calibadv_jax.hosts.wire import from_bytes, to_bytes

WAIT = 2000  # milliseconds; between two waits a signal's handler may run
_ROOT = "calibadv_save"


class SaveBarrier:
    """The barrier of the threads with which all processes save a checkpoint; an error in one ends all waits.

    In place of Orbax' own, where the others wait 20 minutes for a thread that has failed.
    """

    def __init__(self, client: Any, index: int, count: int, named: Callable[[int], str]):
        self._client, self._index, self._count, self._named = client, index, count, named
        self._number = 0  # of the next barrier
        self._failure: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the save has failed in a process, and so in all."""
        return self._failure is not None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes.

        Raises:
            OSError: one of them could not write its part. What failed here is raised as it is.
        """
        if self._failure is not None:
            raise self._failure
        failure = None
        if threading.current_thread() is not threading.main_thread():
            failure = sys.exc_info()[1]  # Orbax comes to its last barrier with the error that its thread met
        text = "" if failure is None else cause_text(failure)
        number, self._number = self._number, self._number + 1
        self._client.key_value_set_bytes(self._path(number, self._index), to_bytes((key, text)))
        states = [self._wait(self._path(number, index)) for index in range(self._count)]
        if number:  # whoever is at this barrier has read the one before
            self._client.key_value_delete(self._path(number - 1, self._index))
        failed = [f"{self._named(index)}: {text}" for index, (_, text) in enumerate(states) if text]
        if failed or len({key for key, _ in states}) > 1:
            self._failure = failure or OSError("; ".join(failed) or "another process could not save its part")
            raise self._failure

    def reset(self) -> None:
        """Begin a new save: all processes have seen how the one before ended."""
        self._failure = None

    def _path(self, number: int, index: int) -> str:
        return f"{_ROOT}/{number}/{index}"

    def _wait(self, path: str) -> Any:
        while threading.main_thread().is_alive():  # else the process ends, and waits for this thread
            try:
                return from_bytes(self._client.blocking_key_value_get_bytes(path, WAIT))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise threading.BrokenBarrierError(path)
