"""Find data files, and read their rows: JSON Lines, JSON array, TriviaQA's object, parquet, tsv, csv, gzip.

The first bytes decide the format, not the name. Rows are read one by one: a file may exceed the memory.
"""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import io
import itertools
import json
import re
import sys
import tokenize
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError, one_line

DataRow = dict[str, Any]
Sources = str | Path | Sequence[str | Path] | Mapping[str, str | Path]

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
HEAD = 4096  # bytes that decide the format
BATCH = 1024  # rows of a parquet file in memory at once
# Columns of published parquet files that no layout reads, up to a megabyte a row: they come as None.
UNREAD = (
    *("context", "document", "entity_pages", "evidences", "long_answer_candidates", "metadata"),
    *("paragraphs", "question_decomposition", "search_results", "supporting_facts"),
)
OPEN_LIST = re.compile(r"""\s*[\[{]\s*["'{]""")  # of texts, or of objects
_ARRAY = re.compile(r"array\((\[.*\])(?:,\s*dtype=\w+)?\)", re.DOTALL)  # a NumPy array as text
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
_TRIVIA = re.compile(rb'\s*\{\s*"Data"\s*:\s*\[')
SPLITS = ("train", "training", "dev", "validation", "valid", "val", "test", "eval")
# Word in a file's name -> data_source of Search-R1, FlashRAG and the paper.
_NAMES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
DATA_SOURCES = {
    **{name: name for name in _NAMES},
    **{"natural": "nq", "trivia": "triviaqa", "hotpot": "hotpotqa"},
    **dict.fromkeys(("2wiki", "2wikimultihop"), "2wikimultihopqa"),
}
_SUFFIXES = re.compile(r"(\.(jsonl?|parquet|tsv|csv|gz))+$", re.IGNORECASE)


def find_files(sources: Sources) -> Iterator[tuple[Path, str]]:
    """Yield every file and the data_source of its rows: of `sources`, or by the file's name.

    The `sources` are a file, a list of files, or data_source -> file. A file is a path, a pattern such as
    ``train-*.parquet``, ``hf://datasets/OWNER/NAME[@REVISION]/FILE`` or ``OWNER/NAME``, the only data file of
    a dataset repository. Raises UserError if nothing is named, or there is no such file.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    if isinstance(sources, Mapping):
        pairs = [(str(file), name) for name, file in sources.items()]
    else:
        pairs = [(str(file), "") for file in sources]
    if not pairs or not all(file for file, _ in pairs):
        raise UserError("no question file: set data.train and data.eval")
    for file, source in pairs:
        for path in _expand(file):
            yield path, source or source_of(path)


def _expand(name: str) -> list[Path]:
    if name.startswith(hub.DATASETS):
        return hub.fetch_data(name)
    if hub.is_repository(name):
        return hub.fetch_data(f"{hub.DATASETS}{name}")
    if Path(name).exists() or not glob.has_magic(name):
        return [Path(name)]
    paths = [Path(match) for match in sorted(glob.glob(name))]
    if not paths:
        raise UserError(f"{name}: no file matches; correct data.train or data.eval")
    return paths


def source_of(path: Path) -> str:
    """Return the data_source in the name of a file or of its folder: nq of ``nq/test.jsonl``."""
    stem = _SUFFIXES.sub("", path.name)
    for name in (stem, path.parent.name):
        for word in re.split(r"[^a-z0-9]+", name.lower()):
            if word in DATA_SOURCES:
                return DATA_SOURCES[word]
    words = re.split(r"[^a-z0-9]+", stem.lower())
    return (path.parent.name or stem) if words[0] in SPLITS else stem


def read_rows(path: str | Path, contents: str = "questions") -> Iterator[tuple[str, DataRow]]:
    """Yield (place, row) of every row: ``file:line`` for lines of text, ``file row N`` otherwise, from 1.

    Raises UserError if there is no such file of `contents`, it is not UTF-8 or broken, or a row is no object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of {contents}; correct the path")
    with path.open("rb") as file:
        head = file.read(len(PARQUET))
    try:
        with gzip.open(path) if head.startswith(GZIP) else path.open("rb") as opened:
            rows = _parquet(path) if head == PARQUET else _text(path, cast(BinaryIO, opened))
            for where, row in rows:
                if not isinstance(row, dict):
                    raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
                yield where, row
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 text ({error.reason}) and no parquet"
        raise UserError(f"{path}: {fault}; save it as UTF-8, or as parquet") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip file ({error}); copy it again") from error


def _text(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    head = file.read(HEAD)
    file.seek(0)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[":
        yield from _array(path, file, "item")
    elif _TRIVIA.match(head):
        yield from _array(path, file, "Data.item")
    elif start == b"{":
        yield from _lines(path, file)
    elif start:
        yield from _table(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, too many brackets
            fault = f"not valid JSON ({getattr(error, 'msg', error)})"
            raise UserError(f"{where}: {fault}; each line is one object") from error
        yield where, row


def _array(path: Path, file: BinaryIO, prefix: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for number, row in enumerate(ijson.items(file, prefix, use_float=True), 1):
            yield f"{path} row {number}", row
    except ijson.JSONError as error:
        file.seek(0)
        try:
            rows = json.load(file)  # reads NaN, which Python and pandas write and ijson refuses
        except (ValueError, RecursionError):
            raise UserError(f"{path}: not valid JSON ({one_line(error)}); copy it again") from error
        rows = rows if prefix == "item" else rows["Data"]
        for later, row in enumerate(rows[number:], number + 1):
            yield f"{path} row {later}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            batches = file.iter_batches(BATCH, columns=[name for name in names if name not in UNREAD])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", dict.fromkeys(names) | row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: broken parquet file ({one_line(error)}); copy it again") from error


def _table(path: Path, file: io.TextIOWrapper) -> Iterator[tuple[str, DataRow]]:
    """Read a table with a header, or DPR's two columns without one: question, Python list of answers."""
    csv.field_size_limit(sys.maxsize)
    first = file.readline()
    file.seek(0)
    reader = csv.reader(file, delimiter="\t" if "\t" in first else ",")
    try:
        header, rows = next(reader), cast(Iterator[list[str]], reader)
        if is_dpr := len(header) == 2 and header[1].lstrip().startswith("["):
            header, rows = ["question", "answers"], itertools.chain([header], reader)
        for cells in filter(None, rows):
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(header):
                columns = f"{len(header)} columns ({', '.join(header)}), got {len(cells)}"
                raise UserError(f"{where}: expected {columns}; correct the row")
            if is_dpr and parse_list(cells[1]) is None:
                raise UserError(f"{where}: expected a list of answers, got {cells[1]!r}; correct the row")
            yield where, {name: _cell(text) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not a table ({error}); correct the row") from error


def _cell(text: str) -> str | bool | int:
    """Return text, or a boolean or whole float as pandas or Excel writes it."""
    if text in ("True", "TRUE", "true", "False", "FALSE", "false"):
        return text.lower() == "true"
    return int(text[:-2]) if _WHOLE_FLOAT.fullmatch(text) else text


def parse_list(text: str) -> list[Any] | None:
    """Return the list of texts and numbers in a text of JSON, Python or NumPy; None if it is no such list."""
    text = text.strip()
    if array := _ARRAY.fullmatch(text):
        text = array.group(1)
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        kinds = {type(item) for item in value} if isinstance(value, list | tuple | set) else {object}
        if kinds == {str} and read is ast.literal_eval:  # NumPy writes no commas: Python joins ['a' 'b']
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            return [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]
        if kinds <= {str, int, float, bool, type(None)} and isinstance(value, list):
            return value
    return None
