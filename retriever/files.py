"""Files that are there whole or not at all, whatever ends the process, and however full the disk is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, by_many: bool = False) -> Iterator[Path]:
    """Another name beside `path` to write to: it becomes `path` if the block ends well, else it goes.

    Args:
        by_many: several processes may write it at once; each has a name of its own. What a kill leaves is
            then not written over.

    Raises:
        OSError: it cannot be written; an older file of this name is as it was.
    """
    own = f".{os.getpid()}" if by_many else ""
    partial = path.with_name(f".{path.name}{own}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
