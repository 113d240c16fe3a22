"""SIGTERM and SIGINT end a run in order: what must be whole is finished, then SystemExit is raised."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Within the block, the first signal raises SystemExit in the main thread, or at the end of `held` work.

    The status is 143 for SIGTERM and 130 for SIGINT. A second signal ends the process at once.

    Schedulers (SLURM, Kubernetes) and spot machines send SIGTERM some time before they kill.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._held = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Work that a signal must not break off; SystemExit comes when it is done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.status is not None:
            raise SystemExit(self.status)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.status is not None:
            os._exit(128 + number)
        self.status = 128 + number
        if not self._held:
            # The exception may come between the making of a coroutine and its hand-over to the event loop.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            raise SystemExit(self.status)
