"""Pages by URL for RLinf's ``POST /access``: JSON Lines of rows with ``url``."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from retriever.corpus.passages import check_sendable, read_lines
from retriever.errors import RetrieverError


class Pages:
    """Rows by URL, read on demand from a file that stays open: replacing it changes nothing.

    Raises RetrieverError: no such file, or a malformed row. `sha256` is the hash of all rows.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise RetrieverError(f"{path}: no such file of pages; correct --pages_path")
        self.path = path
        self._start: dict[str, int] = {}
        self._reading = threading.Lock()  # requests share one place in the file
        self._file = path.open("rb")
        offset, digest = 0, hashlib.sha256()
        for number, line in enumerate(read_lines(self._file, path), 1):
            if line.strip():
                self._start[self._url(line, number)] = offset
                digest.update(line.strip() + b"\n")
            offset += len(line)
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._start)

    def access(self, url: str) -> dict[str, Any] | None:
        """Return the page's row, or None; RetrieverError if the file was changed since it was read.

        ``…/index.php/Title`` is looked up as ``…/index.php?title=Title``.
        """
        url = url.replace("index.php/", "index.php?title=")
        start = self._start.get(url)
        if start is None:
            return None
        with self._reading:
            self._file.seek(start)
            line = self._file.readline()
        try:
            row: dict[str, Any] = json.loads(line)
            if row["url"] == url:
                return row
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise RetrieverError(f"{self.path}: changed while it is served; start the service again")

    def _url(self, line: bytes, number: int) -> str:
        where = f"{self.path}:{number}"
        try:
            row = json.loads(line)
            url, contents = row["url"], row["contents"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrieverError(f"{where}: expected a JSON object with 'url' and 'contents'") from error
        if not isinstance(url, str) or not isinstance(contents, str):
            name, wrong = ("contents", contents) if isinstance(url, str) else ("url", url)
            raise RetrieverError(f"{where}: field {name!r} must be a string, got {wrong!r}")
        check_sendable(line, row, where)
        return url
