"""The hashed encoder: BM25 in a dense space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.sparse import csr_matrix

from retriever.corpus.passages import split_contents
from retriever.encoders.kept_files import reading
from retriever.encoders.tokenizer import tokenize
from retriever.interfaces import CorpusRow

# BM25's saturation of frequencies and weight of lengths: Pyserini's defaults for Wikipedia passages.
K1 = 0.9
B = 0.4
# Name of the encoder's file in the folder of an index.
FILE = "encoder.npz"


class HashedEncoder:
    """BM25 in a dense space, without weights and without a vocabulary.

    Words are hashed to features. A passage has their saturated frequency (Robertson & Zaragoza, "The
    Probabilistic Relevance Framework: BM25 and Beyond"), a query their presence, both times the square root
    of the inverse document frequency, so that the inner product is the BM25 score. A sparse signed random
    projection (Achlioptas, 2003) to `dimension` keeps inner products up to noise of 1 / sqrt(dimension).

    Args:
        dimension: Number of elements D of each vector.
        idf: float32 [FEATURES], inverse document frequency of each feature.
        mean_length: Mean number of words of a passage.
    """

    name = "hashed"
    model = ""
    # Number of features that words are hashed to.
    FEATURES = 2**20
    # Elements of the projection that are not zero, for each feature.
    NONZEROS = 4
    # How often a word of the title counts.
    TITLE_WEIGHT = 2

    def __init__(self, dimension: int, idf: np.ndarray, mean_length: float):
        self.dimension = dimension
        self._idf = idf
        self._mean_length = mean_length
        self._projection = self._project(dimension)

    @classmethod
    def fit(cls, corpus: Sequence[CorpusRow], dimension: int = 4096) -> HashedEncoder:
        """Count in how many passages each feature occurs.

        Args:
            corpus: At least one row.
            dimension: Number of elements D of each vector.

        Returns:
            The encoder of this corpus.
        """
        frequency = np.zeros(cls.FEATURES, np.int64)
        total_length = 0
        for row in corpus:
            words = tokenize(cls._text(row))
            total_length += len(words)
            features = {cls._feature(word) for word in words}
            frequency[list(features)] += 1
        count = len(corpus)
        idf = np.log1p((count - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
        return cls(dimension, idf, max(1.0, total_length / count))

    @classmethod
    def load(cls, folder: Path) -> HashedEncoder:
        """Return the encoder that `save` wrote; raise RetrieverError if its file cannot be read."""
        with reading(folder / FILE) as path, np.load(path) as state:
            return cls(int(state["dimension"]), state["idf"], float(state["mean_length"]))

    def save(self, folder: Path) -> None:
        """Write the counts of the corpus into a folder; raise OSError if it cannot be written."""
        np.savez_compressed(
            folder / FILE, dimension=self.dimension, idf=self._idf, mean_length=self._mean_length
        )

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        """Return the vectors of passages, float32 [len(rows), D]."""
        return self._dense([self._passage_weights(tokenize(self._text(row))) for row in rows])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, float32 [len(queries), D]."""
        return self._dense([self._query_weights(tokenize(query)) for query in queries])

    def _passage_weights(self, words: list[str]) -> dict[int, float]:
        """Return the weight of each feature of a passage."""
        counts = Counter(self._feature(word) for word in words)
        norm = K1 * (1 - B + B * len(words) / self._mean_length)
        weights = {}
        for feature, count in counts.items():
            root_idf = np.sqrt(self._idf[feature])
            weights[feature] = float(root_idf * count * (K1 + 1) / (count + norm))
        return weights

    def _query_weights(self, words: list[str]) -> dict[int, float]:
        """Return the weight of each feature of a query."""
        features = {self._feature(word) for word in words}
        return {feature: float(np.sqrt(self._idf[feature])) for feature in features}

    def _dense(self, weights_of_texts: list[dict[int, float]]) -> np.ndarray:
        """Project the weights of features: float32 [texts, D]."""
        values: list[float] = []
        features: list[int] = []
        lengths = []
        for weights in weights_of_texts:
            values += weights.values()
            features += weights.keys()
            lengths.append(len(weights))
        data = np.array(values, np.float32)
        indices = np.array(features, np.int64)
        pointers = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shape = (len(weights_of_texts), self.FEATURES)
        sparse = csr_matrix((data, indices, pointers), shape=shape)
        return np.asarray((sparse @ self._projection).toarray(), np.float32)

    @classmethod
    def _project(cls, dimension: int) -> Any:
        """Return the projection as a sparse matrix, float32 [FEATURES, D]."""
        rng = np.random.default_rng(0)  # a constant of the format: the same in every process
        columns = rng.integers(0, dimension, (cls.FEATURES, cls.NONZEROS), dtype=np.int32).ravel()
        signs = rng.integers(0, 2, columns.shape, dtype=np.int8).astype(np.float32) * 2 - 1
        pointers = np.arange(0, columns.size + 1, cls.NONZEROS)
        values = signs / np.float32(np.sqrt(cls.NONZEROS))
        return csr_matrix((values, columns, pointers), shape=(cls.FEATURES, dimension))

    @classmethod
    def _text(cls, row: CorpusRow) -> str:
        title, text = split_contents(row["contents"])
        return " ".join([title] * cls.TITLE_WEIGHT + [text])

    @classmethod
    def _feature(cls, word: str) -> int:
        return crc32(word.encode()) % cls.FEATURES
