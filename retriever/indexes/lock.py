"""The lock of a folder that is being written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retriever.errors import RetrieverError


class Locked(RetrieverError):
    """Another process holds the lock of a folder.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path):
        super().__init__(f"{folder}: another process is building it; wait until it has ended")
        self.folder = folder


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def wait_until_unlocked(folder: Path) -> None:
    """Wait until no process holds the lock of a folder.

    Args:
        folder: The folder.
    """
    with suppress(FileNotFoundError), _lock_path(folder).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock ``FOLDER.lock`` within the block.

    The system releases the lock however the process ends.

    Args:
        folder: The folder to be written; it need not exist.

    Raises:
        Locked: Another process holds the lock.
        OSError: The lock file cannot be made.
    """
    path = _lock_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Locked(folder) from error
            # If the previous owner removed the file after it was opened here, the lock is that of a removed
            # file, and the next round opens a new one.
            if path.is_file() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # while it is locked: no process locks a file to be removed
                return
