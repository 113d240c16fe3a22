"""Offsets of a corpus: where each row begins in the file. Those of a large corpus are kept in a file.

The file has 4,096 bytes of JSON padded with spaces, then int64 [documents + 1]; row i lies in the bytes
offsets[i] to offsets[i + 1] of the corpus.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retriever.corpus.rows import check_sendable, parse_row
from retriever.errors import RetrieverError
from retriever.files import atomic_write

# Version of the format of the file.
VERSION = 1
# Bytes of the JSON at the beginning of the file.
HEADER = 4096
# Bytes of a corpus from which its offsets are kept; a smaller one is scanned in less than a second.
CACHED_FROM = 16 * 2**20
# Number of parts of the corpus that its fingerprint reads, and bytes of each part.
PROBES = 64
PROBE = 4096


@dataclass(frozen=True)
class Offsets:
    """Where the rows of a corpus lie, and what they hold.

    Attributes:
        starts: int64 [documents + 1], bytes; row i lies from starts[i] to starts[i + 1].
        sha256: Hash of all ids and contents, in hexadecimal digits.
    """

    starts: np.ndarray
    sha256: str


def scan(
    lines: Iterable[bytes], text: bytes | mmap.mmap, name: object, places: Sequence[str] | None = None
) -> Offsets:
    """Read and check every row once.

    Args:
        lines: The lines of the corpus, with their ends.
        text: All lines together, to compare ids whose hashes are equal.
        name: The file, for messages.
        places: Place of each row, for messages; None for the lines of `name`.

    Returns:
        The offsets of the rows in `text`.

    Raises:
        RetrieverError: A row is malformed or an id is repeated (with its place), or there is no row.
    """
    starts = array("q", [0])
    id_hashes = array("q")
    digest = hashlib.sha256()
    for number, line in enumerate(lines):
        where = places[number] if places else f"{name}:{number + 1}"
        row = parse_row(line, where)
        check_sendable(line, row, where)
        digest.update(f"{row['id']}\0{row['contents']}\0".encode())
        id_hashes.append(hash(row["id"]))
        starts.append(starts[-1] + len(line))
    if not id_hashes:
        raise RetrieverError(f"{name}: no passages in it")

    def id_at(number: int) -> str:
        line = text[starts[number] : starts[number + 1]]
        row_id: str = parse_row(line, str(name))["id"]
        return row_id

    duplicate = find_duplicate(np.frombuffer(id_hashes, np.int64), id_at)
    if duplicate:
        first, second, repeated = duplicate
        here = places[second] if places else f"{name}:{second + 1}"
        there = f"at {places[first]}" if places else f"in line {first + 1}"
        raise RetrieverError(f"{here}: id {repeated!r} was used before, {there}; ids must be unique")
    return Offsets(np.frombuffer(starts, np.int64), digest.hexdigest())


def find_duplicate(id_hashes: np.ndarray, id_at: Callable[[int], str]) -> tuple[int, int, str] | None:
    """Find the first id that occurs twice.

    Ids of equal hashes are compared: one in 80,000 corpora of 21 million rows has such a pair by chance.

    Args:
        id_hashes: int64 [documents], a hash of the id of each row.
        id_at: Returns the id of a row, by its number.

    Returns:
        Number of the earlier row, number of the row that repeats its id, and the id; None if ids are unique.
    """
    ordered = np.sort(id_hashes)  # sorted values, not an argsort: half the memory
    is_repeated = ordered[1:] == ordered[:-1]
    repeated_hashes = np.unique(ordered[1:][is_repeated])
    if not repeated_hashes.size:
        return None
    row_of_id: dict[str, int] = {}
    suspects = np.flatnonzero(np.isin(id_hashes, repeated_hashes))
    for number in suspects.tolist():
        row_id = id_at(number)
        if row_id in row_of_id:
            return row_of_id[row_id], number, row_id
        row_of_id[row_id] = number
    return None


def cache_file(corpus: Path, is_beside: bool = True) -> Path:
    """Return the file of offsets.

    Args:
        corpus: The file of the corpus.
        is_beside: Whether the file is to lie beside the corpus, unless that folder is read-only. Otherwise it
            lies in the user's cache folder.
    """
    beside = corpus.with_name(corpus.name + ".offsets")
    is_writable = beside.is_file() or os.access(corpus.parent, os.W_OK)
    if is_beside and is_writable:
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path_hash = hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()[:16]
    return cache / "retriever" / f"{corpus.name}.{path_hash}.offsets"


def load_offsets(corpus: Path) -> Offsets | None:
    """Return the kept offsets of a corpus, memory-mapped.

    Args:
        corpus: The file of the corpus.

    Returns:
        The offsets; None if there are none, they are damaged, or the corpus has changed since.
    """
    beside = _read_offsets(cache_file(corpus), corpus)
    if beside is not None:
        return beside
    return _read_offsets(cache_file(corpus, is_beside=False), corpus)


def _read_offsets(path: Path, corpus: Path) -> Offsets | None:
    """Return the offsets of a corpus in a file, as `load_offsets` says."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = file.read(HEADER)
    try:
        state = json.loads(header)
    except ValueError:  # another program's file, or a damaged one: scanning replaces it
        return None
    if not isinstance(state, dict):
        return None
    identity = _identity(corpus)
    if any(state.get(key) != value for key, value in identity.items()):
        return None
    count = int(state["documents"]) + 1
    if path.stat().st_size != HEADER + 8 * count:
        return None
    starts = np.memmap(path, np.int64, mode="r", offset=HEADER, shape=(count,))
    if starts[-1] != identity["size"]:
        return None
    return Offsets(starts, state["sha256"])


def save_offsets(corpus: Path, offsets: Offsets, is_beside: bool = True) -> None:
    """Write the file of offsets.

    Args:
        corpus: The file of the corpus, as it is when its offsets are loaded again.
        offsets: The offsets of its rows.
        is_beside: As for `cache_file`.

    Raises:
        RetrieverError: Neither place can be written.
    """
    path = cache_file(corpus, is_beside)
    state = _identity(corpus)
    state["documents"] = len(offsets.starts) - 1
    state["sha256"] = offsets.sha256
    header = json.dumps(state).encode().ljust(HEADER)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, by_many=True) as partial, partial.open("wb") as file:
            file.write(header)
            offsets.starts.tofile(file)
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error


def _identity(corpus: Path) -> dict[str, Any]:
    """Return size, time and fingerprint of the file.

    The fingerprint is a hash of parts of the file: hashing 21 million passages would take minutes.
    """
    state = corpus.stat()
    digest = hashlib.sha256()
    last_start = max(0, state.st_size - PROBE)
    starts = np.linspace(0, last_start, PROBES).astype(np.int64)
    with corpus.open("rb") as file:
        for start in starts.tolist():
            file.seek(start)
            digest.update(file.read(PROBE))
    return {
        "version": VERSION,
        "size": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "fingerprint": digest.hexdigest(),
    }
