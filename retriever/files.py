"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path, by_many: bool = False) -> Iterator[Path]:
    """Rename a temporary file to `path` if the block succeeds, and remove it otherwise.

    Args:
        path: The file to make or to replace.
        by_many: Several processes may write the file at the same time; each has its own temporary file.

    Yields:
        The temporary file, beside `path`; the block makes and closes it.

    Raises:
        OSError: The file cannot be written or renamed; an older file at `path` is unchanged.
    """
    process = f".{os.getpid()}" if by_many else ""
    partial = path.with_name(f".{path.name}{process}.partial")
    # A link of this name, in a folder from somebody else, would be followed.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Rename a temporary folder to `path` if the block succeeds, and remove it otherwise.

    Args:
        path: The folder to make or to replace.

    Yields:
        The temporary folder ``PATH.unfinished``, which exists and is empty.

    Raises:
        OSError: The folder cannot be made or renamed; an older folder at `path` is unchanged.
    """
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
