"""Numbers with limits, as types of command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(kind: type[int | float], least: float, below: float | None = None) -> Callable[[str], float]:
    """Return an argparse type for numbers between two limits.

    Args:
        kind: int or float.
        least: the smallest number that is allowed.
        below: numbers must be less than this; None: there is no such limit.

    Returns:
        A function that parses a text. It raises ValueError if the text is no such number, and
        ArgumentTypeError if the number is beyond a limit.
    """
    limits = f"{least:g} or more"
    if below is not None:
        limits = f"{limits} and below {below:g}"

    def parse(text: str) -> float:
        value = kind(text)
        is_enough = value >= least  # false for NaN
        is_too_much = below is not None and value >= below
        if not is_enough or is_too_much:
            raise argparse.ArgumentTypeError(f"{text}: give {limits}")
        return value

    parse.__name__ = kind.__name__  # argparse writes it: "invalid int value"
    return parse
