"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path, by_many: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`, renamed to it if the block succeeds and removed otherwise.

    Raises OSError: an older file is unchanged. `by_many`: several processes may write it at once.
    """
    process = f".{os.getpid()}" if by_many else ""
    partial = path.with_name(f".{path.name}{process}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for an empty folder ``PATH.unfinished``."""
    partial = path.with_name(path.name + ".unfinished")
    previous = path.with_name(path.name + ".previous")
    for leftover in (partial, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            path.rename(previous)
        partial.rename(path)
    finally:
        if previous.exists() and not path.exists():
            previous.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)
