"""Progress with rate and time left: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two lines of a log
LINE = "{desc}: {n_fmt} of {total_fmt} ({percentage:.1f} %), {rate_fmt}, {remaining} left"


def progress_bar(total: int, what: str, is_shown: bool = True, done: int = 0) -> Any:
    """A tqdm bar over passages; as a context manager it ends with its block.

    Args:
        done: passages of earlier runs, which count neither for the rate nor for the time left.
    """
    options = {"desc": what, "unit": " passages", "total": total, "initial": done, "leave": False}
    if sys.stderr.isatty():
        return tqdm(disable=not is_shown, unit_scale=True, **options)
    log = _Lines(sys.stderr)
    wait = {"delay": LOG_SECONDS, "mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS}
    return tqdm(disable=not is_shown, file=log, bar_format=LINE, **wait, **options)


class _Lines:
    """A stream in which each state of a bar is a line of its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if shown := text.strip():
            self._stream.write(shown + "\n")

    def flush(self) -> None:
        self._stream.flush()
