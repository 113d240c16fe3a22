"""Rows of data files: JSON Lines, a JSON array, TriviaQA's JSON object, parquet, tsv, csv; also gzipped.

Which of these a file is, its first bytes say; its name does not matter. Rows are read one by one, so that a
file may be larger than the memory.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import sys
import tokenize
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.core.errors import UserError

Row = dict[str, Any]

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"
HEAD = 4096  # bytes that the format is told by
BATCH = 1024  # rows of a parquet file in memory at once
# Columns of published parquet files that no layout reads, up to a megabyte a row: they come as None.
UNREAD = (
    "context",
    "document",
    "entity_pages",
    "evidences",
    "long_answer_candidates",
    "metadata",
    "paragraphs",
    "question_decomposition",
    "search_results",
    "supporting_facts",
)
OPEN_LIST = re.compile(r"""\s*[\[{]\s*["'{]""")  # of texts, or of objects
_ARRAY = re.compile(r"array\((\[.*\])(?:,\s*dtype=\w+)?\)", re.DOTALL)  # a NumPy array as text
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
_TRIVIA = re.compile(rb'\s*\{\s*"Data"\s*:\s*\[')


def read_rows(path: str | Path, what: str = "questions") -> Iterator[tuple[str, Row]]:
    """Yields (place, row) of every row: ``file:line`` for lines of text, ``file row N`` otherwise, from 1.

    Args:
        what: the file should hold, for messages.

    Raises:
        UserError: no such file, not UTF-8, broken, or a row that is no object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of {what}")
    with path.open("rb") as file:
        if file.read(len(PARQUET)) == PARQUET:
            yield from _parquet(path)
            return
        file.seek(0)
        packed = file.read(len(GZIP)) == GZIP
    with _readable(path), gzip.open(path) if packed else path.open("rb") as opened:
        yield from _text(path, cast(BinaryIO, opened))


def read_jsonl(path: str | Path, what: str) -> Iterator[tuple[str, Row]]:
    """Yields (``file:line``, row) for every line that is not blank.

    Raises:
        UserError: no such file, not UTF-8, or a line that is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of {what}")
    with _readable(path), path.open("rb") as file:
        yield from _lines(path, file)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text ({error.reason}) and no parquet; save it as UTF-8, or as parquet"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip file ({error}); copy it again") from error


def _text(path: Path, file: BinaryIO) -> Iterator[tuple[str, Row]]:
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


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error.msg}); each line is one object") from error
        yield where, _an_object(row, where)


def _array(path: Path, file: BinaryIO, prefix: str) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for number, row in enumerate(ijson.items(file, prefix, use_float=True), 1):
            where = f"{path} row {number}"
            yield where, _an_object(row, where)
    except ijson.JSONError as error:
        file.seek(0)
        try:
            rows = json.load(file)  # reads NaN, which Python and pandas write and ijson refuses
        except ValueError:
            text = " ".join(str(error).split())
            raise UserError(f"{path}: not valid JSON ({text}); copy it again") from error
        for later, row in enumerate(rows if prefix == "item" else rows["Data"], 1):
            if later > number:
                yield f"{path} row {later}", _an_object(row, f"{path} row {later}")


def _an_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            number = 0
            for batch in file.iter_batches(BATCH, columns=[name for name in names if name not in UNREAD]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", dict.fromkeys(names) | row
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: broken parquet file ({' '.join(str(error).split())}); copy it again"
        ) from error


def _table(path: Path, file: io.TextIOWrapper) -> Iterator[tuple[str, Row]]:
    """A table with a header, or DPR's two columns without one: question, Python list of answers."""
    csv.field_size_limit(sys.maxsize)
    first = file.readline()
    file.seek(0)
    reader = csv.reader(file, delimiter="\t" if "\t" in first else ",")
    try:
        header = next(reader)
        if len(header) == 2 and header[1].lstrip().startswith("["):
            yield f"{path}:1", _dpr(header, f"{path}:1")
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                yield where, _dpr(cells, where)
            return
        for cells in reader:
            if not cells:
                continue
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(header):
                raise UserError(
                    f"{where}: {len(cells)} columns, but the header has {len(header)} ({', '.join(header)});"
                    " correct the row"
                )
            row = zip(header, cells, strict=True)
            yield where, {name: _cell(text) for name, text in row}
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not a table ({error}); correct the row") from error


def _dpr(cells: list[str], where: str) -> Row:
    answers = parse_list(cells[1]) if len(cells) == 2 else None
    if answers is None:
        raise UserError(
            f"{where}: expected a question, a tab and a list of answers, got {cells!r}; correct the row"
        )
    return {"question": cells[0], "answers": answers}


def _cell(text: str) -> str | bool | int:
    """Return the value of a table's cell: text, or a boolean or whole float as pandas or Excel writes it."""
    if text in ("True", "TRUE", "true", "False", "FALSE", "false"):
        return text.lower() == "true"
    return int(text[:-2]) if _WHOLE_FLOAT.fullmatch(text) else text


def parse_list(text: str) -> list[Any] | None:
    """Return the list of texts and numbers that a text holds as JSON, Python or NumPy writes it.

    Returns:
        None where the text is no such list.
    """
    text = text.strip()
    array = _ARRAY.fullmatch(text)
    text = array.group(1) if array else text
    if text[:1] + text[-1:] in ("[]", "()", "{}"):
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            kinds = {type(item) for item in value} if isinstance(value, list | tuple | set) else {object}
            if kinds <= {str, int, float, bool, type(None)} and (kinds == {str} or isinstance(value, list)):
                return _apart(text) if kinds == {str} and read is ast.literal_eval else list(value)
    return None


def _apart(text: str) -> list[Any]:
    """The texts of a Python list; numpy writes no commas, and Python would join ['a' 'b'] to one text."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]
