"""Reading of the files that encoders keep in the folder of an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

from retriever.errors import RetrieverError, reason


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Turn errors of reading an encoder's file, within the block, into a RetrieverError that names it.

    Yields:
        The path.
    """
    try:
        yield path
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RetrieverError(f"{path}: cannot be read ({reason(error)}); build the index again") from error
