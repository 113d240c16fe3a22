"""Progress of work on passages, on a terminal or in a log."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

# Seconds between two lines of a log.
LOG_SECONDS = 30.0
# Format of a line of a log.
LINE = "{desc}: {n_fmt} of {total_fmt} ({percentage:.1f} %), {rate_fmt}, {remaining} left"


class _LineStream:
    """A stream for tqdm that writes each state of the bar on a line of its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        state = text.strip()
        if state:
            self._stream.write(state + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress_bar(total: int, name: str, is_shown: bool = True, done: int = 0) -> Any:
    """Return a tqdm bar over passages: a bar on a terminal, a line every LOG_SECONDS in a log.

    Args:
        total: Number of passages.
        name: The work, such as encode.
        is_shown: Show it at all.
        done: Passages done by earlier runs; they count neither for the rate nor for the time left.

    Returns:
        A context manager; its `update(count)` adds passages.
    """
    options: dict[str, Any] = {
        "desc": name,
        "unit": " passages",
        "total": total,
        "initial": done,
        "leave": False,
        "disable": not is_shown,
    }
    if sys.stderr.isatty():
        return tqdm(unit_scale=True, **options)
    return tqdm(
        file=_LineStream(sys.stderr),
        bar_format=LINE,
        delay=LOG_SECONDS,
        mininterval=LOG_SECONDS,
        maxinterval=LOG_SECONDS,
        **options,
    )
