"""Shared by the scripts that generate a page of docs/."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str, module: str) -> int:
    """Write the page; with ``--check`` on the command line only compare it.

    Args:
        module: that generates the page, for the message.

    Returns:
        The exit status: 1 where the page on disk is another one.
    """
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{path.name} is out of date; run: python -m {module}\n")
    return 1
