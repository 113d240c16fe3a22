"""Store of results on disk: repeated queries cost nothing, and a run can be replayed offline."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from retriever.errors import RequestFailed, RetrieverError
from retriever.interfaces import Hits

# Seconds to wait for another process of this host that writes.
WAIT_SECONDS = 30.0
# Seconds between two tries to change the journal mode.
RETRY_SECONDS = 0.01
# Characters of a query in a message.
SHOWN_LENGTH = 200


class ResultCache:
    """Documents and scores by query, depth and identity of the index, in SQLite's WAL mode.

    Several threads of a process, and several processes of one host, may share it.

    Args:
        path: The file.
        identity: What is searched; results of another identity are not returned.
        mode: `use` stores missing results, `replay` only looks up.

    Attributes:
        path: The file.
        mode: As above.

    Raises:
        RetrieverError: The file is not such a store, or does not exist for a replay.
    """

    def __init__(self, path: Path, identity: dict[str, Any], mode: Literal["use", "replay"]):
        if mode == "replay" and not path.is_file():
            raise RetrieverError(f"{path}: nothing was recorded here; run once with --cache_mode use")
        self.path = path
        self.mode = mode
        self._identity = json.dumps(identity, sort_keys=True)
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(
                path, timeout=WAIT_SECONDS, check_same_thread=False, isolation_level=None
            )
            self._set_up()
        except (OSError, sqlite3.DatabaseError) as error:
            raise RetrieverError(f"{path}: not a result store ({error})") from error

    def _set_up(self) -> None:
        """Make the table; wait for another process that changes the journal mode, as SQLite does not."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._store.execute("PRAGMA journal_mode=WAL")
                self._store.execute("PRAGMA synchronous=NORMAL")
                self._store.execute("CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, found TEXT)")
                return
            except sqlite3.OperationalError as error:
                primary_code = error.sqlite_errorcode & 0xFF  # the other bits say why
                is_busy = primary_code == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_SECONDS)

    def look_up(self, queries: Sequence[str], k: int) -> list[Hits | None]:
        """Return the stored results of queries.

        Args:
            queries: The texts.
            k: Number of documents that were asked for.

        Returns:
            For each query its documents and scores, or None if they are not stored.

        Raises:
            RequestFailed: 409: a replay misses a query.
        """
        results: list[Hits | None] = []
        select = "SELECT found FROM results WHERE key = ?"
        for query in queries:
            with self._lock:
                row = self._store.execute(select, (self._key(query, k),)).fetchone()
            if row is not None:
                results.append([(document, score) for document, score in json.loads(row[0])])
                continue
            if self.mode == "replay":
                raise RequestFailed(
                    409,
                    f"replay: query {query[:SHOWN_LENGTH]!r} was not recorded; run with --cache_mode use",
                )
            results.append(None)
        return results

    def store(self, queries: Sequence[str], k: int, results: Sequence[Hits]) -> None:
        """Store the results of queries, all or none; a result that is stored already stays.

        Args:
            queries: The texts.
            k: Number of documents that were asked for.
            results: Documents and scores of each query.

        Raises:
            RetrieverError: They cannot be written.
        """
        rows = []
        for query, hits in zip(queries, results, strict=True):
            # ASCII: SQLite takes UTF-8 only, which has no half of a surrogate pair.
            rows.append((self._key(query, k), json.dumps(hits)))
        try:
            with self._lock, self._store as store:  # commits, or rolls back whatever failed
                store.execute("BEGIN IMMEDIATE")  # waits for another process that writes
                store.executemany("INSERT OR IGNORE INTO results VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise RetrieverError(
                f"{self.path}: results cannot be stored ({error}); set --cache_path"
            ) from error

    def _key(self, query: str, k: int) -> bytes:
        return hashlib.sha256(json.dumps([self._identity, k, query]).encode()).digest()
