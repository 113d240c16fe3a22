"""Wall-clock time of a step's parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """``with watch("rollout"): …`` adds up seconds by name, counted from its creation."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def metrics(self, tokens: int) -> dict[str, float]:
        """``timing_s/<name>``, ``timing_s/step`` (all since the start) and ``perf/tokens_per_second``.

        Args:
            tokens: tokens the step trained on, prompts and observations included.
        """
        total = time.monotonic() - self._begun
        parts = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        return parts | {"timing_s/step": total, "perf/tokens_per_second": tokens / total}
