"""Passages of other corpora, row by row: title/text JSON, BEIR, DPR's and MS MARCO's tsv, csv, parquet.

The first bytes of a file decide its layout, not its name. Files may be packed, and larger than the memory.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson
from tqdm import tqdm

from retriever.corpus.containers import (
    MAX_LINE,
    data_files,
    is_table,
    open_text,
    table_batches,
    table_delimiter,
    text_lines,
)
from retriever.errors import RetrieverError

# Bytes that are sure to hold the first row of a file.
HEAD = 2**16
# Names of the field of the id, of the text and of the title, in lower case; the first of a row is taken.
# An id of the passage stands before one of its document, which several passages share.
IDS = (
    "id",
    "_id",
    "pid",
    "passage_id",
    "psg_id",
    "chunk_id",
    "segment_id",
    "paragraph_id",
    "docno",
    "docid",
    "doc_id",
    "document_id",
    "wikipedia_id",
    "page_id",
    "id_",
    "uid",
    "uuid",
)
TEXTS = (
    "text",
    "passage",
    "body",
    "content",
    "paragraph_text",
    "page_content",
    "passage_text",
    "chunk_text",
    "chunk",
    "segment",
    "paragraph",
    "sentences",
    "abstract",
    "clean-text",
)
TITLES = (
    "title",
    "page_title",
    "wikipedia_title",
    "wiki_title",
    "article_title",
    "doc_title",
    "document_title",
    "passage_title",
    "headline",
    "name",
    "heading",
    "entity",
)
URLS = ("url", "link", "source_url")
# Objects in which a row may have other fields: LangChain, Haystack, Elasticsearch, Vespa, Qdrant, Weaviate.
NESTED = ("metadata", "meta", "_source", "fields", "payload", "properties", "document", "doc")
# Columns of MS MARCO's passages and documents, which have no header, by their number.
TABLES = {2: ["id", "text"], 4: ["id", "url", "title", "text"]}

# A row of any layout, with its place for messages.
PlacedRow = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Fields of the rows that a user names; empty: the known names.

    Attributes:
        id: Name of the field of the id.
        title: Name of the field of the title.
        text: Name of the field of the text.
    """

    id: str = ""
    title: str = ""
    text: str = ""


KNOWN_COLUMNS = Columns()


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

    @property
    def has_title(self) -> bool:
        """Whether the first line of the contents, above the text, is not empty."""
        first_line, line_end, _ = self.contents.partition("\n")
        return bool(line_end) and first_line.strip().strip('"') != ""

    def to_line(self) -> bytes:
        """Return the row of our corpus as a line of JSON."""
        row = {"id": self.id, "contents": self.contents}
        if self.url:
            row["url"] = self.url
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def is_convertible(path: Path) -> bool:
    """Return whether a file is a table, or its first row has one of these layouts and not ours.

    Args:
        path: An existing file or folder.

    Raises:
        RetrieverError: The file is broken, or of a format that is not read.
    """
    if path.is_dir() or is_table(path):
        return True
    with _errors(path), open_text(path) as file:
        head = cast(io.BufferedReader, file).read(HEAD)
    first = head.split(b"\n")[0].decode("utf-8-sig", "replace")
    if first.lstrip()[:1] == "[":
        return True
    if first.lstrip()[:1] != "{":
        return "\t" in first or _has_text(_header(first))
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):  # RecursionError: too many brackets
        return False
    if not isinstance(row, dict):
        return False
    is_ours = row.keys() >= {"id", "contents"}
    return _has_text(_fields(row)) and not is_ours


def read_passages(
    path: Path, progress: bool = True, columns: Columns = KNOWN_COLUMNS
) -> Iterator[tuple[str, Passage]]:
    """Read the passages of a file of any layout.

    Args:
        path: The file, or a folder that ``save_to_disk`` of the library datasets wrote.
        progress: Show a progress bar on a terminal.
        columns: Fields that the user names.

    Yields:
        The place of each passage for messages, ``file:line`` or ``file row N``, and the passage.

    Raises:
        RetrieverError: There is no such file, it is broken, or a row has no known layout.
    """
    for file in data_files(path, "passages"):
        is_disabled = None if progress else True  # None: disabled unless stderr is a terminal
        with tqdm(desc=file.name, unit=" passages", disable=is_disabled) as bar, _errors(file):
            rows = _table_rows(file, columns) if is_table(file) else _text_rows(file, columns)
            for where, row in rows:
                yield where, to_passage(row, where, columns)
                bar.update()


def to_passage(row: Mapping[str, Any], where: str, columns: Columns = KNOWN_COLUMNS) -> Passage:
    """Convert a row of title and text, or of contents.

    Args:
        row: Fields of the row by name.
        where: Place of the row, for messages.
        columns: Fields that the user names.

    Returns:
        The passage; its contents are empty if its text is empty or null.

    Raises:
        RetrieverError: There is no field of a text, or a field has the wrong type.
    """
    fields = _fields(row)
    title_keys = (columns.title,) if columns.title else TITLES
    text_keys = (columns.text,) if columns.text else TEXTS
    contents = None if columns.text else _string(fields, ("contents",), where)
    title = _string(fields, title_keys, where)
    text = _string(fields, text_keys, where, without=title)
    if columns != KNOWN_COLUMNS:
        _check_names(fields, columns, where)
    has_text_key = columns.text or not {*text_keys, "contents"}.isdisjoint(fields)
    if not has_text_key:
        texts = ", ".join(repr(name) for name in TEXTS[:5])
        keys = ", ".join(str(key) for key in list(row)[:30])
        raise RetrieverError(
            f"{where}: no text: expected 'contents', or one of {texts}, … and 'title'; the keys are {keys};"
            " rename the key, or name it (python -m retriever.prepare_corpus --text KEY)"
        )
    passage_id = _id(fields, columns)
    if isinstance(passage_id, bool) or not isinstance(passage_id, str | int | None):
        raise RetrieverError(
            f"{where}: the id must be a text or a number, got {passage_id!r:.80}; correct the row"
        )
    url = next((fields[key] for key in URLS if isinstance(fields.get(key), str)), "")
    return Passage(
        id=None if passage_id is None else str(passage_id),
        contents=_compose(title, text, contents),
        url=url,
    )


def _check_names(fields: Mapping[str, Any], columns: Columns, where: str) -> None:
    """Raise RetrieverError for a field that the user names and the row lacks."""
    for option, name in (("id", columns.id), ("title", columns.title), ("text", columns.text)):
        if name and name not in fields and name.lower() not in fields:
            keys = ", ".join(list(fields)[:30])
            raise RetrieverError(f"{where}: no key {name!r}: the keys are {keys}; correct --{option}")


@lru_cache(maxsize=64)
def _is_flat(names: tuple[Any, ...]) -> bool:
    """Return whether names are in lower case, and none is that of an object with further fields."""
    return all(str(name) == str(name).strip().lower() and name not in NESTED for name in names)


def _fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a row and of the objects in it by their names, as written and in lower case.

    Fields of the row itself win over those of an object, and an object's may be JSON as text.
    """
    if _is_flat(tuple(row)):
        return row
    fields: dict[str, Any] = {}
    for name, value in row.items():
        fields.setdefault(str(name), value)
    for name, value in row.items():
        fields.setdefault(str(name).strip().lower(), value)
    for name in NESTED:
        inner = fields.get(name)
        if isinstance(inner, str) and inner.lstrip().startswith("{"):
            try:
                inner = json.loads(inner)
            except (ValueError, RecursionError):
                continue
        if isinstance(inner, Mapping):
            for key, value in inner.items():
                if fields.get(str(key).lower()) is None:
                    fields[str(key).lower()] = value
                fields.setdefault(f"{name}.{key}", value)
    return fields


def _id(fields: Mapping[str, Any], columns: Columns) -> Any:
    """Return the first id of a row that is not empty, or None."""
    for key in (columns.id,) if columns.id else IDS:
        value = fields.get(key, fields.get(key.lower()))
        if isinstance(value, float):  # of pandas
            value = int(value) if value.is_integer() else None
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


def _sentences(value: Any) -> list[str] | None:
    """Return the sentences of a list, or of each paragraph in it; None if the value is no list of texts."""
    if not isinstance(value, list):
        return None
    sentences = []
    for item in value:
        paragraph = item if isinstance(item, list) else [item]
        for sentence in paragraph:
            if not isinstance(sentence, str):
                return None
            sentences.append(sentence.strip())
    return sentences


def _string(
    fields: Mapping[str, Any], keys: Iterable[str], where: str, without: str | None = None
) -> str | None:
    """Return the first of these fields that holds text; an empty text or None if none does.

    The sentences of a list, or of each paragraph in it, are joined, but for a first one that is `without`,
    the title.
    """
    empty = None
    for key in keys:
        value = fields.get(key, fields.get(key.lower()))
        sentences = _sentences(value)
        if sentences is not None:
            if without and sentences[:1] == [without.strip()]:
                sentences = sentences[1:]
            value = " ".join(sentences)
        if isinstance(value, float) and not math.isfinite(value):  # pandas' missing value
            value = None
        if isinstance(value, int) and not isinstance(value, bool) and key not in TEXTS:  # the title 1984
            value = str(value)
        if value is None:
            continue
        if not isinstance(value, str):
            if key in TITLES:  # an object of that name is no title, such as an entity's
                continue
            raise RetrieverError(f"{where}: key {key!r} must be text, got {value!r:.60}; correct the row")
        if not value.strip():
            empty = value
            continue
        # Half of a surrogate pair becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return empty


def _text_rows(path: Path, columns: Columns) -> Iterator[PlacedRow]:
    """Yield the rows of JSON Lines, of a JSON array or of a table of text."""
    with open_text(path) as file:
        head = cast(io.BufferedReader, file).peek(HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            yield from _json_array(path, file)
            return
        lines = text_lines(file, path)
        first = next(lines, "")
        if first.lstrip().startswith("{"):
            yield from _json_lines(path, chain([first], lines))
        elif "\t" in first or columns.text or _has_text(_header(first)):
            yield from _table(path, first, chain([first], lines), columns)
        elif first.strip():
            raise RetrieverError(
                f"{path}: neither JSON Lines nor a tsv, a csv with a header or parquet; convert it"
            )


def _json_array(path: Path, file: BinaryIO) -> Iterator[PlacedRow]:
    try:
        for number, row in enumerate(ijson.items(file, "item", use_float=True), 1):
            if not isinstance(row, dict):
                raise RetrieverError(f"{path} row {number}: expected a JSON object, got {type(row).__name__}")
            yield f"{path} row {number}", row
    except ijson.JSONError as error:
        reason = " ".join(str(error).split())[:160]
        raise RetrieverError(f"{path}: not valid JSON ({reason}); write a JSON object a line") from error


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


def _table(path: Path, first: str, lines: Iterator[str], columns: Columns) -> Iterator[PlacedRow]:
    """Yield the rows of a table: with a header and quoted cells as DPR's psgs_w100, or a tsv with neither."""
    is_tsv = "\t" in first
    names = _header(first)
    if columns.text or _has_text(names):
        rows = _quoted_cells(lines, _delimiter(first))
    else:
        names = _names_without_header(path, first)
        rows = _plain_cells(lines)
    for number, cells in rows:
        if is_tsv and any("\t" in cell and "\n" in cell for cell in cells):
            raise csv.Error(f"line {number}: a cell holds rows; close or double its quotes")
        if not any(cells):
            continue
        if len(cells) != len(names):
            raise RetrieverError(f"{path}:{number}: {len(cells)} columns, but the first row has {len(names)}")
        yield f"{path}:{number}", dict(zip(names, cells, strict=True))


def _quoted_cells(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row below the header; a cell in quotes may have several lines."""
    csv.field_size_limit(MAX_LINE)
    reader = csv.reader(lines, delimiter=delimiter, strict=delimiter != "\t")
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


def _delimiter(first: str) -> str:
    return table_delimiter(first, (*IDS, *TITLES, *TEXTS, "contents"))


def _header(first: str) -> list[str]:
    """Return the cells of a first line in lower case."""
    cells = next(csv.reader([first], delimiter=_delimiter(first)), [])
    return [name.strip().lower() for name in cells]


def _has_text(names: Iterable[str]) -> bool:
    return not {*TEXTS, "contents"}.isdisjoint(names)


def _table_rows(path: Path, columns: Columns) -> Iterator[PlacedRow]:
    """Yield the rows of a table of Arrow; columns of other names are not read."""
    known_names = {*IDS, *TITLES, *TEXTS, *URLS, *NESTED, "contents"}
    named = {name.split(".")[0] for name in (columns.id, columns.title, columns.text)}

    def choose(names: list[str]) -> list[str]:
        chosen = [name for name in names if name.strip().lower() in known_names or name in named]
        if not chosen:
            raise RetrieverError(
                f"{path}: no known column among {', '.join(names[:30])}; name them (--id, --title, --text)"
            )
        return chosen

    number = 0
    for _, rows in table_batches(path, choose):
        for row in rows:
            number += 1
            yield f"{path} row {number}", row


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a RetrieverError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{path}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except csv.Error as error:
        raise RetrieverError(f"{path}: not a csv or tsv ({error}); correct the file") from error
