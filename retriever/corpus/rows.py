"""Rows of JSON Lines: read with a limit on their length, parsed strictly, and checked."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from retriever.errors import RetrieverError
from retriever.interfaces import CorpusRow

# Bytes of a row; parsing a longer one would take several times as much memory.
MAX_LINE = 16 * 2**20
# A surrogate as a JSON escape, or as bytes that are not valid UTF-8, whether the other half follows or not.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def read_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Read the lines of a file one after the other.

    Args:
        file: The file, opened in binary mode.
        path: Its name, for messages.

    Yields:
        Each line with its end.

    Raises:
        RetrieverError: A line is longer than MAX_LINE; no more than that is read.
    """
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


# Reads JSON, but no numbers that are not finite.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_row(line: bytes, where: str) -> CorpusRow:
    """Return a row of the corpus, with its id as a string.

    Args:
        line: A line of JSON.
        where: Place of the line, for messages.

    Returns:
        All fields of the line; a number as `id` becomes text.

    Raises:
        RetrieverError: The line is no JSON object with `id` and a `contents` that is not blank.
    """
    row = _parse_object(line, where)
    contents = row.get("contents") if isinstance(row, dict) else None
    if not isinstance(contents, str) or not contents.strip():
        raise RetrieverError(
            f"{where}: expected an object with a non-empty string 'contents';"
            " convert rows of title and text with python -m retriever.prepare_corpus"
        )
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise RetrieverError(f"{where}: field 'id' must be a string or a number, got {name!r}")
    return row | {"id": str(name)}


def _parse_object(line: bytes, where: str) -> Any:
    try:
        return DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise RetrieverError(f"{where}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except ValueError as error:  # of the decoder, and of Python for a number of 5,000 digits
        if not line.strip():
            raise RetrieverError(f"{where}: empty row; correct or remove the line") from error
        fault = getattr(error, "msg", error)
        raise RetrieverError(
            f"{where}: not valid JSON ({fault}); each line is one object; correct or remove the line"
        ) from error
    except RecursionError as error:
        raise RetrieverError(f"{where}: nested too deeply; remove the field that is") from error


def check_sendable(line: bytes, row: Any, where: str) -> None:
    """Raise RetrieverError for a row with half of a surrogate pair, because no client could read the reply.

    Args:
        line: The line of JSON; rows without a surrogate in it are not examined further.
        row: The parsed line.
        where: Place of the line, for messages.
    """
    if SURROGATE.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RetrieverError(f"{where}: holds half a surrogate pair; remove it") from error
