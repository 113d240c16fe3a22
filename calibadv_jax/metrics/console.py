"""Console output of a run: phases, progress bars, a line for each step; tables."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TextIO

from rich.console import Console as RichConsole

from calibadv_jax.core.secrets import redact

QUIET_SECONDS, REWRITTEN_SECONDS = 60.0, 1.0  # between lines of progress in a file; of a line's versions
STEPS_FOR_ETA = 20  # their median leaves out steps that evaluate

Progress = Callable[[], tuple[int, int, str]]  # done, of how many (0: not counted), and a detail
# Metrics of a step's line, each with a label, a format of fixed width, which aligns the columns, and a unit.
STEP_METRICS = {
    "sft/loss": ("loss ", "7.4f", " nats"),
    "reward/mean": ("reward ", "5.3f", ""),
    "reward/f1": ("f1 ", "5.3f", ""),
    "reward/format_valid": ("format ", "5.3f", ""),
    "rollout/searches/mean": ("searches ", "4.2f", ""),
    "rollout/sampled_tokens/mean": ("length ", "6,.0f", " tok"),
    "actor/entropy": ("entropy ", "6.4f", " nats"),
    "actor/grad_norm": ("grad ", "7.3g", ""),
    "timing_s/step": ("", "5.1f", " s/step"),
    "perf/tokens_per_second": ("", "7,.0f", " tok/s"),
}


class Console:
    """Progress on `stream`: a line that is rewritten on a terminal or in a notebook, otherwise plain lines.

    Without `progress`, `say`, `tell` and `warn` still print. `stream` is standard error by default: standard
    output carries results only. `silent` writes nothing: another process of the run writes the same.
    """

    def __init__(self, progress: bool = True, stream: TextIO | None = None, silent: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        is_terminal = self._stream.isatty()
        # By \r alone: a notebook, in its kernel or behind `!`, shows what moves a cursor as text.
        self._rewrites = is_terminal or type(self._stream).__module__.startswith("ipykernel")
        self._rich = RichConsole(file=self._stream, force_terminal=is_terminal, force_jupyter=False)
        self._progress, self._silent = progress and not silent, silent
        self._lock = threading.RLock()  # of the stream
        self._written, self._width = time.monotonic(), 0  # when a line was; how long the rewritten one is
        self._open: list[tuple[str, str, Progress, float]] = []  # blocks, with their beginning
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._typical: float | None = None  # seconds of a step; 0: only the first, which compiles, has ended
        self.begin_step(0, 0)

    def begin_step(self, step: int, total: int) -> None:
        """Name the step in the lines of the work in progress, and begin to time its parts."""
        self._step, self._begun = (step, total), time.monotonic()
        self._parts: dict[str, float] = {}  # their seconds

    def end_step(self, counts: Mapping[str, tuple[int, str]]) -> dict[str, float]:
        """Return ``timing_s/step`` and that of its parts, ``perf/<count>_per_second``, and the seconds left.

        The first step compiles, and tells nothing of the steps that are left. `counts` has numbers with the
        part of the step in which they were counted.
        """
        seconds = self._parts | {"step": time.monotonic() - self._begun}
        rates = {f"perf/{name}_per_second": count / seconds[part] for name, (count, part) in counts.items()}
        if self._typical is not None:
            self._seconds.append(seconds["step"])
            self._typical = median(self._seconds)
            rates["perf/remaining_seconds"] = (self._step[1] - self._step[0]) * self._typical
        self._typical = self._typical or 0.0
        return {f"timing_s/{part}": value for part, value in seconds.items()} | rates

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write ``step 12/60  reward 0.523  …   4.3 s/step  2,900 tok/s  ETA 12 min``."""
        parts = [f"step {step:{len(str(total))}}/{total}"]
        for name, (label, layout, unit) in STEP_METRICS.items():
            if name in metrics:
                parts.append(f"{label}{metrics[name]:{layout}}{unit}")
        if remaining := metrics.get("perf/remaining_seconds"):
            parts.append(f"ETA {duration(remaining)}")
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        """Write a line of progress, unless progress is off."""
        if self._progress:
            self.tell(text)

    def warn(self, text: str) -> None:
        """Write ``warning: …``, always."""
        self.tell(f"warning: {text}", style="bold yellow")

    def tell(self, text: str, style: str | None = None) -> None:
        """Write a line of any length above what is in progress, always."""
        if not self._silent:
            with self._lock:
                self._rewrite("")
                self._rich.print(redact(text), style=style, markup=False, highlight=False, soft_wrap=True)
                self._written = time.monotonic()

    def say(self, text: str) -> None:
        """Write a result to standard output, always."""
        if not self._silent:
            sys.stdout.write(f"{redact(text)}\n")
            sys.stdout.flush()

    @contextmanager
    def phase(self, text: str, announce: bool = False) -> Iterator[None]:
        """Show a phase and its seconds until the block ends.

        With `announce`, a line is written at the beginning where no line is rewritten.
        """
        if announce and not self._rewrites:
            self.note(text)
        with self.live(text):
            yield

    @contextmanager
    def bar(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Yield ``show(done)``; see `live`."""
        done = [0]
        with self.live(label, unit, lambda: (done[0], total, "")):
            yield partial(done.__setitem__, 0)

    @contextmanager
    def live(
        self, label: str, unit: str = "", progress: Progress = lambda: (0, 0, ""), part: str = ""
    ) -> Iterator[None]:
        """Show work until the block ends, with the estimated end of the run.

        Only the innermost block is shown: it is a part of the others. Another thread calls `progress`. `part`
        is the name for `end_step`.
        """
        is_outermost, begun, over = not self._open, time.monotonic(), threading.Event()
        block = label, unit, progress, begun
        self._open.append(block)
        thread = threading.Thread(target=self._repeat, args=(over,), name="progress", daemon=True)
        if is_shown := is_outermost and self._progress:
            thread.start()
        try:
            yield
        finally:
            if is_shown:
                over.set()
                thread.join()
                self._rewrite("")
            self._open.remove(block)
            if part:
                self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - begun

    def _repeat(self, over: threading.Event) -> None:
        show, every = (self._rewrite, REWRITTEN_SECONDS) if self._rewrites else (self.note, QUIET_SECONDS)
        while not over.wait(max(self._written + every - time.monotonic(), 0)):
            if time.monotonic() >= self._written + every:
                show(self._line())

    def _line(self) -> str:
        label, unit, progress, begun = self._open[-1]
        (step, steps), now = self._step, time.monotonic()
        done, total, detail = progress()
        count, run_left, left = f" {done}/{total} {unit}" if total else "", "", ""
        if self._typical:
            of_step = max(self._typical - (now - self._begun), 0)
            run_left = f" ({duration(of_step + (steps - step) * self._typical)} left)"
        elif done and not steps:
            left = f"{duration((total - done) * (now - begun) / done)} left"
        start = f"step {step}/{steps}{run_left}: " if steps else ""
        parts = start + label + count, detail, duration(now - begun), left
        return redact(", ".join(filter(None, parts)))

    def _rewrite(self, text: str) -> None:
        """Replace the line that is rewritten; "" removes it."""
        with self._lock:
            if text or self._width:
                text = text[: self._rich.width - 1] if self._stream.isatty() else text
                self._stream.write(f"\r{text:{self._width}}" + ("" if text else "\r"))
                self._stream.flush()
                self._written, self._width = time.monotonic(), len(text)


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
    """Align columns under headers with a line; numbers to the right, floats with three places."""
    body = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    columns = list(zip(headers, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
    sides = [">" if is_number else "<" for is_number in numeric] or ["<"] * len(headers)

    def line(cells: Sequence[str]) -> str:
        layout = zip(cells, sides, widths, strict=True)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in layout).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, body)])
