"""Results on disk, found by request: repeats cost nothing, and a run can be repeated offline, exactly."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from retriever.errors import RetrieverError
from retriever.interfaces import Found

WAIT = 30.0  # seconds for another process of this host that writes

CacheMode = Literal["use", "replay"]


class NotRecorded(Exception):
    """Replay was asked for a query that the store does not hold."""


class ResultCache:
    """Content-addressed store: hash of query, depth and index identity -> documents and scores.

    A SQLite file in WAL mode: several processes of one host may share it, several hosts may not.

    Args:
        identity: of index and reranker; results of another one are never mixed in.
        mode: use: look up, search and store what is missing. replay: look up only.

    Raises:
        RetrieverError: the file is not such a store, or replay is asked for and it does not exist.
    """

    def __init__(self, path: Path, identity: dict[str, Any], mode: CacheMode):
        if mode == "replay" and not path.is_file():
            raise RetrieverError(f"{path}: nothing was recorded here; run once with --cache_mode use")
        self.path, self.mode = path, mode
        self._identity = json.dumps(identity, sort_keys=True)
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._store = sqlite3.connect(path, timeout=WAIT, check_same_thread=False, isolation_level=None)
            self._set_up()
        except sqlite3.DatabaseError as error:
            raise RetrieverError(
                f"{path}: not a result store ({error}); choose another --cache_path"
            ) from error

    def _set_up(self) -> None:
        """SQLite itself does not wait for another process that changes the journal mode: this does."""
        patience = time.monotonic() + WAIT
        while True:
            try:
                self._store.execute("PRAGMA journal_mode=WAL")
                self._store.execute("PRAGMA synchronous=NORMAL")
                self._store.execute("CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, found TEXT)")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the rest says why
                if not busy or time.monotonic() > patience:
                    raise
            time.sleep(0.01)

    def look_up(self, queries: Sequence[str], k: int) -> list[Found | None]:
        """What is known of each query.

        Raises:
            NotRecorded: in replay mode, with the first query that is not known.
        """
        known: list[Found | None] = []
        for query in queries:
            with self._lock:
                row = self._store.execute(
                    "SELECT found FROM results WHERE key = ?", (self._key(query, k),)
                ).fetchone()
            if row is None and self.mode == "replay":
                raise NotRecorded(query)
            known.append(None if row is None else [(entry, score) for entry, score in json.loads(row[0])])
        return known

    def store(self, queries: Sequence[str], k: int, found: Sequence[Found]) -> None:
        """Keeps the results of queries, all or none.

        Raises:
            RetrieverError: they cannot be written; what was stored before remains.
        """
        rows = [
            # ASCII: SQLite takes UTF-8 only, which has no half of a surrogate pair.
            (self._key(query, k), json.dumps(one))
            for query, one in zip(queries, found, strict=True)
        ]
        try:
            with self._lock, self._transaction() as store:
                store.executemany("INSERT OR IGNORE INTO results VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise RetrieverError(
                f"{self.path}: results cannot be stored ({error}); make room there, or choose another"
                " --cache_path"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Another process that writes is waited for; whatever fails leaves no transaction open."""
        self._store.execute("BEGIN IMMEDIATE")
        try:
            yield self._store
            self._store.execute("COMMIT")
        except BaseException:
            if self._store.in_transaction:
                self._store.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._store.close()

    def _key(self, query: str, k: int) -> bytes:
        return hashlib.sha256(json.dumps([self._identity, k, query]).encode()).digest()
