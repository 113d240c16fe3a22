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

WAIT = 30.0  # seconds for another process of this host that writes


class ResultCache:
    """Hash of query, depth and identity of the index -> documents and scores, in SQLite's WAL mode.

    Several processes of one host may share it. Mode `use` stores missing results, `replay` looks up only.
    Raises RetrieverError: the file is not such a store, or does not exist for a replay.
    """

    def __init__(self, path: Path, identity: dict[str, Any], mode: Literal["use", "replay"]):
        if mode == "replay" and not path.is_file():
            raise RetrieverError(f"{path}: nothing was recorded here; run once with --cache_mode use")
        self.path, self.mode = path, mode
        self._identity = json.dumps(identity, sort_keys=True)
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(path, timeout=WAIT, check_same_thread=False, isolation_level=None)
            self._set_up()
        except (OSError, sqlite3.DatabaseError) as error:
            raise RetrieverError(f"{path}: not a result store ({error})") from error

    def _set_up(self) -> None:
        """Wait for another process that changes the journal mode, which SQLite itself does not."""
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

    def look_up(self, queries: Sequence[str], k: int) -> list[Hits | None]:
        """Return the stored results of each query, or None; raises RequestFailed (409) in a replay."""
        results: list[Hits | None] = []
        select = "SELECT found FROM results WHERE key = ?"
        for query in queries:
            with self._lock:
                row = self._store.execute(select, (self._key(query, k),)).fetchone()
            if row is None and self.mode == "replay":
                problem = f"replay: query {query[:200]!r} was not recorded; run with --cache_mode use"
                raise RequestFailed(409, problem)
            results.append(None if row is None else [(entry, score) for entry, score in json.loads(row[0])])
        return results

    def store(self, queries: Sequence[str], k: int, results: Sequence[Hits]) -> None:
        """Store the results of queries, all or none; RetrieverError if they cannot be written."""
        pairs = zip(queries, results, strict=True)
        # ASCII: SQLite takes UTF-8 only, which has no half of a surrogate pair.
        rows = [(self._key(query, k), json.dumps(hits)) for query, hits in pairs]
        try:
            with self._lock, self._store as store:  # commits, or rolls back whatever failed
                store.execute("BEGIN IMMEDIATE")  # waits for another process that writes
                store.executemany("INSERT OR IGNORE INTO results VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            problem = f"{self.path}: results cannot be stored ({error})"
            raise RetrieverError(f"{problem}; set --cache_path") from error

    def _key(self, query: str, k: int) -> bytes:
        return hashlib.sha256(json.dumps([self._identity, k, query]).encode()).digest()
