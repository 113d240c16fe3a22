"""Barrier of the threads that save a checkpoint, which passes on the error of any process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from calibadv_jax.core.errors import cause_text
from calibadv_jax.distributed.all_gather import AllGather


class SaveBarrier:
    """Barrier of the threads with which all processes save a checkpoint; an error in one ends every wait.

    It takes the place of Orbax's own barrier, at which the other processes would wait 20 minutes for a thread
    that has failed.

    Args:
        client: Client of JAX's coordination service.
        index: Number of this process.
        count: Number of processes.
        describe_process: Returns the name of a process in messages, given its number.
    """

    def __init__(self, client: Any, index: int, count: int, describe_process: Callable[[int], str]):
        self._all_gather = AllGather(client, "calibadv_save", index, count)
        self._describe_process = describe_process
        self._failure: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the save has failed in any process since the last `reset`."""
        return self._failure is not None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes.

        Args:
            key: Name of the barrier. Orbax calls the barriers of a save in the same order in all processes.
            timeout_ms: Not used; Orbax passes it.

        Raises:
            OSError: Another process could not write its part. If this process failed, its own error is
                raised, of any type.
            threading.BrokenBarrierError: The main thread has ended while this thread was waiting.
        """
        if self._failure is not None:
            raise self._failure
        failure = None
        if threading.current_thread() is not threading.main_thread():
            # A thread of Orbax that failed calls its last barrier while it handles its error.
            failure = sys.exc_info()[1]
        message = "" if failure is None else cause_text(failure)
        states = self._all_gather((key, message), _check_main_thread)
        failed = []
        keys = set()
        for index, (other_key, other_message) in enumerate(states):
            keys.add(other_key)
            if other_message:
                failed.append(f"{self._describe_process(index)}: {other_message}")
        if failed or len(keys) > 1:
            self._failure = failure or OSError("; ".join(failed) or "another process could not save its part")
            raise self._failure

    def reset(self) -> None:
        """Begin a new save: all processes have seen how the previous one ended."""
        self._failure = None


def _check_main_thread() -> None:
    """Raise if the main thread has ended: the end of the process waits for this thread."""
    if not threading.main_thread().is_alive():
        raise threading.BrokenBarrierError
