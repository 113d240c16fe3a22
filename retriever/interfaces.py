"""Types shared by the packages of the service.

A query passes through these layers: `Engine.answer` takes a request, `SearchBatcher.submit` its queries,
`Searcher.search` the texts of a batch, `Ranker.rank` the same texts but returns row numbers, and
`Vectors.nearest` ranks the rows for vectors of the texts.

Arrays: Q is the number of queries, D the dimension of the vectors, k the number of results asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# A row of the corpus: `id` (text), `contents` (text) and any other fields of the file.
CorpusRow = dict[str, Any]
# One query's rows with their scores, best first.
Hits = list[tuple[CorpusRow, float]]


class Encoder(Protocol):
    """Turns texts into vectors whose inner product ranks passages.

    Attributes:
        name: The value of ``--retriever_name`` that selects this encoder.
        model: Folder or hub name of the model; empty for an encoder without weights.
        dimension: Number of elements D of each vector.
    """

    name: str
    model: str
    dimension: int

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        """Encode passages of the corpus.

        Args:
            rows: Rows with `contents`; may be empty.

        Returns:
            float32 [len(rows), D], one vector a row, in the order of `rows`.
        """
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Encode the texts of queries. Several threads may call it at the same time.

        Args:
            queries: Texts; an empty text is allowed.

        Returns:
            float32 [len(queries), D], one vector a query, in the order of `queries`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what `retriever.encoders.registry.load_encoder` needs to make this encoder again.

        Args:
            folder: An existing folder: that of the index, or that of the vectors.

        Raises:
            OSError: The folder cannot be written.
        """
        ...


class Vectors(Protocol):
    """An opened index of vectors.

    Attributes:
        dimension: Number of elements D of each vector.
        documents: Number of indexed vectors. Row number i is row i of the corpus.
    """

    dimension: int
    documents: int

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows with the largest scores for each query vector.

        Several threads may call it at the same time.

        Args:
            vectors: float32 [Q, D], one vector a query; Q is at least 1.
            k: Number of rows for each query, from 1 to `documents`.

        Returns:
            Scores float32 [Q, k] and row numbers int64 [Q, k]. A larger score is better (inner product).
            Each row of both arrays is sorted: best first, and equal scores in corpus order, which is the
            smaller row number first. Where fewer than k rows are found, as with an approximate index, the
            last row numbers are -1; callers skip these places, whatever their scores.

        Raises:
            Unavailable: Another service holds the vectors and does not answer.
        """
        ...


class Ranker(Protocol):
    """Ranks the rows of a corpus for texts.

    Attributes:
        documents: Number of rows that are ranked.
    """

    documents: int

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best rows for each query. Several threads may call it at the same time.

        Args:
            queries: At least one text.
            k: Number of rows for each query, from 1 to `documents`.

        Returns:
            Scores float32 [Q, k] and row numbers int64 [Q, k], sorted and filled with -1 as the result of
            `Vectors.nearest`.

        Raises:
            Unavailable: Another service holds the index and does not answer.
        """
        ...


class Searcher(Protocol):
    """Answers queries with rows: an index over a corpus, a collection of a server, or the web.

    Attributes:
        manifest: What is searched, as JSON values: GET /health shows the entries, and those that decide
            results are hashed into the identity of the index.
    """

    manifest: dict[str, Any]

    def search(self, queries: Sequence[str], k: int) -> Sequence[Hits | Exception]:
        """Return the best rows of each query. Several threads may call it at the same time.

        Args:
            queries: Texts; may be empty.
            k: Largest number of rows for each query, at least 1.

        Returns:
            One item for each query, in the order of `queries`: at most k pairs of row and score, best first,
            or the error of this query alone.

        Raises:
            RetrieverError: No query of the batch can be answered.
        """
        ...
