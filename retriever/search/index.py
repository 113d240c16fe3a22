"""An opened index: texts in, rows of the corpus out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retriever.corpus.passages import Corpus
from retriever.interfaces import Encoder, Found, Ranker, Vectors


class Dense:
    """An encoder before an index of vectors."""

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder, self.documents = encoder, vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `protocol.Ranker`."""
        return self._vectors.nearest(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it."""

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus, self.manifest = corpus, manifest
        self._ranker = ranker

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """The k best rows of each query with their scores, best first; ties in corpus order."""
        if not queries:
            return []
        scores, found = self._ranker.rank(queries, min(k, len(self.corpus)))
        return [
            [(self.corpus[i], score) for score, i in zip(row.tolist(), ids.tolist(), strict=True) if i >= 0]
            for row, ids in zip(scores, found, strict=True)
        ]
