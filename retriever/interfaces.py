"""Types shared by the packages of the service.

A query passes `Engine.answer` (a request), `SearchBatcher.submit` (queries that wait), `Searcher.search`
(texts), `Ranker.rank` (row numbers) and `Vectors.nearest` (an index of vectors).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CorpusRow = dict[str, Any]  # id, contents and any other fields of the file
Hits = list[tuple[CorpusRow, float]]  # one query's rows with their scores, best first


class Encoder(Protocol):
    """Texts to vectors whose inner product ranks passages: float32 [texts, dimension]."""

    name: str  # of --retriever_name
    model: str  # folder or hub name; empty without weights
    dimension: int

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray: ...
    def encode_queries(self, queries: Sequence[str]) -> np.ndarray: ...
    def save(self, folder: Path) -> None: ...  # for `encoders.load_encoder`


class Vectors(Protocol):
    """An index of vectors."""

    dimension: int
    documents: int

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k] for queries float32 [Q, dimension].

        Larger scores are better; best first, ties in corpus order; row -1 where fewer rows are found.
        """
        ...


class Ranker(Protocol):
    """Ranks rows for texts; returns as `Vectors.nearest`."""

    documents: int

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]: ...


class Searcher(Protocol):
    """An index, a collection or the web: at most k rows for each query, or the error of that query."""

    manifest: dict[str, Any]

    def search(self, queries: Sequence[str], k: int) -> Sequence[Hits | Exception]: ...
