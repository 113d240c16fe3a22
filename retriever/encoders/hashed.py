"""The encoder without weights: BM25 in a dense space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.sparse import csr_matrix

from retriever.corpus.passages import split_contents
from retriever.encoders.probe import reading
from retriever.encoders.words import K1, B, words
from retriever.interfaces import Row


class HashedEncoder:
    """BM25 in a dense space, without weights and without a vocabulary.

    Words are hashed to features; a passage carries their saturated frequency (Robertson & Zaragoza,
    "The Probabilistic Relevance Framework: BM25 and Beyond"), a query their presence, both times the
    square root of the inverse document frequency, so that the inner product is the BM25 score. A sparse
    signed random projection (Achlioptas, 2003) reduces the features to `dimension`; it keeps inner
    products up to noise of about 1 / sqrt(dimension).
    """

    name, model = "hashed", ""
    FEATURES = 2**20
    NONZEROS = 4  # per feature in the projection
    TITLE_WEIGHT = 2  # a word of the title counts this many times more

    def __init__(self, dimension: int, idf: np.ndarray, mean_length: float):
        self.dimension, self._idf, self._mean_length = dimension, idf, mean_length
        self._projection = self._project(dimension)

    @classmethod
    def fit(cls, corpus: Sequence[Row], dimension: int = 4096) -> HashedEncoder:
        """Counts in how many passages each feature occurs."""
        frequency = np.zeros(cls.FEATURES, np.int64)
        total = 0
        for row in corpus:
            found = words(cls._text(row))
            total += len(found)
            frequency[list({cls._feature(word) for word in found})] += 1
        count = len(corpus)
        idf = np.log1p((count - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
        return cls(dimension, idf, max(1.0, total / count))

    @classmethod
    def load(cls, folder: Path) -> HashedEncoder:
        with reading(folder / "encoder.npz") as path, np.load(path) as state:
            return cls(int(state["dimension"]), state["idf"], float(state["mean_length"]))

    def save(self, folder: Path) -> None:
        np.savez_compressed(
            folder / "encoder.npz", dimension=self.dimension, idf=self._idf, mean_length=self._mean_length
        )

    def encode_passages(self, rows: Sequence[Row]) -> np.ndarray:
        return self._dense([self._weights(words(self._text(row))) for row in rows])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        rows = []
        for query in queries:
            features = {self._feature(word) for word in words(query)}
            rows.append({feature: float(np.sqrt(self._idf[feature])) for feature in features})
        return self._dense(rows)

    def _weights(self, found: list[str]) -> dict[int, float]:
        counts: dict[int, int] = {}
        for word in found:
            feature = self._feature(word)
            counts[feature] = counts.get(feature, 0) + 1
        norm = K1 * (1 - B + B * len(found) / self._mean_length)
        return {
            feature: float(np.sqrt(self._idf[feature]) * count * (K1 + 1) / (count + norm))
            for feature, count in counts.items()
        }

    def _dense(self, rows: list[dict[int, float]]) -> np.ndarray:
        lengths = [len(row) for row in rows]
        data = np.array([value for row in rows for value in row.values()], np.float32)
        indices = np.array([feature for row in rows for feature in row], np.int64)
        pointers = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        sparse = csr_matrix((data, indices, pointers), shape=(len(rows), self.FEATURES))
        return np.asarray((sparse @ self._projection).toarray(), np.float32)

    @classmethod
    def _project(cls, dimension: int) -> Any:
        rng = np.random.default_rng(0)  # a constant of the format: the same in every process
        columns = rng.integers(0, dimension, (cls.FEATURES, cls.NONZEROS), dtype=np.int32).ravel()
        signs = rng.integers(0, 2, columns.shape, dtype=np.int8).astype(np.float32) * 2 - 1
        pointers = np.arange(0, columns.size + 1, cls.NONZEROS)
        values = signs / np.float32(np.sqrt(cls.NONZEROS))
        return csr_matrix((values, columns, pointers), shape=(cls.FEATURES, dimension))

    @classmethod
    def _text(cls, row: Row) -> str:
        title, text = split_contents(row["contents"])
        return " ".join([title] * cls.TITLE_WEIGHT + [text])

    @classmethod
    def _feature(cls, word: str) -> int:
        return crc32(word.encode()) % cls.FEATURES
