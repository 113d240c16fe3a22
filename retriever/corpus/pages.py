"""Pages by URL for RLinf's ``POST /access``: JSON Lines of rows with ``url``, read from disk on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retriever.corpus.offsets import read_lines
from retriever.errors import RetrieverError


class Pages:
    """Knows where each URL's row begins; rows themselves stay on disk.

    Raises:
        RetrieverError: no such file, or a malformed row, with file and line.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise RetrieverError(f"{path}: no such file of pages; correct --pages_path")
        self.path = path
        self._start: dict[str, int] = {}
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(read_lines(file, path), 1):
                if line.strip():
                    self._start[self._url(line, number)] = offset
                offset += len(line)

    def __len__(self) -> int:
        return len(self._start)

    def access(self, url: str) -> dict[str, Any] | None:
        """The page's row, or None; ``…/index.php/Title`` is looked up as ``…/index.php?title=Title``."""
        start = self._start.get(url.replace("index.php/", "index.php?title="))
        if start is None:
            return None
        with self.path.open("rb") as file:
            file.seek(start)
            row: dict[str, Any] = json.loads(file.readline())
            return row

    def _url(self, line: bytes, number: int) -> str:
        try:
            url = json.loads(line)["url"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrieverError(f"{self.path}:{number}: expected a JSON object with 'url'") from error
        if not isinstance(url, str):
            raise RetrieverError(f"{self.path}:{number}: field 'url' must be a string, got {url!r}")
        return url
