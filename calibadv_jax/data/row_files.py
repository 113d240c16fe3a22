"""Find data files, and read their rows.

Formats: JSON Lines, a JSON array, a JSON object around such an array, csv, tsv, and the tables and packed
files of `containers`. The first bytes decide the format, not the name. Rows are read one by one: a file may
exceed the memory.
"""

from __future__ import annotations

import ast
import csv
import glob
import io
import itertools
import json
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.data.containers import (
    HEAD_BYTES,
    MAX_LINE,
    data_files,
    is_table,
    open_text,
    table_batches,
    table_delimiter,
    text_lines,
)

DataRow = dict[str, Any]
# A file, a list of files, or data_source -> file.
Sources = str | Path | Sequence[str | Path] | Mapping[str, str | Path]

# Columns of published parquet files that no layout reads, with up to a megabyte a row. Their values are
# replaced by None; their names still tell the layout.
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
# Names of columns, in lower case: they tell the delimiter of a table.
COLUMN_NAMES = (
    "id",
    "question",
    "query",
    "problem",
    "prompt",
    "input",
    "answer",
    "answers",
    "golden_answers",
    "possible_answers",
    "ground_truth",
    "label",
    "solution",
)
# The beginning of a list of texts or of objects, written as text.
OPEN_LIST = re.compile(r"""\s*[\[{]\s*["'{]""")
SPLITS = ("train", "training", "dev", "validation", "valid", "val", "test", "eval")
# Word in a file's name -> data_source, as Search-R1, FlashRAG and the paper call it.
DATA_SOURCES = {
    "nq": "nq",
    "natural": "nq",
    "triviaqa": "triviaqa",
    "trivia": "triviaqa",
    "popqa": "popqa",
    "hotpotqa": "hotpotqa",
    "hotpot": "hotpotqa",
    "2wikimultihopqa": "2wikimultihopqa",
    "2wikimultihop": "2wikimultihopqa",
    "2wiki": "2wikimultihopqa",
    "musique": "musique",
    "bamboogle": "bamboogle",
}

# A NumPy array, written as text.
_ARRAY = re.compile(r"array\((\[.*\])(?:,\s*dtype=\w+)?\)", re.DOTALL)
# The same inside an object, as pandas writes SQuAD's answers.
_ARRAY_INSIDE = re.compile(r"array\((\[[^\[\]]*\])(?:,\s*dtype=[\w.'<>]+)?\)")
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
# The beginning of a JSON object whose key holds the rows: TriviaQA's "Data", SQuAD's "data" after a
# "version", "rows" of the hub's viewer. Group 1 is the key.
_WRAPPER = re.compile(
    rb'\s*\{\s*(?:"\w{1,40}"\s*:\s*(?:"[^"]{0,200}"|[\w.+-]{1,40})\s*,\s*){0,9}'
    rb'"([Dd]ata|rows|examples|[Qq]uestions|items|instances|records)"\s*:\s*\['
)
# The beginning of a reply of the hub's viewer: its "rows" come after the "features".
_VIEWER = re.compile(rb'\s*\{\s*"features"\s*:\s*\[\s*\{\s*"feature_idx"')
# The line by which Excel names the delimiter of a table.
_EXCEL_DELIMITER = re.compile(r'"?sep=(.)"?\s*')
_SUFFIXES = re.compile(
    r"(\.(jsonl?|ndjson|parquet|arrow|feather|orc|tsv|csv|gz|bz2|xz|zst|zstd|lz4|zip))+$", re.IGNORECASE
)
_NO_WORD = re.compile(r"[^a-z0-9]+")
_PLAIN_TYPES = (str, int, float, bool, type(None))


def find_files(sources: Sources) -> Iterator[tuple[Path, str]]:
    """Yield every file and the data_source of its rows.

    Args:
        sources: A file, a list of files, or data_source -> file. A file is a path, a pattern such as
            ``train-*.parquet``, ``hf://datasets/OWNER/NAME[@REVISION]/FILE``, or ``OWNER/NAME`` for the only
            data file of a dataset repository.

    Yields:
        A path, and the data_source that `sources` names for it, or else the one in the file's name.

    Raises:
        UserError: No file is named, or there is no such file.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    if isinstance(sources, Mapping):
        named_files = [(str(file), name) for name, file in sources.items()]
    else:
        named_files = [(str(file), "") for file in sources]
    has_empty_name = not all(file for file, _ in named_files)
    if not named_files or has_empty_name:
        raise UserError("no question file: set data.train and data.eval")
    for file, source in named_files:
        for path in _expand(file):
            yield path, source or source_of(path)


def _expand(name: str) -> list[Path]:
    """Return the files that a path, a pattern or the name of a dataset repository stands for."""
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
    """Return the data_source in the name of a file or of its folder: nq of ``nq/test.jsonl``.

    Without a known data_source it is the file's name, or the folder's for a name such as ``train-0.parquet``.
    """
    stem = _SUFFIXES.sub("", path.name)
    folder = path.parent.name
    for name in (stem, folder):
        for word in _NO_WORD.split(name.lower()):
            if word in DATA_SOURCES:
                return DATA_SOURCES[word]
    first_word = _NO_WORD.split(stem.lower())[0]
    if first_word in SPLITS:
        return folder or stem
    return stem


def read_rows(path: str | Path, contents: str = "questions") -> Iterator[tuple[str, DataRow]]:
    """Yield the place and the content of every row.

    Args:
        path: File of any supported format, or a folder that ``save_to_disk`` of the library datasets wrote.
        contents: What the file should hold, for messages.

    Yields:
        The place, ``file:line`` for lines of text and ``file row N`` otherwise, counted from 1; and the row.

    Raises:
        UserError: There is no such file, it is broken, not UTF-8 or of a format that is not read, or a row is
            not an object.
    """
    for file in data_files(Path(path), contents):
        rows = _table_file_rows(file) if is_table(file) else _text_file_rows(file)
        for where, row in rows:
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield from _questions_in(where, row)


def _questions_in(where: str, row: DataRow) -> Iterator[tuple[str, DataRow]]:
    """Yield the questions of a row: several of an article of SQuAD and of a passage of MRQA, else the row."""
    if row.keys() == {"header"}:  # the first line of MRQA's files
        return
    if row.keys() >= {"row_idx", "row"} and isinstance(row["row"], dict):  # of the hub's viewer
        yield where, row["row"]
        return
    has_question = "question" in row
    paragraphs = row.get("paragraphs") if not has_question else None
    passages = paragraphs if isinstance(paragraphs, list) else [row]
    questions = []
    for passage in passages:
        items = passage.get("qas") if isinstance(passage, dict) else None
        questions += items if isinstance(items, list) else []
    if has_question or not questions:
        yield where, row
        return
    for question in questions:
        if not isinstance(question, dict):
            raise UserError(
                f"{where}: 'qas' must be a list of objects, got {question!r:.80}; correct the row"
            )
        yield where, question


def _table_file_rows(path: Path) -> Iterator[tuple[str, DataRow]]:
    """Yield the rows of parquet or another table of Arrow; columns that no layout reads are None."""

    def choose(names: list[str]) -> list[str]:
        return [name for name in names if name not in UNREAD]

    number = 0
    for names, rows in table_batches(path, choose):
        empty_row = dict.fromkeys(names)
        for row in rows:
            number += 1
            yield f"{path} row {number}", empty_row | row


def _text_file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of JSON or of a table of text; an empty file has none."""
    try:
        with open_text(path) as file:
            head = cast(io.BufferedReader, file).peek(HEAD_BYTES)[:HEAD_BYTES].removeprefix(b"\xef\xbb\xbf")
            first_byte = head.lstrip()[:1]
            wrapper = _WRAPPER.match(head)
            wrapper_key = wrapper[1].decode() if wrapper else ""
            if _VIEWER.match(head):
                wrapper_key = "rows"
            if first_byte == b"[":
                yield from _array_rows(path, file, "")
            elif wrapper_key:
                yield from _array_rows(path, file, wrapper_key)
            elif first_byte == b"{":
                yield from _line_rows(path, file)
            elif first_byte:
                yield from _table_rows(path, file)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not {error.encoding.upper()} text ({error.reason}) and no parquet; save it as UTF-8 "
            f"(such as iconv -f WINDOWS-1252 -t UTF-8 {path.name}), or as parquet"
        ) from error


def _line_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text_lines(file, path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits, too many brackets
            reason = getattr(error, "msg", error)
            raise UserError(f"{where}: not valid JSON ({reason}); each line is one object") from error
        yield where, row


def _array_rows(path: Path, file: BinaryIO, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of an array: the whole file, or the value of a key of the file's object."""
    prefix = f"{key}.item" if key else "item"
    number = 0
    try:
        for number, row in enumerate(ijson.items(file, prefix, use_float=True), 1):
            yield f"{path} row {number}", row
    except ijson.JSONError as error:
        # Python and pandas write NaN, which ijson refuses and json reads.
        try:
            with open_text(path) as again:
                content = json.load(again)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: not valid JSON ({one_line(error)}); copy it again") from error
        rows = content[key] if key else content
        for later_number, row in enumerate(rows[number:], number + 1):
            yield f"{path} row {later_number}", row


def _table_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, DataRow]]:
    """Read a table with a header, or DPR's two columns without one: question, Python list of answers."""
    csv.field_size_limit(MAX_LINE)
    lines = text_lines(file, path)
    first_line = next(lines)
    lines_above = 0
    excel_delimiter = _EXCEL_DELIMITER.fullmatch(first_line)
    if excel_delimiter:
        lines_above = 1
        first_line = next(lines, "")
    delimiter = excel_delimiter[1] if excel_delimiter else table_delimiter(first_line, COLUMN_NAMES)
    reader = csv.reader(itertools.chain([first_line], lines), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader)]
        rows = cast(Iterator[list[str]], reader)
        is_dpr = len(header) == 2 and header[1].startswith("[")
        if is_dpr:
            rows = itertools.chain([header], reader)
            header = ["question", "answers"]
        for cells in rows:
            if not any(cells):  # a blank line, or one of empty cells below a sheet's rows
                continue
            where = f"{path}:{reader.line_num + lines_above}"
            if len(cells) != len(header):
                raise UserError(
                    f"{where}: expected {len(header)} columns ({', '.join(header)[:200]}), got {len(cells)}; "
                    "correct the row"
                )
            if is_dpr and parse_list(cells[1]) is None:
                raise UserError(f"{where}: expected a list of answers, got {cells[1]!r:.80}; correct the row")
            yield where, {name: _parse_cell(text) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise UserError(
            f"{path}:{reader.line_num + lines_above}: not a table ({error}); correct the row"
        ) from error


def _parse_cell(text: str) -> str | bool | int:
    """Return a cell's text, or the boolean or whole number that pandas or Excel wrote as text."""
    if text in ("True", "TRUE", "true", "False", "FALSE", "false"):
        return text.lower() == "true"
    if _WHOLE_FLOAT.fullmatch(text):
        return int(text[:-2])
    return text


def parse_list(text: str) -> list[Any] | None:
    """Return the list that a text holds, as JSON, Python or NumPy write it.

    Returns:
        The list, if its items are texts, numbers, booleans and None; otherwise None.
    """
    text = text.strip()
    array = _ARRAY.fullmatch(text)
    if array:
        text = array.group(1)
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    json_value = _evaluated(json.loads, text)
    if _is_plain_list(json_value):
        return cast(list[Any], json_value)
    python_value = _evaluated(ast.literal_eval, text)
    if _holds_only_texts(python_value):
        # NumPy writes no commas, so that Python joins the texts of ['a' 'b']: take them one by one.
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]
    if _is_plain_list(python_value):
        return cast(list[Any], python_value)
    return None


def parse_objects(text: str) -> Any:
    """Return the object, or the list of objects, that a text holds, as JSON, Python or pandas write it.

    Returns:
        A dictionary or a list of dictionaries; None if the text holds neither.
    """
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return None
    readings: tuple[tuple[Callable[[str], Any], str], ...] = (
        (json.loads, text),
        (ast.literal_eval, text),
        (ast.literal_eval, _ARRAY_INSIDE.sub(r"\1", text)),
    )
    for read, form in readings:
        value = _evaluated(read, form)
        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, dict) for item in items):
            return value
    return None


def _evaluated(read: Callable[[str], Any], text: str) -> Any:
    """Return `read(text)`; None if the text has another form."""
    try:
        return read(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in _PLAIN_TYPES for item in value)


def _holds_only_texts(value: Any) -> bool:
    is_filled_collection = isinstance(value, list | tuple | set) and bool(value)
    return is_filled_collection and all(type(item) is str for item in value)
