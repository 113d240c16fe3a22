"""Qdrant: a server by its URL, or the client's embedded mode in a folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError, Unavailable, reason, require
from retriever.search.ties import search_in_corpus_order

INSTALL = "pip install qdrant-client"
TIMEOUT = 60  # seconds
PARAMETERS = {"hnsw_ef": int, "exact": bool, "indexed_only": bool}
QUANTIZATION = {"ignore": bool, "rescore": bool, "oversampling": float}


class Connection:
    """One collection, with one vector a point.

    Args:
        folder: of the embedded mode, if `url` is empty.
        url: of a server, or a folder of the embedded mode. A key is read from QDRANT_API_KEY.

    Raises:
        RetrieverError: qdrant-client is missing, no such server or collection, or none of its kind.
    """

    def __init__(self, folder: Path, url: str, collection: str):
        self._client, self._errors = connect(folder, url)
        self.where = f"Qdrant at {url or folder}, collection {collection!r}"
        self._collection = collection
        # The embedded mode is plain Python and not made for threads; a server is.
        self._lock = None if "://" in url else threading.Lock()
        try:
            vectors = self._client.get_collection(collection).config.params.vectors
            self.documents = self._client.count(collection, exact=True).count
        except self._errors as error:
            raise RetrieverError(
                f"{self.where}: cannot be opened ({reason(error)}); start the server, correct the name, or"
                " build the index again"
            ) from error
        if isinstance(vectors, dict):
            raise RetrieverError(f"{self.where}: has named vectors ({', '.join(vectors)}); name one without")
        if str(vectors.distance).rpartition(".")[2].lower() not in ("dot", "cosine"):
            raise RetrieverError(
                f"{self.where}: its distance is {vectors.distance}; build it with Dot or Cosine"
            )
        self.dimension = int(vectors.size)

    def query(self, vectors: np.ndarray, k: int, params: Any = None, with_payload: bool = False) -> list[Any]:
        """The server's answer to each of float32 [Q, D].

        Raises:
            Unavailable: there was none.
        """
        from qdrant_client import models

        requests = [
            models.QueryRequest(query=vector.tolist(), limit=k, params=params, with_payload=with_payload)
            for vector in vectors
        ]
        try:
            if self._lock is None:
                return self._client.query_batch_points(self._collection, requests)
            with self._lock:
                return self._client.query_batch_points(self._collection, requests)
        except self._errors as error:
            raise Unavailable(f"{self.where}: no answer ({reason(error)}); is the server up?") from error

    def first(self) -> Any:
        """A point with its vector and payload.

        Raises:
            RetrieverError: the collection is empty.
        """
        points, _ = self._client.scroll(self._collection, limit=1, with_vectors=True, with_payload=True)
        if not points:
            raise RetrieverError(f"{self.where}: is empty; upload into it first")
        point = points[0]
        point.vector = np.asarray(point.vector, np.float32)
        return point


class QdrantVectors:
    """A collection whose point ids are row numbers.

    Args:
        search: as for `search_params`.
    """

    def __init__(self, folder: Path, url: str, collection: str, search: str = ""):
        self._params = search_params(search)
        self._connection = Connection(folder, url, collection)
        self.documents, self.dimension = self._connection.documents, self._connection.dimension

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> float32 [Q, k] and int64 [Q, k], -1 if an approximate search found no more;
        best first, ties in corpus order.

        Raises:
            Unavailable: the server did not answer.
        """
        return search_in_corpus_order(lambda count: self._fetch(vectors, count), k, self.documents)

    def _fetch(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        ids = np.full((len(vectors), k), -1, np.int64)
        for i, answer in enumerate(self._connection.query(vectors, k, self._params)):
            for j, point in enumerate(answer.points):
                scores[i, j], ids[i, j] = point.score, point.id
        return scores, ids


def search_params(text: str) -> Any:
    """Qdrant's search parameters, such as ``hnsw_ef=128,exact=false,rescore=true,oversampling=2``.

    Raises:
        RetrieverError: qdrant-client is missing, no such parameter, or no such value.
    """
    if not text:
        return None
    require("qdrant_client", INSTALL)
    from qdrant_client import models

    known = PARAMETERS | QUANTIZATION
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            kind = known[name.strip()]
            values[name.strip()] = (
                {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
            )
        except (KeyError, ValueError) as error:
            raise RetrieverError(
                f"search parameter {item!r}: expected NAME=VALUE with one of {', '.join(known)}"
            ) from error
    quantization = {name: values.pop(name) for name in QUANTIZATION if name in values}
    if quantization:
        values["quantization"] = models.QuantizationSearchParams(**quantization)
    return models.SearchParams(**values)


def connect(folder: Path, url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client, and the errors its calls raise.

    Raises:
        RetrieverError: qdrant-client is missing, or another process has the embedded collection open.
    """
    package = require("qdrant_client", INSTALL)
    from qdrant_client.http.exceptions import ApiException

    if "://" in url:
        client = package.QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
        return client, (ApiException, ValueError)
    folder = Path(url) if url else folder
    try:
        return package.QdrantClient(path=str(folder)), (ValueError, KeyError)
    except RuntimeError as error:
        raise RetrieverError(
            f"{folder}: open in another process; stop it, or use a Qdrant server (--qdrant_url)"
        ) from error
