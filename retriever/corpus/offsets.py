"""Where each row of a corpus begins: found, checked and hashed once, then kept in a file.

The file is 4,096 bytes of JSON padded with spaces, then int64 offsets [documents + 1]: row i lies in
bytes offsets[i] to offsets[i + 1]. One file, renamed into place, is complete or absent.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from retriever.errors import RetrieverError
from retriever.files import replacing
from retriever.interfaces import Row

VERSION = 1
HEADER = 4096
CACHED_FROM = 16 * 2**20  # bytes; a smaller corpus is scanned in less than a second
MAX_LINE = 16 * 2**20  # bytes of a row; a longer one would cost several times as much memory
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # whether the other half follows or not
PROBES, PROBE = 64, 4096  # parts of the file that its fingerprint reads, and bytes of each


@dataclass(frozen=True)
class Offsets:
    """int64 [documents + 1] in `starts`, and the hash of all ids and contents."""

    starts: np.ndarray
    sha256: str


def read_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The file's lines, each with its end.

    Raises:
        RetrieverError: a line longer than MAX_LINE, which is not read to its end.
    """
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise RetrieverError(
                f"{path}:{number}: longer than {MAX_LINE:,} bytes; cut the passage into several, one a line"
            )
        yield line


def parse_row(line: bytes, where: str) -> Row:
    """A row with its id as a string.

    Raises:
        RetrieverError: not an object with `id` and a non-empty `contents`.
    """
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{where}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        problem = f"not valid JSON ({error.msg}); each line is one object" if line.strip() else "empty row"
        raise RetrieverError(f"{where}: {problem}; correct or remove the line") from error
    except RecursionError as error:
        raise RetrieverError(f"{where}: nested too deeply; remove the field that is") from error
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str) or not row["contents"].strip():
        raise RetrieverError(
            f"{where}: expected an object with a non-empty string 'contents'; convert rows of title and text"
            " with python -m retriever.prepare_corpus"
        )
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), str | int):
        raise RetrieverError(f"{where}: field 'id' must be a string or a number, got {row.get('id')!r}")
    return row | {"id": str(row["id"])}


def check_sendable(line: bytes, row: Any, where: str) -> None:
    """
    Raises:
        RetrieverError: the row, which a reply holds as it is, has half a surrogate pair: no client reads it.
    """
    if HALF_PAIR.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RetrieverError(f"{where}: holds half a surrogate pair; remove it") from error


def scan(
    lines: Iterable[bytes],
    path: Path,
    row_at: Callable[[int, int], Row],
    places: Sequence[str] | None = None,
) -> Offsets:
    """Reads every row once.

    Args:
        row_at: the row between two offsets, to compare ids whose hashes are equal.
        places: of the rows, for messages; None: they are the lines of `path`.

    Raises:
        RetrieverError: a malformed or empty row, or an id used twice, with file and line.
    """
    starts, keys = array("q", [0]), array("q")
    digest = hashlib.sha256()
    for number, line in enumerate(lines):
        where = places[number] if places else f"{path}:{number + 1}"
        row = parse_row(line, where)
        check_sendable(line, row, where)
        digest.update(f"{row['id']}\0{row['contents']}\0".encode())
        keys.append(hash(row["id"]))
        starts.append(starts[-1] + len(line))
    if not keys:
        raise RetrieverError(f"{path}: no passages in it")
    offsets = Offsets(np.frombuffer(starts, np.int64), digest.hexdigest())
    twice = find_duplicate(
        np.frombuffer(keys, np.int64),
        lambda i: row_at(int(offsets.starts[i]), int(offsets.starts[i + 1]))["id"],
    )
    if twice:
        first, second, name = twice
        here = places[second] if places else f"{path}:{second + 1}"
        there = f"at {places[first]}" if places else f"in line {first + 1}"
        raise RetrieverError(f"{here}: id {name!r} was used before, {there}; ids must be unique")
    return offsets


def find_duplicate(keys: np.ndarray, id_at: Callable[[int], str]) -> tuple[int, int, str] | None:
    """The first row whose id an earlier row has: (earlier row, row, id).

    Args:
        keys: int64 [documents], a hash of each id. Equal hashes do not prove equal ids: 21 million
            random ones hold an equal pair by chance in one of 80,000 corpora. So the ids are compared.
    """
    ordered = np.sort(keys)  # sorted values, not an argsort: half the memory
    suspects = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not suspects.size:
        return None
    seen: dict[str, int] = {}
    for i in np.flatnonzero(np.isin(keys, suspects)).tolist():
        name = id_at(i)
        if name in seen:
            return seen[name], i, name
        seen[name] = i
    return None


def cache_file(corpus: Path) -> Path:
    """Beside the corpus, or in the user's cache folder if that folder cannot be written."""
    beside = corpus.with_name(corpus.name + ".offsets")
    if beside.is_file() or os.access(corpus.parent, os.W_OK):
        return beside
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retriever"
    name = hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()[:16]
    return folder / f"{corpus.name}.{name}.offsets"


def load_offsets(corpus: Path) -> Offsets | None:
    """The kept offsets, memory-mapped; None if there are none or the corpus has changed since."""
    path = cache_file(corpus)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = file.read(HEADER)
    try:
        state = json.loads(header)
    except ValueError:  # another program's file, or a damaged one: scanning replaces it
        return None
    identity = _identity(corpus)
    if not isinstance(state, dict) or any(state.get(key) != value for key, value in identity.items()):
        return None
    count = int(state["documents"]) + 1
    if path.stat().st_size != HEADER + 8 * count:
        return None
    starts = np.memmap(path, np.int64, mode="r", offset=HEADER, shape=(count,))
    return Offsets(starts, state["sha256"]) if starts[-1] == identity["size"] else None


def save_offsets(corpus: Path, offsets: Offsets) -> None:
    """Writes the file whole or not at all.

    Raises:
        RetrieverError: neither place can be written.
    """
    path = cache_file(corpus)
    state = _identity(corpus) | {"documents": len(offsets.starts) - 1, "sha256": offsets.sha256}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, by_many=True) as partial, partial.open("wb") as file:
            file.write(json.dumps(state).encode().ljust(HEADER))
            offsets.starts.tofile(file)
    except OSError as error:
        raise RetrieverError(
            f"{path}: offsets of the corpus cannot be written ({error.strerror});"
            " set XDG_CACHE_HOME to a folder that can be"
        ) from error


def _identity(corpus: Path) -> dict[str, Any]:
    """Size, time and a hash over parts of the file: hashing all of 21 million passages would take minutes."""
    state = corpus.stat()
    digest = hashlib.sha256()
    with corpus.open("rb") as file:
        for start in np.linspace(0, max(0, state.st_size - PROBE), PROBES).astype(np.int64).tolist():
            file.seek(start)
            digest.update(file.read(PROBE))
    return {
        "version": VERSION,
        "size": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "fingerprint": digest.hexdigest(),
    }
