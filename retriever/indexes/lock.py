"""The lock of a folder that is being written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retriever.errors import RetrieverError


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock ``FOLDER.lock`` within the block.

    The system releases the lock however the process ends.

    Args:
        folder: The folder to be written; it need not exist.

    Raises:
        RetrieverError: Another process holds the lock.
        OSError: The lock file cannot be made.
    """
    path = folder.with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # A link in the place of the lock is not followed.
        with open(path, "a", opener=_open_no_link) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RetrieverError(
                    f"{folder}: another process is building it; wait until it has ended"
                ) from error
            # If the previous owner removed the file after it was opened here, the lock is that of a removed
            # file, and the next round opens a new one.
            if path.is_file() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # while it is locked: no process locks a file to be removed
                return
