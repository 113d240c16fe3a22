"""What the rooms hand each other: rows, results, and what an encoder, an index and a searcher can do.

A query's way has one name for each level: the service answers a request (`Engine.answer`), the batcher takes
queries in (`SearchBatcher.submit`), a searcher searches texts (`Searcher.search`), a ranker ranks row numbers
(`Ranker.rank`), and an index of vectors finds the nearest (`Vectors.nearest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Row = dict[str, Any]  # of the corpus: id, contents and whatever else the file has
Found = list[tuple[Row, float]]  # one query's rows with their scores, best first


class Encoder(Protocol):
    """Texts to vectors whose inner product ranks passages."""

    name: str  # of --retriever_name
    model: str  # folder or hub name; empty without weights
    dimension: int

    def encode_passages(self, rows: Sequence[Row]) -> np.ndarray:
        """float32 [len(rows), dimension]."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [len(queries), dimension]."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `encoders.factory.load_encoder` needs."""
        ...


class Vectors(Protocol):
    """An index of vectors: FAISS, JAX or Qdrant."""

    dimension: int
    documents: int

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> scores float32 [Q, k], row numbers int64 [Q, k] or -1 if none was found."""
        ...


class Ranker(Protocol):
    """Ranks row numbers for texts."""

    documents: int

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [Q, k], row numbers int64 [Q, k] or -1."""
        ...


class Searcher(Protocol):
    """What the service needs of an index, or of the web."""

    manifest: dict[str, Any]

    def search(self, queries: Sequence[str], k: int) -> Sequence[Found | Exception]:
        """At most k rows of each query, or why that query has none."""
        ...
