"""An opened index: texts in, rows of the corpus out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from retriever.corpus.passages import Corpus
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.words import words
from retriever.interfaces import Encoder, Found, Ranker, Row, Vectors

SPARE = 16  # passages fetched for those that turn out to be noise


class Dense:
    """An encoder before an index of vectors."""

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder, self.documents = encoder, vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Ranker`."""
        return self._vectors.nearest(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it.

    Of the hashed encoder's passages those count that have a word of the query and a score above 0: its
    projection gives all others a little noise.
    """

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus, self.manifest = corpus, manifest
        self._ranker = ranker
        self._is_noisy = manifest.get("encoder") == HashedEncoder.name

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """The k best rows of each query with their scores, best first; ties in corpus order."""
        if not queries:
            return []
        fetched = min(k + SPARE * self._is_noisy, len(self.corpus))
        scores, ids = self._ranker.rank(queries, fetched)
        ranked = zip(queries, scores.tolist(), ids.tolist(), strict=True)
        return [list(islice(self._hits(*one), k)) for one in ranked]

    def _hits(self, query: str, scores: list[float], ids: list[int]) -> Iterator[tuple[Row, float]]:
        asked = set(words(query)) if self._is_noisy else set()
        for score, i in zip(scores, ids, strict=True):
            if i < 0:
                continue
            row = self.corpus[i]
            if not self._is_noisy or (score > 0 and not asked.isdisjoint(words(row["contents"]))):
                yield row, score
