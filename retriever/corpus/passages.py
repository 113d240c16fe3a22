"""Passages in wiki-18's format: JSON Lines of ``{"id", "contents": "\\"Title\\"\\ntext"}``."""

from __future__ import annotations

import gzip
import io
import mmap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from tqdm import tqdm

from retriever.corpus import offsets
from retriever.corpus.layouts import is_convertible, read_passages
from retriever.corpus.offsets import parse_row, read_lines
from retriever.errors import RetrieverError
from retriever.interfaces import Row

GZIP_LIMIT = 2**30  # unpacked bytes; these lie in memory


class Corpus(Sequence[Row]):
    """Rows in file order, parsed when they are asked for, and a hash that an index is checked against."""

    def __init__(self, path: Path, text: bytes | mmap.mmap, starts: np.ndarray, sha256: str):
        self.path, self.sha256 = path, sha256
        self._text, self._starts = text, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        i = index % len(self)
        return parse_row(self._text[self._starts[i] : self._starts[i + 1]], f"{self.path}:{i + 1}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Corpus) and (len(self), self.sha256) == (len(other), other.sha256)

    def __hash__(self) -> int:
        return hash(self.sha256)


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of a passage; the title is the first line without its quotes."""
    title, _, text = contents.partition("\n")
    return title.strip().removeprefix('"').removesuffix('"'), text


def load_corpus(path: Path, progress: bool = True) -> Corpus:
    """Maps a ``.jsonl`` into memory, or reads a small ``.jsonl.gz`` or file of another layout.

    The first time every row is read and checked; the offsets of a large file are then kept beside it.

    Raises:
        RetrieverError: no such file, a malformed or empty row or an id used twice (with file and line),
            or one too large to hold that is not mapped.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such corpus; set --corpus_path to a .jsonl, csv, tsv or .gz file")
    if is_convertible(path):
        return _converted(path, progress)
    if path.suffix == ".gz":
        packed = _unpack(path)
        lines = read_lines(io.BytesIO(packed), path)
        found = offsets.scan(lines, path, lambda a, b: parse_row(packed[a:b], str(path)))
        return Corpus(path, packed, found.starts, found.sha256)
    size = path.stat().st_size
    if not size:
        raise RetrieverError(f"{path}: no passages in it")
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    kept = offsets.load_offsets(path) if size >= offsets.CACHED_FROM else None
    if kept is None:
        kept = offsets.scan(_lines(path, size, progress), path, lambda a, b: parse_row(text[a:b], str(path)))
        if size >= offsets.CACHED_FROM:
            offsets.save_offsets(path, kept)
    return Corpus(path, text, kept.starts, kept.sha256)


def _converted(path: Path, progress: bool) -> Corpus:
    """Return the passages of a file of another layout, as JSON Lines in memory."""
    convert = f"python -m retriever.prepare_corpus {path} --output corpus.jsonl"
    rows, places = io.BytesIO(), []
    for where, passage in read_passages(path, progress):
        if passage.id is None or not passage.contents:
            lack, option = (
                ("id", " --number_ids numbers the rows") if passage.id is None else ("text", " drops it")
            )
            raise RetrieverError(f"{where}: no {lack}; {convert}{option}")
        rows.write(passage.to_line())
        places.append(where)
        if rows.tell() > GZIP_LIMIT:
            raise RetrieverError(
                f"{path}: more than {GZIP_LIMIT:,} bytes as JSON; convert it ({convert}) and name the .jsonl,"
                " which is mapped into memory instead"
            )
    packed = rows.getvalue()
    lines = read_lines(io.BytesIO(packed), path)
    found = offsets.scan(lines, path, lambda a, b: parse_row(packed[a:b], str(path)), places)
    return Corpus(path, packed, found.starts, found.sha256)


def _lines(path: Path, size: int, progress: bool) -> Iterator[bytes]:
    """Reads the file rather than the mapping, whose pages would all count as this process's memory."""
    bar = tqdm(total=size, desc="corpus", unit="B", unit_scale=True, disable=None if progress else True)
    with path.open("rb", buffering=2**20) as file, bar:
        for line in read_lines(file, path):
            yield line
            bar.update(len(line))


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            packed = file.read(GZIP_LIMIT + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RetrieverError(f"{path}: broken file: {error}") from error
    if len(packed) > GZIP_LIMIT:
        raise RetrieverError(
            f"{path}: more than {GZIP_LIMIT:,} bytes when unpacked; unpack it (gunzip -k {path}) and name"
            " the .jsonl, which is mapped into memory instead"
        )
    return packed
