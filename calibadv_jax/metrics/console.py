"""Console output: phases, progress bars, a line for each step of a run; tables."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TextIO

from rich.console import Console as RichConsole

from calibadv_jax.core.secrets import redact

QUIET_SECONDS = 60.0  # between two lines of progress where lines are not rewritten, as in a file
REWRITTEN_SECONDS = 1.0  # between two versions of a line that is rewritten
# Number of newest steps whose median time predicts the end of the run. The few steps that evaluate hardly
# change a median.
STEPS_FOR_ETA = 20

# Returns how much work is done, how much there is (0: it is not counted), and a detail for the line.
Progress = Callable[[], tuple[int, int, str]]


class StepMetric(NamedTuple):
    """How a metric is written in the line of a step."""

    label: str
    layout: str  # format of fixed width, so that the values of several steps are aligned
    unit: str


# Metrics in the line of a step, in their order.
STEP_METRICS = {
    "sft/loss": StepMetric("loss ", "7.4f", " nats"),
    "reward/mean": StepMetric("reward ", "5.3f", ""),
    "reward/f1": StepMetric("f1 ", "5.3f", ""),
    "reward/format_valid": StepMetric("format ", "5.3f", ""),
    "rollout/searches/mean": StepMetric("searches ", "4.2f", ""),
    "rollout/sampled_tokens/mean": StepMetric("length ", "6,.0f", " tok"),
    "actor/entropy": StepMetric("entropy ", "6.4f", " nats"),
    "actor/grad_norm": StepMetric("grad ", "7.3g", ""),
    "timing_s/step": StepMetric("", "5.1f", " s/step"),
    "perf/tokens_per_second": StepMetric("", "7,.0f", " tok/s"),
}


@dataclass(eq=False)
class _Block:
    """Work that is shown while it lasts."""

    label: str
    unit: str
    progress: Progress
    started_at: float


class Console:
    """Progress of a run: a line that is rewritten on a terminal or in a notebook, otherwise plain lines.

    Args:
        progress: Whether progress is written. Without it `say`, `tell` and `warn` still write.
        stream: Where lines go. By default standard error, because standard output carries results only.
        silent: Write nothing, because another process of the run writes the same.
    """

    def __init__(self, progress: bool = True, stream: TextIO | None = None, silent: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        is_terminal = self._stream.isatty()
        # Lines are rewritten by \r alone: a notebook, in its kernel or behind `!`, shows the sequences that
        # move a cursor as text.
        self._rewrites = is_terminal or type(self._stream).__module__.startswith("ipykernel")
        self._rich = RichConsole(file=self._stream, force_terminal=is_terminal, force_jupyter=False)
        self._progress = progress and not silent
        self._silent = silent
        self._lock = threading.RLock()  # guards the stream
        self._written_at = time.monotonic()  # when the last line was written
        self._rewritten_width = 0  # characters of the line that is rewritten; 0: there is none
        self._blocks: list[_Block] = []  # open blocks of `live`, the innermost last
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        # Median of `_step_seconds`. The first step is not counted, because it compiles: None until it has
        # ended, 0 until the second one has ended.
        self._typical_seconds: float | None = None
        self.begin_step(0, 0)

    def begin_step(self, step: int, total: int) -> None:
        """Name the step in the lines of the work in progress, and begin to time its parts.

        Args:
            step: Number of the step.
            total: Number of steps of the run; 0: outside of steps.
        """
        self._step = (step, total)
        self._step_started_at = time.monotonic()
        self._part_seconds: dict[str, float] = {}

    def end_step(self, counts: Mapping[str, tuple[int, str]]) -> dict[str, float]:
        """Return the times and rates of the step as metrics.

        Args:
            counts: By name, a number and the part of the step in which it was counted ("step": all of it).

        Returns:
            ``timing_s/step`` and that of its parts, ``perf/<count>_per_second``, and
            ``perf/remaining_seconds`` except after the first step, which compiles and says nothing about the
            steps that are left.
        """
        seconds_by_part = dict(self._part_seconds)
        seconds_by_part["step"] = time.monotonic() - self._step_started_at
        metrics = {f"timing_s/{part}": seconds for part, seconds in seconds_by_part.items()}
        for name, (count, part) in counts.items():
            metrics[f"perf/{name}_per_second"] = count / seconds_by_part[part]
        if self._typical_seconds is None:
            self._typical_seconds = 0.0
            return metrics
        self._step_seconds.append(seconds_by_part["step"])
        self._typical_seconds = median(self._step_seconds)
        step, total = self._step
        metrics["perf/remaining_seconds"] = (total - step) * self._typical_seconds
        return metrics

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write ``step 12/60  reward 0.523  …   4.3 s/step  2,900 tok/s  ETA 12 min``.

        Args:
            step: Number of the step.
            total: Number of steps of the run.
            metrics: Metrics of the step; `STEP_METRICS` says which are written.
        """
        columns = [f"step {step:{len(str(total))}}/{total}"]
        for name, metric in STEP_METRICS.items():
            if name in metrics:
                columns.append(f"{metric.label}{metrics[name]:{metric.layout}}{metric.unit}")
        remaining_seconds = metrics.get("perf/remaining_seconds")
        if remaining_seconds:
            columns.append(f"ETA {duration(remaining_seconds)}")
        self.note("  ".join(columns))

    def note(self, text: str) -> None:
        """Write a line of progress, unless progress is off."""
        if self._progress:
            self.tell(text)

    def heading(self, text: str) -> None:
        """Write the name of a stage that begins, unless progress is off."""
        if self._progress:
            self.tell(f"── {text} ──", style="bold")

    def warn(self, text: str) -> None:
        """Write ``warning: …``, always."""
        self.tell(f"warning: {text}", style="bold yellow")

    def tell(self, text: str, style: str | None = None) -> None:
        """Write a line of any length above the work in progress, always."""
        if not self._silent:
            with self._lock:
                self._rewrite("")
                self._rich.print(redact(text), style=style, markup=False, highlight=False, soft_wrap=True)
                self._written_at = time.monotonic()

    def say(self, text: str) -> None:
        """Write a result to standard output, always."""
        if not self._silent:
            sys.stdout.write(f"{redact(text)}\n")
            sys.stdout.flush()

    @contextmanager
    def phase(self, text: str, announce: bool = False) -> Iterator[None]:
        """Show a phase and its seconds until the block ends.

        Args:
            text: Name of the phase.
            announce: Whether a line is also written at the beginning, where lines are not rewritten.
        """
        if announce and not self._rewrites:
            self.note(text)
        with self.live(text):
            yield

    @contextmanager
    def bar(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show counted work until the block ends; see `live`.

        Args:
            label: Name of the work.
            total: Size of the work.
            unit: What is counted.

        Yields:
            A function ``show(done)``.
        """
        num_done = 0

        def show(done: int) -> None:
            nonlocal num_done
            num_done = done

        with self.live(label, unit, lambda: (num_done, total, "")):
            yield show

    @contextmanager
    def live(
        self, label: str, unit: str = "", progress: Progress = lambda: (0, 0, ""), part: str = ""
    ) -> Iterator[None]:
        """Show work until the block ends, with the estimated end of the run.

        Only the innermost block is shown: it is a part of the others.

        Args:
            label: Name of the work.
            unit: What is counted.
            progress: Returns how much is done; called from another thread.
            part: Name of this part of the step in `end_step`.
        """
        is_shown = not self._blocks and self._progress
        block = _Block(label, unit, progress, time.monotonic())
        has_ended = threading.Event()
        self._blocks.append(block)
        thread = threading.Thread(target=self._show_until, args=(has_ended,), name="progress", daemon=True)
        if is_shown:
            thread.start()
        try:
            yield
        finally:
            if is_shown:
                has_ended.set()
                thread.join()
                self._rewrite("")
            self._blocks.remove(block)
            if part:
                earlier_seconds = self._part_seconds.get(part, 0.0)
                self._part_seconds[part] = earlier_seconds + time.monotonic() - block.started_at

    def _show_until(self, has_ended: threading.Event) -> None:
        """Write the line of the work in progress whenever no line was written for some time."""
        show = self._rewrite if self._rewrites else self.note
        pause = REWRITTEN_SECONDS if self._rewrites else QUIET_SECONDS
        while not has_ended.wait(max(self._written_at + pause - time.monotonic(), 0)):
            if time.monotonic() >= self._written_at + pause:
                show(self._line())

    def _line(self) -> str:
        """Return ``step 3/60 (12 min left): rollouts 5/8 trajectories, DETAIL, 20 s``."""
        block = self._blocks[-1]
        step, total_steps = self._step
        now = time.monotonic()
        done, total, detail = block.progress()
        count = f" {done}/{total} {block.unit}" if total else ""
        run_left = ""
        block_left = ""
        if self._typical_seconds:
            step_left = max(self._typical_seconds - (now - self._step_started_at), 0)
            later_steps_left = (total_steps - step) * self._typical_seconds
            run_left = f" ({duration(step_left + later_steps_left)} left)"
        elif done and not total_steps:
            block_left = f"{duration((total - done) * (now - block.started_at) / done)} left"
        start = f"step {step}/{total_steps}{run_left}: " if total_steps else ""
        columns = [start + block.label + count, detail, duration(now - block.started_at), block_left]
        return redact(", ".join(column for column in columns if column))

    def _rewrite(self, text: str) -> None:
        """Replace the line that is rewritten; "" removes it."""
        with self._lock:
            if not text and not self._rewritten_width:
                return
            if self._stream.isatty():
                text = text[: self._rich.width - 1]
            padded = f"{text:{self._rewritten_width}}"  # covers the characters of a longer line before
            self._stream.write(f"\r{padded}" if text else f"\r{padded}\r")
            self._stream.flush()
            self._written_at = time.monotonic()
            self._rewritten_width = len(text)


def duration(seconds: float) -> str:
    """Format seconds in the largest unit of at least 1.5: ``80 s``, ``12 min``, ``3.2 h``, ``2.1 d``."""
    if seconds >= 1.5 * 86400:
        return f"{seconds / 86400:.1f} d"
    if seconds >= 1.5 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


def number(value: float) -> str:
    """Format four significant digits without trailing zeros: 0.5234, 12.35, 5612, 4e-07."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.4g}"


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Align columns under headers; numbers to the right, floats with three places.

    Args:
        rows: Cells of each row; each row has as many as there are headers.
        headers: Headers of the columns.
    """
    body = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *body, strict=True)]
    alignments = ["<"] * len(headers)
    for index, column in enumerate(zip(*rows, strict=True)):
        if all(isinstance(cell, int | float) for cell in column):
            alignments[index] = ">"

    def line(cells: Sequence[str]) -> str:
        padded = []
        for cell, alignment, width in zip(cells, alignments, widths, strict=True):
            padded.append(f"{cell:{alignment}{width}}")
        return "  ".join(padded).rstrip()

    underline = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), underline, *map(line, body)])
