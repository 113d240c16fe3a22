"""Passages of other corpora, row by row: title/text JSON Lines, BEIR, DPR's and MS MARCO's tsv, csv, parquet.

The first bytes of a file decide its layout, not its name. Files may be gzipped, and larger than the memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from retriever.errors import RetrieverError, reason

# First bytes of a parquet file and of a gzipped file.
PARQUET = b"PAR1"
GZIP = b"\x1f\x8b"
# Rows of a parquet file that are in memory at once.
BATCH = 1024
# Bytes that are sure to hold the first row of a file.
HEAD = 2**16
# Names of the field of the id, of the text and of the title; the first that a row has is taken.
IDS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")
TEXTS = ("text", "passage", "body", "content", "paragraph_text")
TITLES = ("title", "page_title")
# Columns of MS MARCO's passages and documents, which have no header, by their number.
TABLES = {2: ["id", "text"], 4: ["id", "url", "title", "text"]}

# A row of any layout, with its place for messages.
PlacedRow = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Passage:
    """A passage of any layout.

    Attributes:
        id: Its id; None if the row has none.
        contents: Title and text as in our corpus; empty if the row has no text.
        url: Its address; empty if the row has none.
    """

    id: str | None
    contents: str
    url: str = ""

    def to_line(self) -> bytes:
        """Return the row of our corpus as a line of JSON."""
        row = {"id": self.id, "contents": self.contents}
        if self.url:
            row["url"] = self.url
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def is_convertible(path: Path) -> bool:
    """Return whether the first row of a file, perhaps gzipped, has one of these layouts and not ours.

    Args:
        path: An existing file.

    Raises:
        RetrieverError: A gzipped file is broken.
    """
    with _errors(path), path.open("rb") as raw:
        is_gzipped = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        head = _unpacked(raw, is_gzipped).read(HEAD)
    first = head.split(b"\n")[0].decode("utf-8-sig", "replace")
    if first.startswith(PARQUET.decode()):
        return True
    if first.lstrip()[:1] not in ("{", "["):
        return "\t" in first or _has_text(_header(first))
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):  # RecursionError: too many brackets
        return False
    if not isinstance(row, dict):
        return False
    is_ours = row.keys() >= {"id", "contents"}
    return _has_text(row) and not is_ours


def read_passages(path: Path, progress: bool = True) -> Iterator[tuple[str, Passage]]:
    """Read the passages of a file of any layout.

    Args:
        path: The file.
        progress: Show a progress bar on a terminal.

    Yields:
        The place of each passage for messages, ``file:line`` or ``file row N`` for parquet, and the passage.

    Raises:
        RetrieverError: There is no such file, it is broken, or a row has no known layout.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such file of passages; correct the path")
    with path.open("rb") as raw:
        head = raw.read(len(PARQUET))
        raw.seek(0)
        size = path.stat().st_size
        is_disabled = None if progress else True  # None: disabled unless stderr is a terminal
        bar = tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=is_disabled)
        with bar, _errors(path):
            is_gzipped = head.startswith(GZIP)
            rows = _parquet(path) if head == PARQUET else _text(path, raw, is_gzipped)
            for where, row in rows:
                yield where, to_passage(row, where)
                bar.update(raw.tell() - bar.n)


def to_passage(row: Mapping[str, Any], where: str) -> Passage:
    """Convert a row of title and text, or of contents.

    Args:
        row: Fields of the row by name.
        where: Place of the row, for messages.

    Returns:
        The passage.

    Raises:
        RetrieverError: There is no field of a text, or a field has the wrong type.
    """
    title = _string(row, TITLES, where)
    text = _string(row, TEXTS, where)
    contents = _string(row, ("contents",), where)
    if contents is None and text is None:
        texts = ", ".join(repr(name) for name in TEXTS)
        keys = ", ".join(str(key) for key in row)
        raise RetrieverError(
            f"{where}: no text: expected 'contents', or one of {texts} and 'title'; the keys are {keys};"
            " rename the key"
        )
    passage_id = _id(row)
    if isinstance(passage_id, bool) or not isinstance(passage_id, str | int | None):
        raise RetrieverError(
            f"{where}: the id must be a text or a number, got {passage_id!r}; correct the row"
        )
    url = row.get("url")
    return Passage(
        id=None if passage_id is None else str(passage_id),
        contents=_compose(title, text, contents),
        url=url if isinstance(url, str) else "",
    )


def _id(row: Mapping[str, Any]) -> Any:
    """Return the first id of a row that is not empty, or None."""
    for key in IDS:
        value = row.get(key)
        if value not in (None, ""):
            return value
    return None


def _compose(title: str | None, text: str | None, contents: str | None) -> str:
    """Return the contents of a passage: a line with the title in quotes, then the text."""
    title = " ".join((title or "").split())
    if contents is not None:
        first_line = contents.partition("\n")[0]
        own_title = first_line.strip().removeprefix('"').removesuffix('"')
        if not title or own_title == title:
            return contents if contents.strip() else ""
        text = contents
    text = (text or "").strip()
    if not text:
        return ""
    first_line = f'"{title}"' if title else ""
    return f"{first_line}\n{text}"


def _string(row: Mapping[str, Any], keys: Iterable[str], where: str) -> str | None:
    """Return the first of these fields that a row has, or None; the sentences of a list are joined."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
            value = " ".join(sentence.strip() for sentence in value)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RetrieverError(f"{where}: key {key!r} must be text, got {value!r:.60}; correct the row")
        # Half of a surrogate pair becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return None


def _unpacked(raw: BinaryIO, is_gzipped: bool) -> BinaryIO:
    if is_gzipped:
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return raw


def _text(path: Path, raw: BinaryIO, is_gzipped: bool) -> Iterator[PlacedRow]:
    """Yield the rows of JSON Lines or of a table."""
    text = io.TextIOWrapper(_unpacked(raw, is_gzipped), encoding="utf-8-sig", newline="")
    first = text.readline()
    lines = chain([first], text)
    if first.lstrip()[:1] == "{":
        yield from _json_lines(path, lines)
    elif "\t" in first or _has_text(_header(first)):
        yield from _table(path, first, lines)
    elif first.strip():
        raise RetrieverError(
            f"{path}: neither JSON Lines nor a tsv, a csv with a header or parquet; convert it"
        )


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[PlacedRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, or too many brackets
            problem = getattr(error, "msg", error)
            raise RetrieverError(f"{path}:{number}: not valid JSON ({problem})") from error
        if not isinstance(row, dict):
            raise RetrieverError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        yield f"{path}:{number}", row


def _table(path: Path, first: str, lines: Iterator[str]) -> Iterator[PlacedRow]:
    """Yield the rows of a table: with a header and quoted cells as DPR's psgs_w100, or a tsv with neither."""
    is_tsv = "\t" in first
    names = _header(first)
    if _has_text(names):
        rows = _quoted_cells(lines, is_tsv)
    else:
        names = _names_without_header(path, first)
        rows = _plain_cells(lines)
    for number, cells in rows:
        if is_tsv and any("\t" in cell and "\n" in cell for cell in cells):
            raise csv.Error(f"line {number}: a cell holds rows; close or double its quotes")
        is_blank = cells in ([], [""])
        if is_blank:
            continue
        if len(cells) != len(names):
            raise RetrieverError(f"{path}:{number}: {len(cells)} columns, but the first row has {len(names)}")
        yield f"{path}:{number}", dict(zip(names, cells, strict=True))


def _quoted_cells(lines: Iterator[str], is_tsv: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row below the header; a cell in quotes may have several lines."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if is_tsv else ","
    reader = csv.reader(lines, delimiter=delimiter, strict=not is_tsv)
    next(reader)
    for cells in reader:
        yield reader.line_num, cells


def _plain_cells(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row of a tsv without quotes and without a header."""
    for number, line in enumerate(lines, 1):
        yield number, line.rstrip("\r\n").split("\t")


def _names_without_header(path: Path, first: str) -> list[str]:
    """Return the names of the columns of MS MARCO's files, by their number in the first row."""
    count = first.count("\t") + 1
    if count not in TABLES:
        raise RetrieverError(
            f"{path}:1: {count} columns and no header with 'id', 'text' and 'title'; add one"
        )
    return TABLES[count]


def _header(first: str) -> list[str]:
    """Return the cells of a first line in lower case."""
    delimiter = "\t" if "\t" in first else ","
    cells = next(csv.reader([first], delimiter=delimiter), [])
    return [name.strip().lower() for name in cells]


def _has_text(names: Iterable[str]) -> bool:
    return not {*TEXTS, "contents"}.isdisjoint(names)


def _parquet(path: Path) -> Iterator[PlacedRow]:
    known = {*IDS, *TITLES, *TEXTS, "contents", "url"}
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in names if name in known]
        if not columns:
            raise RetrieverError(f"{path}: no known column among {', '.join(names)}")
        number = 0
        for batch in file.iter_batches(BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a RetrieverError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{path}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error, pa.ArrowException) as error:
        raise RetrieverError(f"{path}: broken file: {reason(error)}; copy it again") from error
    except csv.Error as error:
        raise RetrieverError(f"{path}: not a csv or tsv ({error}); correct the file") from error
