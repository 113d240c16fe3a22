"""Pages by URL, for POST /access."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from retriever.corpus.rows import DECODER, check_sendable, read_lines
from retriever.errors import RetrieverError


class Pages:
    """Rows of a JSONL file by their URL, read on demand.

    The file stays open: replacing it by another file changes nothing until the service is started again.
    Several threads may use it at the same time.

    Args:
        path: JSONL file of rows with `url` and `contents`, both text; blank lines are ignored.

    Attributes:
        path: The file.
        sha256: Hash of all rows, in hexadecimal digits.

    Raises:
        RetrieverError: There is no such file, or a row is malformed.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise RetrieverError(f"{path}: no such file of pages; correct --pages_path")
        self.path = path
        self._start_of_url: dict[str, int] = {}  # byte at which the row of a URL begins
        self._lock = threading.Lock()  # requests share one position in the file
        self._file = path.open("rb")
        offset = 0
        digest = hashlib.sha256()
        for number, line in enumerate(read_lines(self._file, path), 1):
            if line.strip():
                url = self._url(line, number)
                self._start_of_url[url] = offset
                digest.update(line.strip() + b"\n")
            offset += len(line)
        self.sha256 = digest.hexdigest()

    def access(self, url: str) -> dict[str, Any] | None:
        """Return the row of a page.

        Args:
            url: Address of the page; ``…/index.php/Title`` is looked up as ``…/index.php?title=Title``.

        Returns:
            The row, or None if there is no such page.

        Raises:
            RetrieverError: The file was changed since it was read.
        """
        url = url.replace("index.php/", "index.php?title=")
        start = self._start_of_url.get(url)
        if start is None:
            return None
        with self._lock:
            self._file.seek(start)
            line = self._file.readline()
        try:
            row: dict[str, Any] = json.loads(line)
            if row["url"] == url:
                return row
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # not the row that was there: refused below
        raise RetrieverError(f"{self.path}: changed while it is served; start the service again")

    def _url(self, line: bytes, number: int) -> str:
        """Return the URL of a row; raise RetrieverError if the row is malformed."""
        where = f"{self.path}:{number}"
        try:
            row = DECODER.decode(line.decode())
            url = row["url"]
            contents = row["contents"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrieverError(
                f"{where}: expected a JSON object with 'url' and 'contents' ({error})"
            ) from error
        if not isinstance(url, str):
            raise RetrieverError(f"{where}: field 'url' must be a string, got {url!r}")
        if not isinstance(contents, str):
            raise RetrieverError(f"{where}: field 'contents' must be a string, got {contents!r}")
        check_sendable(line, row, where)
        return url
