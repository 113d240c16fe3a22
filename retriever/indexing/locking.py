"""Two builds must not write into one folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retriever.errors import RetrieverError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds ``FOLDER.lock``, which the system gives back however the process ends.

    Raises:
        RetrieverError: another process has it.
    """
    path = folder.with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _take(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given back: who finds the file must find it locked
        os.close(file)


def _take(path: Path, folder: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise RetrieverError(
                f"{folder}: another process is building it; wait until it has ended, or choose another folder"
            ) from error
        if path.is_file() and os.fstat(file).st_ino == path.stat().st_ino:
            return file
        os.close(file)  # its owner has just removed it
