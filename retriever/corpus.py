"""Passages in wiki-18's format: JSON Lines of ``{"id", "contents": "\\"Title\\"\\ntext"}``."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from retriever.errors import RetrieverError


@dataclass(frozen=True)
class Corpus:
    """All rows in file order, and a hash that an index is checked against."""

    rows: list[dict[str, Any]]
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of a passage; the title is the first line without its quotes."""
    title, _, text = contents.partition("\n")
    return title.strip().removeprefix('"').removesuffix('"'), text


def load_corpus(path: Path) -> Corpus:
    """Reads ``.jsonl`` or ``.jsonl.gz``.

    Raises:
        RetrieverError: no such file, a malformed row or an id used twice, with file and line.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such corpus; set --corpus_path to a .jsonl or .jsonl.gz file")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    digest = hashlib.sha256()
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            row = _parse(line, f"{path}:{number}")
            if row["id"] in seen:
                raise RetrieverError(f"{path}:{number}: id {row['id']!r} was used before; ids must be unique")
            seen.add(row["id"])
            digest.update(f"{row['id']}\0{row['contents']}\0".encode())
            rows.append(row)
    if not rows:
        raise RetrieverError(f"{path}: no passages in it")
    return Corpus(rows, digest.hexdigest())


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from file
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise RetrieverError(f"{path}: broken file: {error}") from error


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RetrieverError(f"{where}: not valid JSON ({error.msg}); each line is one object") from error
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str) or not row["contents"].strip():
        raise RetrieverError(f"{where}: expected an object with a non-empty string 'contents'")
    if not isinstance(row.get("id"), str | int):
        raise RetrieverError(f"{where}: field 'id' must be a string or a number, got {row.get('id')!r}")
    return row | {"id": str(row["id"])}
