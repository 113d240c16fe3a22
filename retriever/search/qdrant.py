"""Qdrant: a server by its URL, or the client's embedded mode in the index's own folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError, reason, require
from retriever.search.ties import search_in_corpus_order

INSTALL = "pip install qdrant-client"
TIMEOUT = 60  # seconds


class QdrantVectors:
    """A collection whose point ids are row numbers."""

    def __init__(self, folder: Path, url: str, collection: str):
        """Connects.

        Args:
            url: of a server; empty for the embedded mode in `folder`. A key is read from QDRANT_API_KEY.

        Raises:
            RetrieverError: qdrant-client is missing, or no such server or collection.
        """
        self._client, self._errors = connect(folder, url)
        self._where, self._collection = f"Qdrant at {url or folder}", collection
        # The embedded mode is plain Python and not made for threads; a server is.
        self._lock = threading.Lock()
        self._is_remote = bool(url)
        try:
            state = self._client.get_collection(collection)
            self.documents = self._client.count(collection, exact=True).count
        except self._errors as error:
            raise RetrieverError(
                f"{self._where}: collection {collection!r} cannot be opened ({reason(error)}); start the"
                " server, or build the index again"
            ) from error
        self.dimension = int(state.config.params.vectors.size)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> float32 [Q, k] and int64 [Q, k], -1 where an approximate search found no more;
        best first, ties in corpus order.

        Raises:
            RetrieverError: the server did not answer.
        """
        return search_in_corpus_order(lambda count: self._fetch(vectors, count), k, self.documents)

    def _fetch(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if self._is_remote:
            answers = self._query(vectors, k)
        else:
            with self._lock:
                answers = self._query(vectors, k)
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        ids = np.full((len(vectors), k), -1, np.int64)
        for i, answer in enumerate(answers):
            for j, point in enumerate(answer.points):
                scores[i, j], ids[i, j] = point.score, point.id
        return scores, ids

    def _query(self, vectors: np.ndarray, k: int) -> list[Any]:
        from qdrant_client import models

        requests = [models.QueryRequest(query=vector.tolist(), limit=k) for vector in vectors]
        try:
            return self._client.query_batch_points(self._collection, requests)
        except self._errors as error:
            raise RetrieverError(f"{self._where}: no answer ({reason(error)}); is the server up?") from error


def connect(folder: Path, url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client, and the errors its calls raise.

    Raises:
        RetrieverError: qdrant-client is missing, or another process has the embedded collection open.
    """
    package = require("qdrant_client", INSTALL)
    from qdrant_client.http.exceptions import ApiException

    if url:
        client = package.QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
        return client, (ApiException, ValueError)
    try:
        return package.QdrantClient(path=str(folder)), (ValueError, KeyError)
    except RuntimeError as error:
        raise RetrieverError(
            f"{folder}: open in another process; stop it, or use a Qdrant server (--qdrant_url)"
        ) from error
