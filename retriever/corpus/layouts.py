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

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
BATCH = 1024  # rows of a parquet file in memory at once
HEAD = 2**16  # bytes that hold a first row
IDS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")
TEXTS = ("text", "passage", "body", "content", "paragraph_text")
TITLES = ("title", "page_title")
TABLES = {2: ["id", "text"], 4: ["id", "url", "title", "text"]}  # MS MARCO passages and documents: no header


@dataclass(frozen=True)
class Passage:
    """A passage of any layout; `contents` is empty if the row has no text."""

    id: str | None
    contents: str
    url: str = ""

    def to_line(self) -> bytes:
        """Return the row of our corpus as a line of JSON."""
        row = {"id": self.id, "contents": self.contents} | ({"url": self.url} if self.url else {})
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def is_convertible(path: Path) -> bool:
    """Whether the first row of a file, perhaps gzipped, has one of these layouts and not ours."""
    with _errors(path), path.open("rb") as raw:
        packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
        first = file.read(HEAD).split(b"\n")[0].decode("utf-8-sig", "replace")
    if first.startswith(PARQUET.decode()):
        return True
    if first.lstrip()[:1] not in ("{", "["):
        return "\t" in first or _has_text(_header(first))
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):  # too many brackets
        return False
    return isinstance(row, dict) and _has_text(row) and not row.keys() >= {"id", "contents"}


def read_passages(path: Path, progress: bool = True) -> Iterator[tuple[str, Passage]]:
    """Yield (place, passage); the place is ``file:line``, or ``file row N`` for parquet.

    Raises RetrieverError: no such file, broken, or a row of no layout.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such file of passages; correct the path")
    with path.open("rb") as raw:
        head = raw.read(len(PARQUET))
        raw.seek(0)
        size = path.stat().st_size
        bar = tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=None if progress else True)
        with bar, _errors(path):
            rows = _parquet(path) if head == PARQUET else _text(path, raw, head[:2] == GZIP)
            for where, row in rows:
                yield where, to_passage(row, where)
                bar.update(raw.tell() - bar.n)


def to_passage(row: Mapping[str, Any], where: str) -> Passage:
    """Return a row of title and text, or of contents, as a passage; RetrieverError without a text."""
    title, text = _string(row, TITLES, where), _string(row, TEXTS, where)
    contents = _string(row, ("contents",), where)
    if contents is None and text is None:
        problem = f"no text: expected 'contents', or one of {', '.join(map(repr, TEXTS))} and 'title'"
        keys = ", ".join(map(str, row))
        raise RetrieverError(f"{where}: {problem}; the keys are {keys}; rename the key")
    name = next((row[key] for key in IDS if row.get(key) not in (None, "")), None)
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise RetrieverError(f"{where}: the id must be a text or a number, got {name!r}; correct the row")
    url = row.get("url")
    address = url if isinstance(url, str) else ""
    return Passage(None if name is None else str(name), _compose(title, text, contents), address)


def _compose(title: str | None, text: str | None, contents: str | None) -> str:
    plain = " ".join((title or "").split())
    if contents is not None:
        first = contents.partition("\n")[0].strip().removeprefix('"').removesuffix('"')
        if not plain or first == plain:
            return contents if contents.strip() else ""
        text = contents
    text = (text or "").strip()
    if not text:
        return ""
    return f'"{plain}"\n{text}' if plain else f"\n{text}"


def _string(row: Mapping[str, Any], keys: Iterable[str], where: str) -> str | None:
    for key in keys:
        value = row.get(key)
        if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
            value = " ".join(sentence.strip() for sentence in value)
        if value is not None:
            if not isinstance(value, str):
                raise RetrieverError(f"{where}: key {key!r} must be text, got {value!r:.60}; correct the row")
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return None


def _text(path: Path, raw: BinaryIO, is_packed: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    file = cast(BinaryIO, gzip.GzipFile(fileobj=raw) if is_packed else raw)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    first = text.readline()
    lines = chain([first], text)
    if first.lstrip()[:1] == "{":
        yield from _json_lines(path, lines)
    elif "\t" in first or _has_text(_header(first)):
        yield from _table(path, first, lines)
    elif first.strip():
        kinds = "JSON Lines nor a tsv, a csv with a header or parquet"
        raise RetrieverError(f"{path}: neither {kinds}; convert it")


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, too many brackets
            problem = getattr(error, "msg", error)
            raise RetrieverError(f"{path}:{number}: not valid JSON ({problem})") from error
        if not isinstance(row, dict):
            raise RetrieverError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        yield f"{path}:{number}", row


def _table(path: Path, first: str, lines: Iterator[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A header and quoted cells as in DPR's psgs_w100, or a tsv with neither."""
    names, is_tsv = _header(first), "\t" in first
    if _has_text(names):
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(lines, delimiter="\t" if is_tsv else ",", strict=not is_tsv)
        next(reader)
        rows = ((reader.line_num, cells) for cells in reader)
    else:
        count = first.count("\t") + 1
        if count not in TABLES:
            problem = f"{path}:1: {count} columns and no header with 'id', 'text' and 'title'"
            raise RetrieverError(f"{problem}; add one")
        names = TABLES[count]
        rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines, 1))
    for number, cells in rows:
        if is_tsv and any("\t" in cell and "\n" in cell for cell in cells):
            raise csv.Error(f"line {number}: a cell holds rows; close or double its quotes")
        if cells in ([], [""]):
            continue
        if len(cells) != len(names):
            raise RetrieverError(f"{path}:{number}: {len(cells)} columns, but the first row has {len(names)}")
        yield f"{path}:{number}", dict(zip(names, cells, strict=True))


def _header(first: str) -> list[str]:
    cells = next(csv.reader([first], delimiter="\t" if "\t" in first else ","), [])
    return [name.strip().lower() for name in cells]


def _has_text(names: Iterable[str]) -> bool:
    return not {*TEXTS, "contents"}.isdisjoint(names)


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with pq.ParquetFile(path) as file:
        used = {*IDS, *TITLES, *TEXTS, "contents", "url"}
        columns = [name for name in file.schema_arrow.names if name in used]
        if not columns:
            raise RetrieverError(f"{path}: no known column among {', '.join(file.schema_arrow.names)}")
        batches = file.iter_batches(BATCH, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path} row {number}", row


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{path}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error, pa.ArrowException) as error:
        raise RetrieverError(f"{path}: broken file: {reason(error)}; copy it again") from error
    except csv.Error as error:
        raise RetrieverError(f"{path}: not a csv or tsv ({error}); correct the file") from error
