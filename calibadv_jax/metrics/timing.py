"""The phases of a step: their seconds, their line on the console, and signals that must wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console


class Phases:
    """``with phase("update", "updating"): …`` adds up seconds by name, and shows the text meanwhile."""

    def __init__(self, console: Console, stop: Stop) -> None:
        self._console, self._stop = console, stop
        self._begun = time.monotonic()
        self._seconds: dict[str, float] = {}
        self.tokens = 0  # that the step trained on, prompts and observations included; set by the caller

    @contextmanager
    def __call__(self, name: str, shown: str = "") -> Iterator[None]:
        begun = time.monotonic()
        with ExitStack() as stack:
            stack.callback(lambda: self._add(name, time.monotonic() - begun))
            if shown:
                stack.enter_context(self._console.phase(shown))
            yield

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def held(self) -> AbstractContextManager[None]:
        """Hold back signals; see `Stop.held`."""
        return self._stop.held()

    def metrics(self) -> dict[str, float]:
        """Return ``timing_s/<name>``, ``timing_s/step`` (since the start) and ``perf/tokens_per_second``."""
        total = time.monotonic() - self._begun
        parts = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        return parts | {"timing_s/step": total, "perf/tokens_per_second": self.tokens / total}
