"""Console output of a run: phases, progress bars, a line for each step; tables."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from calibadv_jax.core.secrets import redact

QUIET_SECONDS = 60.0  # between lines of progress of one phase, where no bar moves
STEPS_FOR_ETA = 20  # their median leaves out steps that compile or evaluate


@dataclass(frozen=True)
class Shown:
    """A metric in the line of a step."""

    label: str
    metric: str
    format: str  # of fixed width, so that the columns of a run are aligned
    unit: str = ""


STEP_METRICS = (  # a metric that a step does not have is left out
    Shown("loss", "sft/loss", "7.4f", " nats"),
    Shown("reward", "reward/mean", "5.3f"),
    Shown("f1", "reward/f1", "5.3f"),
    Shown("format", "reward/format_valid", "5.3f"),
    Shown("searches", "rollout/searches/mean", "4.2f"),
    Shown("length", "rollout/sampled_tokens/mean", "6,.0f", " tok"),
    Shown("entropy", "actor/entropy", "6.4f", " nats"),
    Shown("grad", "actor/grad_norm", "7.3g"),
    Shown("", "timing_s/step", "5.1f", " s/step"),
    Shown("", "perf/tokens_per_second", "7,.0f", " tok/s"),
)


class Console:
    """Progress on `stream`: bars and timers if it is a terminal, otherwise plain lines.

    Args:
        progress: False shows no progress; `say`, `tell` and `warn` still print.
        stream: default standard error, so that standard output carries results only.
        silent: write nothing: another process of the run writes the same.
    """

    def __init__(self, progress: bool = True, stream: TextIO | None = None, silent: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rich = RichConsole(file=self._stream, force_terminal=self._stream.isatty(), highlight=False)
        self._progress, self._silent = progress and not silent, silent
        self._moves = self._progress and self._stream.isatty()
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._open: list[threading.Event] = []  # ends of the open blocks, the innermost last

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write ``step 12/60  reward 0.523  …   4.3 s/step  2,900 tok/s  ETA 12 min``."""
        parts = [f"step {step:{len(str(total))}}/{total}"]
        for shown in STEP_METRICS:
            if shown.metric in metrics:
                label = f"{shown.label} " if shown.label else ""
                parts.append(f"{label}{metrics[shown.metric]:{shown.format}}{shown.unit}")
        if "timing_s/step" in metrics:
            self._seconds.append(metrics["timing_s/step"])
            if step < total:
                parts.append(f"ETA {duration((total - step) * median(self._seconds))}")
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        """Write a line of progress, unless progress is off."""
        if self._progress:
            self._print(text)

    def warn(self, text: str) -> None:
        """Write ``warning: …``, always."""
        self._print(f"warning: {text}", style="bold yellow")

    def tell(self, text: str) -> None:
        """Write a line that the user requested, always."""
        self._print(text)

    def say(self, text: str) -> None:
        """Write a result to standard output, always."""
        if not self._silent:
            sys.stdout.write(f"{redact(text)}\n")
            sys.stdout.flush()

    @contextmanager
    def phase(self, text: str, announce: bool = False) -> Iterator[None]:
        """Show a phase and its seconds until the block ends.

        Args:
            announce: if the stream is no terminal, write a line at the beginning.
        """
        if announce and not self._moves:
            self.note(text)
        with (
            self._live(TextColumn("{task.description}"), TimeElapsedColumn()) as live,
            self._repeated(lambda: text),
        ):
            live.add_task(text, total=None)
            yield

    @contextmanager
    def bar(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Yield ``show(done)``, which moves a bar; without a terminal, write a line every minute."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        with self._live(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as live:
            task = live.add_task(label, total=total)
            completed = 0

            def show(done: int) -> None:
                nonlocal completed
                completed = done
                live.update(task, completed=done)

            with self._repeated(lambda: f"{label} {completed}/{total} {unit}"):
                yield show

    @contextmanager
    def _repeated(self, text: Callable[[], str]) -> Iterator[None]:
        """Write ``TEXT, 2 min`` every minute until the block ends, where no bar moves.

        Only the innermost block writes: it is a part of the others.
        """
        if self._moves or not self._progress:
            yield
            return
        begun, over = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not over.wait(QUIET_SECONDS):
                if over in self._open[-1:]:
                    self.note(f"{text()}, {duration(time.monotonic() - begun)}")

        self._open.append(over)
        thread = threading.Thread(target=repeat, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._open.remove(over)
            thread.join()

    def _live(self, *columns: ProgressColumn) -> Progress:
        return Progress(
            SpinnerColumn(), *columns, console=self._rich, transient=True, disable=not self._moves
        )

    def _print(self, text: str, style: str | None = None) -> None:
        """Write one line of any length, above a bar."""
        if not self._silent:
            self._rich.print(redact(text), style=style, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format seconds in the largest unit of at least 1.5: ``80 s``, ``12 min``, ``3.2 h``, ``2.1 d``."""
    if seconds >= 1.5 * 86400:
        return f"{seconds / 86400:.1f} d"
    if seconds >= 1.5 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def number(value: float) -> str:
    """Format four significant digits without trailing zeros: 0.5234, 12.35, 5612, 4e-07."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Align columns under headers with a line; numbers to the right, floats with three places.

    Raises:
        ValueError: a row's length is not that of the headers.
    """
    body = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(headers):
            raise ValueError(f"row {row} has {len(row)} cells, the table has {len(headers)} columns")
    columns = list(zip(headers, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
    sides = [">" if is_number else "<" for is_number in numeric] or ["<"] * len(headers)

    def line(cells: Sequence[str]) -> str:
        layout = zip(cells, sides, widths, strict=True)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in layout).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, body)])
