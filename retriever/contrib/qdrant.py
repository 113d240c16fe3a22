"""Qdrant: a server by its URL, or the client's embedded mode in a folder.

Point ids of an index are row numbers. A collection such as RLinf's (one vector a point, the corpus row as
payload) is served unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException

from retriever.backends import LEXICAL, BuildOptions, IndexOptions
from retriever.encoders.registry import check_dimension, check_vector, make_encoder
from retriever.errors import RetrieverError, Unavailable, explained_proxies, reason
from retriever.indexes.backend import Backend, Build
from retriever.indexes.embeddings import Embeddings
from retriever.indexes.progress import progress_bar
from retriever.indexes.ranking import search_in_corpus_order
from retriever.interfaces import CorpusRow, Hits, Vectors

# Seconds for a server to answer.
TIMEOUT = 60
# Points of one request.
BATCH = 256
# Errors of a server, and of the embedded mode.
ERRORS = (ApiException, ValueError, KeyError)
INT8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
# Values of --qdrant_quantization.
QUANTIZATION = {"": None, "int8": models.ScalarQuantization(scalar=INT8)}


class QdrantBackend(Backend):
    """A collection with every vector, and its row as payload."""

    def check(self, options: BuildOptions) -> None:
        """Raise RetrieverError for search parameters that Qdrant does not know."""
        search_params(options.search)

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Raise RetrieverError if the server does not answer, or has another collection of the name."""
        url = options["qdrant_url"]
        collection = options["qdrant_collection"]
        if not url or _upload_mark(shards, options).is_file():
            return
        with connected(Path(), url, "no answer; start the server") as client:
            if client.collection_exists(collection):
                raise RetrieverError(
                    f"--qdrant_collection {collection}: exists in {url}; choose another, or serve it"
                )

    def write(self, build: Build) -> dict[str, Any]:
        """Upload the vectors; a stopped upload continues with the first shard that is not complete."""
        options = build.options
        embeddings = build.embeddings
        assert embeddings is not None
        url = options["qdrant_url"]
        collection = options["qdrant_collection"]
        mark = _upload_mark(embeddings.folder, options)
        problem = f"upload into {collection!r} failed; give the same command again"
        with connected(build.folder, url, problem) as client:
            stored = 0  # points of an earlier start; the last shard of them may be incomplete
            if mark.is_file() and client.collection_exists(collection):
                stored = client.count(collection, exact=True).count
            else:
                _create_collection(client, collection, embeddings.encoder.dimension, options)
                mark.touch()
            uploaded = stored - stored % embeddings.shard_rows
            _upload(client, collection, build, embeddings, uploaded)
        mark.unlink(missing_ok=True)
        return {"url": url, "collection": collection, "search": options.search}

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        """Open the collection; search parameters of the service replace those of the manifest."""
        manifest["search"] = options.settings.get("qdrant_search") or manifest.get("search", "")
        return QdrantVectors(folder, manifest["url"], manifest["collection"], manifest["search"])


def _upload_mark(shards: Path, options: BuildOptions) -> Path:
    """Return the file that exists once an upload of these shards has made the collection."""
    place = f"{options['qdrant_url']} {options['qdrant_collection']}"
    place_hash = hashlib.sha256(place.encode()).hexdigest()[:16]
    return shards / f"qdrant-{place_hash}.json"


def _create_collection(client: Any, collection: str, dimension: int, options: BuildOptions) -> None:
    vectors = models.VectorParams(
        size=dimension,
        distance=models.Distance.DOT,
        on_disk=options["qdrant_on_disk"],
    )
    quantization = QUANTIZATION[options["qdrant_quantization"]]
    client.create_collection(collection, vectors, quantization_config=quantization, on_disk_payload=True)


def _upload(client: Any, collection: str, build: Build, embeddings: Embeddings, uploaded: int) -> None:
    """Upload vectors and rows in batches.

    Args:
        client: Qdrant's client.
        collection: Name of the collection.
        build: The rows, and whether to show progress.
        embeddings: The vectors.
        uploaded: Number of points that are there already, the first ones.
    """
    with progress_bar(embeddings.documents, "upload", build.progress, uploaded) as bar:
        for number, shard in enumerate(embeddings.shards()):
            for start in range(0, len(shard), BATCH):
                first = number * embeddings.shard_rows + start  # row number of the first point
                if first < uploaded:
                    continue
                vectors = np.asarray(shard[start : start + BATCH], np.float32)
                last = first + len(vectors)
                points = models.Batch(
                    ids=list(range(first, last)),
                    vectors=vectors.tolist(),
                    payloads=build.corpus[first:last],
                )
                client.upsert(collection, points, wait=True)
                bar.update(len(vectors))


class QdrantVectors:
    """A collection with one vector a point; `nearest` takes point ids as row numbers.

    Several threads may search at the same time. A key is read from QDRANT_API_KEY.

    Args:
        folder: Folder of the embedded mode, if `url` is empty.
        url: Address of a server, or another folder of the embedded mode.
        collection: Name of the collection.
        search: Search parameters, as for `search_params`.

    Attributes:
        client: Qdrant's client.
        name: The collection, for messages.
        dimension: Number of elements D of each vector.
        documents: Number of points.

    Raises:
        RetrieverError: There is no such server or collection, or the collection has another form.
    """

    def __init__(self, folder: Path, url: str, collection: str, search: str = ""):
        self._params = search_params(search)
        self._collection = collection
        self.client = connect(folder, url)
        self.name = f"Qdrant at {url or folder}, collection {collection!r}"
        # The embedded mode is not made for threads.
        is_embedded = "://" not in url
        self._lock: AbstractContextManager[Any] = threading.Lock() if is_embedded else nullcontext()
        try:
            vectors = self.client.get_collection(collection).config.params.vectors
            self.documents = self.client.count(collection, exact=True).count
        except ERRORS as error:
            raise RetrieverError(f"{self.name}: cannot be opened ({reason(error)})") from error
        if isinstance(vectors, dict):
            raise RetrieverError(f"{self.name}: has named vectors ({', '.join(vectors)}); name one without")
        if vectors.distance not in (models.Distance.DOT, models.Distance.COSINE):
            raise RetrieverError(f"{self.name}: its distance is {vectors.distance}, not Dot or Cosine")
        self.dimension = int(vectors.size)

    def query(self, vectors: np.ndarray, k: int, with_payload: bool = False) -> list[list[Any]]:
        """Return the nearest points of each query.

        Args:
            vectors: float32 [Q, D].
            k: Largest number of points for each query.
            with_payload: Whether the points have their payloads.

        Returns:
            Qdrant's points for each query, best first.

        Raises:
            Unavailable: The server does not answer.
        """
        requests = []
        for vector in vectors:
            requests.append(
                models.QueryRequest(
                    query=vector.tolist(), limit=k, params=self._params, with_payload=with_payload
                )
            )
        try:
            with self._lock:
                answers = self.client.query_batch_points(self._collection, requests)
        except ERRORS as error:
            raise Unavailable(f"{self.name}: no answer ({reason(error)}); is the server up?") from error
        return [answer.points for answer in answers]

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k], as `interfaces.Vectors` says.

        Args:
            vectors: float32 [Q, D].
            k: Number of rows for each query.

        Raises:
            Unavailable: The server does not answer.
        """

        def search(count: int) -> tuple[np.ndarray, np.ndarray]:
            scores = np.full((len(vectors), count), -np.inf, np.float32)
            ids = np.full((len(vectors), count), -1, np.int64)
            for i, points in enumerate(self.query(vectors, count)):
                scores[i, : len(points)] = [point.score for point in points]
                ids[i, : len(points)] = [point.id for point in points]
            return scores, ids

        return search_in_corpus_order(search, k, self.documents)


class Collection:
    """Searches an existing collection whose payloads are the rows. Any number of threads may call it.

    Args:
        options: Options of the service: `retriever_name`, `retriever_model` and those of Qdrant.

    Attributes:
        manifest: What is searched, as of an index.

    Raises:
        RetrieverError: There is no such collection, it has no text in its payload, or its vectors are those
            of another encoder.
    """

    def __init__(self, options: argparse.Namespace):
        name = options.retriever_name
        url = options.qdrant_url
        collection = options.qdrant_collection
        if name in LEXICAL:
            raise RetrieverError(f"--retriever_name {name}: needs --index_path; or name e5, bge or dense")
        vectors = QdrantVectors(Path(), url, collection, options.qdrant_search)
        encoder = make_encoder(name, options.retriever_model, ())
        self._vectors = vectors
        self._encoder = encoder
        self._text = options.qdrant_text
        check_dimension(vectors.name, vectors.dimension, encoder)
        points, _ = vectors.client.scroll(collection, limit=1, with_vectors=True, with_payload=True)
        if not points:
            raise RetrieverError(f"{vectors.name}: is empty; upload into it first")
        first = points[0]
        vector = np.asarray(first.vector, np.float32)  # [D]
        check_vector(f"{vectors.name}, point {first.id}", vector, self._row(first), encoder)
        self.manifest = {
            "kind": "qdrant",
            "documents": vectors.documents,
            "dimension": vectors.dimension,
            "encoder": encoder.name,
            "model": encoder.model,
            "url": url,
            "collection": collection,
        }
        if options.qdrant_search:
            self.manifest["search"] = options.qdrant_search

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best rows of each query.

        Args:
            queries: The texts.
            k: Largest number of rows for each query.

        Returns:
            For each query at most k rows with their scores, best first.

        Raises:
            Unavailable: The server does not answer.
            RetrieverError: A row has no text.
        """
        vectors = self._encoder.encode_queries(queries)  # float32 [Q, D]
        results = []
        for points in self._vectors.query(vectors, k, with_payload=True):
            results.append([(self._row(point), float(point.score)) for point in points])
        return results

    def _row(self, point: Any) -> CorpusRow:
        """Return the payload of a point with `id` and `contents`; raise RetrieverError without a text."""
        payload: CorpusRow = point.payload or {}
        text = payload.get(self._text)
        if not isinstance(text, str):
            raise RetrieverError(
                f"{self._vectors.name}: point {point.id} has no text in {self._text!r} (it has"
                f" {', '.join(payload)}); set --qdrant_text"
            )
        row_id = str(payload.get("id", point.id))
        return payload | {"id": row_id, "contents": text}


def search_params(text: str) -> Any:
    """Parse search parameters.

    Args:
        text: NAME=VALUE pairs, such as ``hnsw_ef=128,oversampling=2``; empty for Qdrant's defaults.

    Returns:
        Qdrant's parameters, or None for its defaults.

    Raises:
        RetrieverError: A name or a value is unknown to Qdrant.
    """
    if not text:
        return None
    quantization_names = models.QuantizationSearchParams.model_fields
    try:
        values: dict[str, Any] = dict(item.split("=") for item in text.replace(" ", "").split(","))
        quantization = {name: values.pop(name) for name in quantization_names if name in values}
        if quantization:
            values["quantization"] = quantization
        return models.SearchParams(**values)
    except ValueError as error:  # also an error of pydantic
        names = ", ".join([*models.SearchParams.model_fields, *quantization_names])
        raise RetrieverError(f"search parameters {text!r}: expected NAME=VALUE of {names}") from error


def connect(folder: Path, url: str) -> Any:
    """Return Qdrant's client, whose calls raise ERRORS.

    Args:
        folder: Folder of the embedded mode, if `url` is empty.
        url: Address of a server, or another folder of the embedded mode.

    Raises:
        RetrieverError: Another process has opened the folder, or a proxy of the environment cannot be used.
    """
    if "://" in url:
        with explained_proxies():
            return QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
    folder = Path(url) if url else folder
    try:
        return QdrantClient(path=str(folder))
    except RuntimeError as error:
        raise RetrieverError(f"{folder}: open in another process; stop it, or set --qdrant_url") from error


@contextmanager
def connected(folder: Path, url: str, problem: str) -> Iterator[Any]:
    """Connect within the block, and turn the client's errors into a RetrieverError.

    Args:
        folder: As for `connect`.
        url: As for `connect`.
        problem: What has failed, for the message.

    Yields:
        Qdrant's client; it is closed after the block.

    Raises:
        RetrieverError: A call has failed, or another process has opened the folder.
    """
    client = connect(folder, url)
    try:
        yield client
    except ERRORS as error:
        raise RetrieverError(f"{url or folder}: {problem} ({reason(error)})") from error
    finally:
        client.close()
