"""What a run shows while it runs: one line a step, a bar within a step, tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

QUIET_SECONDS = 30.0  # between lines of progress within a step
STEP_METRICS = {  # label -> metric name; those a step does not have are left out
    "loss": "sft/loss",
    "reward": "reward/mean",
    "f1": "reward/f1",
    "format": "reward/format_valid",
    "searches": "rollout/searches/mean",
    "tokens": "rollout/sampled_tokens/mean",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "grad": "actor/grad_norm",
    "tok/s": "perf/tokens_per_second",
    "s": "timing_s/step",
}


class Console:
    """Progress on `stream`; a bar only where that is a terminal.

    Args:
        progress: False shows no progress at all; `say` still prints.
        stream: default standard error, so that standard output carries results only.
    """

    def __init__(self, progress: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._progress = progress
        self._has_bar = progress and self._stream.isatty()

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One line of the metrics named in STEP_METRICS: ``step 12/60 reward 0.52 …``."""
        shown = " ".join(
            f"{label} {number(metrics[name])}" for label, name in STEP_METRICS.items() if name in metrics
        )
        self.note(f"step {step}/{total} {shown}".rstrip())

    def note(self, text: str) -> None:
        """A line of progress; not shown where progress is off."""
        if self._progress:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def say(self, text: str) -> None:
        """A result, on standard output, always."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    @contextmanager
    def bar(self, label: str, total: int, unit: str = "it") -> Iterator[Callable[[int], object]]:
        """Yields ``show(done)``, to be called with how many of `total` are done.

        The bar is gone when the block ends; print no line inside it. Where the stream is no terminal, a line
        is written every 30 seconds instead.
        """
        spoken = time.monotonic()
        with tqdm(
            total=total, desc=label, unit=unit, file=self._stream, leave=False, disable=not self._has_bar
        ) as bar:

            def show(done: int) -> None:
                nonlocal spoken
                bar.update(done - bar.n)
                if not self._has_bar and time.monotonic() - spoken > QUIET_SECONDS:
                    spoken = time.monotonic()
                    self.note(f"{label} {done}/{total}")

            yield show


def number(value: float) -> str:
    """Four significant digits, without trailing zeros: 0.5234, 12.35, 5612, 4e-07."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Aligned columns with a line under the headers; numbers are right-aligned, floats to three places.

    Raises:
        ValueError: a row's length is not that of the headers.
    """
    body = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(headers):
            raise ValueError(f"row {row} has {len(row)} cells, the table has {len(headers)} columns")
    columns = list(zip(headers, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [
        bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        for index in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, body)])
