"""Encoders: texts to vectors whose inner product ranks passages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from retriever.corpus import Corpus, split_contents
from retriever.errors import RetrieverError


class Encoder(Protocol):
    """One class a kind; `ENCODERS` names them."""

    dimension: int

    def encode_passages(self, corpus: Corpus, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, dimension]."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [len(queries), dimension]."""
        ...

    def save(self, folder: Path) -> None: ...


class HashedEncoder:
    """BM25 in a dense space, without weights and without a vocabulary.

    Words are hashed to features; a passage carries their saturated frequency (Robertson & Zaragoza,
    "The Probabilistic Relevance Framework: BM25 and Beyond"), a query their presence, both times the
    square root of the inverse document frequency, so that the inner product is the BM25 score. A sparse
    signed random projection (Achlioptas, 2003) reduces the features to `dimension`; it keeps inner
    products up to noise of about 1 / sqrt(dimension).
    """

    FEATURES = 2**20
    NONZEROS = 4  # per feature in the projection
    TITLE_WEIGHT = 2  # a word of the title counts this often more
    K1, B = 0.9, 0.4  # Pyserini's defaults for Wikipedia passages

    def __init__(self, dimension: int, idf: np.ndarray, mean_length: float):
        self.dimension, self._idf, self._mean_length = dimension, idf, mean_length
        self._projection = self._project(dimension)

    @classmethod
    def fit(cls, corpus: Corpus, dimension: int = 4096) -> HashedEncoder:
        """Counts in how many passages each feature occurs."""
        frequency = np.zeros(cls.FEATURES, np.int64)
        total = 0
        for row in corpus.rows:
            words = cls._words(cls._text(row))
            total += len(words)
            frequency[list({cls._feature(word) for word in words})] += 1
        count = len(corpus)
        idf = np.log1p((count - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
        return cls(dimension, idf, max(1.0, total / count))

    @classmethod
    def load(cls, folder: Path) -> HashedEncoder:
        with np.load(folder / "encoder.npz") as state:
            return cls(int(state["dimension"]), state["idf"], float(state["mean_length"]))

    def save(self, folder: Path) -> None:
        np.savez_compressed(
            folder / "encoder.npz", dimension=self.dimension, idf=self._idf, mean_length=self._mean_length
        )

    def encode_passages(self, corpus: Corpus, start: int, stop: int) -> np.ndarray:
        rows = [self._weights(self._words(self._text(row))) for row in corpus.rows[start:stop]]
        return self._dense(rows)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        rows = []
        for query in queries:
            features = {self._feature(word) for word in self._words(query)}
            rows.append({feature: float(np.sqrt(self._idf[feature])) for feature in features})
        return self._dense(rows)

    def _weights(self, words: list[str]) -> dict[int, float]:
        counts: dict[int, int] = {}
        for word in words:
            feature = self._feature(word)
            counts[feature] = counts.get(feature, 0) + 1
        norm = self.K1 * (1 - self.B + self.B * len(words) / self._mean_length)
        return {
            feature: float(np.sqrt(self._idf[feature]) * count * (self.K1 + 1) / (count + norm))
            for feature, count in counts.items()
        }

    def _dense(self, rows: list[dict[int, float]]) -> np.ndarray:
        from scipy.sparse import csr_matrix

        lengths = [len(row) for row in rows]
        data = np.array([value for row in rows for value in row.values()], np.float32)
        indices = np.array([feature for row in rows for feature in row], np.int64)
        pointers = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        sparse = csr_matrix((data, indices, pointers), shape=(len(rows), self.FEATURES))
        return np.asarray((sparse @ self._projection).toarray(), np.float32)

    @classmethod
    def _project(cls, dimension: int) -> Any:
        from scipy.sparse import csr_matrix

        rng = np.random.default_rng(0)  # a constant of the format: the same in every process
        columns = rng.integers(0, dimension, (cls.FEATURES, cls.NONZEROS), dtype=np.int32).ravel()
        signs = rng.integers(0, 2, columns.shape, dtype=np.int8).astype(np.float32) * 2 - 1
        pointers = np.arange(0, columns.size + 1, cls.NONZEROS)
        values = signs / np.float32(np.sqrt(cls.NONZEROS))
        return csr_matrix((values, columns, pointers), shape=(cls.FEATURES, dimension))

    @classmethod
    def _text(cls, row: dict[str, Any]) -> str:
        title, text = split_contents(row["contents"])
        return " ".join([title] * cls.TITLE_WEIGHT + [text])

    @staticmethod
    def _words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    @classmethod
    def _feature(cls, word: str) -> int:
        from zlib import crc32

        return crc32(word.encode()) % cls.FEATURES


ENCODERS: dict[str, Any] = {"hashed": HashedEncoder}


def encoder_class(name: str) -> Any:
    """The class of an encoder.

    Raises:
        RetrieverError: no such encoder.
    """
    if name not in ENCODERS:
        raise RetrieverError(f"encoder {name!r} is unknown; available are {', '.join(ENCODERS)}")
    return ENCODERS[name]
