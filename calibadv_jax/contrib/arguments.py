"""Numbers with limits, as types of command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(kind: type[int | float], least: float, below: float | None = None) -> Callable[[str], float]:
    """Return an argparse type for numbers of this kind that are at least `least` and less than `below`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= least or (below is not None and value >= below):  # NaN is not >= least
            limit = "" if below is None else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{limit}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse
