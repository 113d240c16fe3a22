"""The corpus: JSON Lines of ``{"id", "contents": "\\"Title\\"\\ntext"}`` as wiki-18, mapped into memory.

Offsets of a large corpus are kept in a file: 4,096 bytes of JSON padded with spaces, then int64
[documents + 1]; row i lies in bytes offsets[i] to offsets[i + 1].
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import math
import mmap
import os
import re
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from tqdm import tqdm

from retriever.corpus.layouts import is_convertible, read_passages
from retriever.errors import RetrieverError
from retriever.files import atomic_write
from retriever.interfaces import CorpusRow


class Pages:
    """Rows by URL, read on demand from a file that stays open: atomic_write it changes nothing.

    Raises RetrieverError: no such file, or a malformed row. `sha256` is the hash of all rows.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise RetrieverError(f"{path}: no such file of pages; correct --pages_path")
        self.path = path
        self._start: dict[str, int] = {}
        self._reading = threading.Lock()  # requests share one place in the file
        self._file = path.open("rb")
        offset, digest = 0, hashlib.sha256()
        for number, line in enumerate(read_lines(self._file, path), 1):
            if line.strip():
                self._start[self._url(line, number)] = offset
                digest.update(line.strip() + b"\n")
            offset += len(line)
        self.sha256 = digest.hexdigest()

    def access(self, url: str) -> dict[str, Any] | None:
        """Return the page's row, or None; RetrieverError if the file was changed since it was read.

        ``…/index.php/Title`` is looked up as ``…/index.php?title=Title``.
        """
        url = url.replace("index.php/", "index.php?title=")
        start = self._start.get(url)
        if start is None:
            return None
        with self._reading:
            self._file.seek(start)
            line = self._file.readline()
        try:
            row: dict[str, Any] = json.loads(line)
            if row["url"] == url:
                return row
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise RetrieverError(f"{self.path}: changed while it is served; start the service again")

    def _url(self, line: bytes, number: int) -> str:
        where = f"{self.path}:{number}"
        try:
            row = DECODER.decode(line.decode())
            url, contents = row["url"], row["contents"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrieverError(
                f"{where}: expected a JSON object with 'url' and 'contents' ({error})"
            ) from error
        if not isinstance(url, str) or not isinstance(contents, str):
            name, wrong = ("contents", contents) if isinstance(url, str) else ("url", url)
            raise RetrieverError(f"{where}: field {name!r} must be a string, got {wrong!r}")
        check_sendable(line, row, where)
        return url


VERSION = 1
HEADER = 4096
CACHED_FROM = 16 * 2**20  # bytes; a smaller corpus is scanned in less than a second
MAX_LINE = 16 * 2**20  # bytes of a row; a longer one would cost several times as much memory
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # whether the other half follows or not
PROBES, PROBE = 64, 4096  # parts of the file that its fingerprint reads, and bytes of each


@dataclass(frozen=True)
class Offsets:
    """Offsets int64 [documents + 1], and the hash of all ids and contents."""

    starts: np.ndarray
    sha256: str


def read_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, with their ends; RetrieverError for a line longer than MAX_LINE."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise RetrieverError(f"{path}:{number}: longer than {MAX_LINE:,} bytes; cut the passage")
        yield line


def _finite(text: str) -> float:
    """Raise ValueError for NaN, Infinity and 1e999, which Python reads, but no JSON reply may hold."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_row(line: bytes, where: str) -> CorpusRow:
    """Return a row with its id as a string; RetrieverError without `id` and a non-empty `contents`."""
    try:
        row = DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{where}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except ValueError as error:  # a number of 5,000 digits too
        fault = f"not valid JSON ({getattr(error, 'msg', error)}); each line is one object"
        problem = fault if line.strip() else "empty row"
        raise RetrieverError(f"{where}: {problem}; correct or remove the line") from error
    except RecursionError as error:
        raise RetrieverError(f"{where}: nested too deeply; remove the field that is") from error
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str) or not row["contents"].strip():
        problem = f"{where}: expected an object with a non-empty string 'contents'"
        advice = "convert rows of title and text with python -m retriever.prepare_corpus"
        raise RetrieverError(f"{problem}; {advice}")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), str | int):
        raise RetrieverError(f"{where}: field 'id' must be a string or a number, got {row.get('id')!r}")
    return row | {"id": str(row["id"])}


def check_sendable(line: bytes, row: Any, where: str) -> None:
    """Raise RetrieverError for a row with half a surrogate pair: no client could read the reply."""
    if HALF_PAIR.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RetrieverError(f"{where}: holds half a surrogate pair; remove it") from error


def scan(
    lines: Iterable[bytes], text: bytes | mmap.mmap, name: object, places: Sequence[str] | None = None
) -> Offsets:
    """Read every row once; raises RetrieverError for a malformed row or a repeated id, with its place.

    Args:
        text: all lines, to compare ids whose hashes are equal.
        places: of the rows, for messages; None: the lines of `name`.
    """
    starts, keys = array("q", [0]), array("q")
    digest = hashlib.sha256()
    for number, line in enumerate(lines):
        where = places[number] if places else f"{name}:{number + 1}"
        row = parse_row(line, where)
        check_sendable(line, row, where)
        digest.update(f"{row['id']}\0{row['contents']}\0".encode())
        keys.append(hash(row["id"]))
        starts.append(starts[-1] + len(line))
    if not keys:
        raise RetrieverError(f"{name}: no passages in it")
    duplicate = find_duplicate(
        np.frombuffer(keys, np.int64), lambda i: parse_row(text[starts[i] : starts[i + 1]], str(name))["id"]
    )
    if duplicate:
        first, second, repeated = duplicate
        here = places[second] if places else f"{name}:{second + 1}"
        there = f"at {places[first]}" if places else f"in line {first + 1}"
        raise RetrieverError(f"{here}: id {repeated!r} was used before, {there}; ids must be unique")
    return Offsets(np.frombuffer(starts, np.int64), digest.hexdigest())


def find_duplicate(keys: np.ndarray, id_at: Callable[[int], str]) -> tuple[int, int, str] | None:
    """Return (earlier row, row, id) of the first repeated id, from a hash of each: int64 [documents].

    Ids of equal hashes are compared: one in 80,000 corpora of 21 million rows has such a pair by chance.
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
    """Return the file beside the corpus, or in the user's cache folder if that folder cannot be written."""
    beside = corpus.with_name(corpus.name + ".offsets")
    if beside.is_file() or os.access(corpus.parent, os.W_OK):
        return beside
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retriever"
    name = hashlib.sha256(str(corpus.resolve()).encode()).hexdigest()[:16]
    return folder / f"{corpus.name}.{name}.offsets"


def load_offsets(corpus: Path) -> Offsets | None:
    """Return the kept offsets, memory-mapped; None if there are none or the corpus has changed since."""
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
    """Write the file of offsets; RetrieverError if neither place can be written."""
    path = cache_file(corpus)
    state = _identity(corpus) | {"documents": len(offsets.starts) - 1, "sha256": offsets.sha256}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, by_many=True) as partial, partial.open("wb") as file:
            file.write(json.dumps(state).encode().ljust(HEADER))
            offsets.starts.tofile(file)
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error


def _identity(corpus: Path) -> dict[str, Any]:
    """Return size, time and a hash over parts of the file: hashing 21 million passages would take minutes."""
    state = corpus.stat()
    digest = hashlib.sha256()
    with corpus.open("rb") as file:
        for start in np.linspace(0, max(0, state.st_size - PROBE), PROBES).astype(np.int64).tolist():
            file.seek(start)
            digest.update(file.read(PROBE))
    sizes = {"version": VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    return sizes | {"fingerprint": digest.hexdigest()}


GZIP_LIMIT = 2**30  # unpacked bytes; these lie in memory


class Corpus(Sequence[CorpusRow]):
    """Rows in file order, parsed on demand, and the hash that an index is checked against."""

    def __init__(self, path: Path, text: bytes | mmap.mmap, offsets: Offsets):
        self.path, self.sha256 = path, offsets.sha256
        self._text, self._starts = text, offsets.starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> CorpusRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[CorpusRow]: ...
    def __getitem__(self, index: int | slice) -> CorpusRow | list[CorpusRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        i = index % len(self)
        return parse_row(self._text[self._starts[i] : self._starts[i + 1]], f"{self.path}:{i + 1}")


def split_contents(contents: str) -> tuple[str, str]:
    """Return (title, text) of a passage; the title is the first line without its quotes."""
    title, _, text = contents.partition("\n")
    return title.strip().removeprefix('"').removesuffix('"'), text


def load_corpus(path: Path, progress: bool = True) -> Corpus:
    """Map a ``.jsonl`` into memory, or read a small ``.jsonl.gz`` or a file of another layout.

    Every row is checked the first time; offsets of a large file are then kept beside it. Raises
    RetrieverError: no such file, a malformed row or a repeated id (with its place), or too large to hold.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such corpus; set --corpus_path to a .jsonl, csv, tsv or .gz file")
    if is_convertible(path):
        return _converted(path, progress)
    if path.suffix == ".gz":
        return _in_memory(path, _unpack(path))
    size = path.stat().st_size
    if not size:
        raise RetrieverError(f"{path}: no passages in it")
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offsets = load_offsets(path) if size >= CACHED_FROM else None
    if offsets is None:
        offsets = scan(_lines(path, size, progress), text, path)
        if size >= CACHED_FROM:
            save_offsets(path, offsets)
    return Corpus(path, text, offsets)


def _converted(path: Path, progress: bool) -> Corpus:
    convert = f"python -m retriever.prepare_corpus {path} --output corpus.jsonl"
    rows, places = io.BytesIO(), []
    for where, passage in read_passages(path, progress):
        if passage.id is None:
            raise RetrieverError(f"{where}: no id; {convert} --number_ids numbers the rows")
        if not passage.contents:
            raise RetrieverError(f"{where}: no text; {convert} drops it")
        rows.write(passage.to_line())
        places.append(where)
        if rows.tell() > GZIP_LIMIT:
            problem = f"{path}: more than {GZIP_LIMIT:,} bytes as JSON"
            raise RetrieverError(f"{problem}; {convert} makes a mapped one")
    return _in_memory(path, rows.getvalue(), places)


def _in_memory(path: Path, text: bytes, places: Sequence[str] | None = None) -> Corpus:
    return Corpus(path, text, scan(read_lines(io.BytesIO(text), path), text, path, places))


def _lines(path: Path, size: int, progress: bool) -> Iterator[bytes]:
    """Yield lines of the file rather than the mapping, whose pages would count as this process's memory."""
    bar = tqdm(total=size, desc="corpus", unit="B", unit_scale=True, disable=None if progress else True)
    with path.open("rb", buffering=2**20) as file, bar:
        for line in read_lines(file, path):
            yield line
            bar.update(len(line))


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            text = file.read(GZIP_LIMIT + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RetrieverError(f"{path}: broken file: {error}") from error
    if len(text) > GZIP_LIMIT:
        advice = f"unpack it (gunzip -k {path}), then it is mapped"
        raise RetrieverError(f"{path}: more than {GZIP_LIMIT:,} bytes; {advice}")
    return text
