"""The phases of a step: their seconds, their line on the console, and signals that must wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console


class Stopwatch:
    """``with watch("rollout"): …`` adds up seconds by name, counted from its creation."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._seconds: dict[str, float] = {}
        self.tokens = 0  # that the step trained on, prompts and observations included; set by the caller

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def metrics(self) -> dict[str, float]:
        """``timing_s/<name>``, ``timing_s/step`` (all since the start) and ``perf/tokens_per_second``."""
        total = time.monotonic() - self._begun
        parts = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        return parts | {"timing_s/step": total, "perf/tokens_per_second": self.tokens / total}


class Phases(Stopwatch):
    """``with phase("update", "updating"): …`` is timed and shown."""

    def __init__(self, console: Console, stop: Stop):
        super().__init__()
        self._console, self._stop = console, stop

    def held(self) -> AbstractContextManager[None]:
        """Hold back signals; see `Stop.held`."""
        return self._stop.held()

    @contextmanager
    def __call__(self, name: str, shown: str = "") -> Iterator[None]:
        """Time a phase as `name`, and show the text `shown` on the console."""
        with ExitStack() as stack:
            stack.enter_context(super().__call__(name))
            if shown:
                stack.enter_context(self._console.phase(shown))
            yield
