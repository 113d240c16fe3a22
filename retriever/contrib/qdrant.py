"""Qdrant: a server by its URL, or the client's embedded mode in a folder.

Point ids of an index are row numbers. A collection such as RLinf's (one vector a point, the corpus row as
payload) is served as it is.
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
from retriever.errors import RetrieverError, Unavailable, reason
from retriever.indexes.backend import Backend, Build
from retriever.indexes.progress import progress_bar
from retriever.indexes.ranking import search_in_corpus_order
from retriever.interfaces import CorpusRow, Hits, Vectors

TIMEOUT = 60  # seconds
BATCH = 256  # points of one request
ERRORS = (ApiException, ValueError, KeyError)  # of a server, and of the embedded mode
INT8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
QUANTIZATION = {"": None, "int8": models.ScalarQuantization(scalar=INT8)}


class QdrantBackend(Backend):
    """A collection with every vector and its row as payload."""

    def check(self, options: BuildOptions) -> None:
        search_params(options.search)

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Refuse a server that does not answer, or has a collection of the name that is not ours."""
        url, collection = options["qdrant_url"], options["qdrant_collection"]
        if not url or _upload_mark(shards, options).is_file():
            return
        with connected(Path(), url, "no answer; start the server") as client:
            if client.collection_exists(collection):
                problem = f"exists in {url}; choose another, or serve it"
                raise RetrieverError(f"--qdrant_collection {collection}: {problem}")

    def write(self, build: Build) -> dict[str, Any]:
        """Upload the vectors; a stopped upload continues with the first shard that is not whole."""
        options, embeddings = build.options, build.embeddings
        assert embeddings is not None
        url, collection = options["qdrant_url"], options["qdrant_collection"]
        mark = _upload_mark(embeddings.folder, options)
        problem = f"upload into {collection!r} failed; give the same command again"
        with connected(build.folder, url, problem) as client:
            stored = 0  # points, of whole shards and one that was stopped
            if mark.is_file() and client.collection_exists(collection):
                stored = client.count(collection, exact=True).count
            else:
                client.create_collection(
                    collection,
                    models.VectorParams(
                        size=embeddings.encoder.dimension,
                        distance=models.Distance.DOT,
                        on_disk=options["qdrant_on_disk"],
                    ),
                    quantization_config=QUANTIZATION[options["qdrant_quantization"]],
                    on_disk_payload=True,
                )
                mark.touch()
            uploaded = stored - stored % embeddings.shard_rows
            with progress_bar(embeddings.documents, "upload", build.progress, uploaded) as bar:
                for number, shard in enumerate(embeddings.shards()):
                    for start in range(0, len(shard), BATCH):
                        first = number * embeddings.shard_rows + start
                        if first < uploaded:
                            continue
                        vectors = np.asarray(shard[start : start + BATCH], np.float32)
                        ids = list(range(first, first + len(vectors)))
                        payloads = build.corpus[first : first + len(vectors)]
                        points = models.Batch(ids=ids, vectors=vectors.tolist(), payloads=payloads)
                        client.upsert(collection, points, wait=True)
                        bar.update(len(vectors))
        mark.unlink(missing_ok=True)
        return {"url": url, "collection": collection, "search": options.search}

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        manifest["search"] = options.settings.get("qdrant_search") or manifest.get("search", "")
        return QdrantVectors(folder, manifest["url"], manifest["collection"], manifest["search"])


def _upload_mark(shards: Path, options: BuildOptions) -> Path:
    """Return the file that says that an upload of these shards has made the collection."""
    place = f"{options['qdrant_url']} {options['qdrant_collection']}"
    return shards / f"qdrant-{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


class QdrantVectors:
    """A collection with one vector a point; `nearest` takes point ids as row numbers.

    `folder` is that of the embedded mode, if `url` names neither a server nor another folder. A key is read
    from QDRANT_API_KEY. Raises RetrieverError: no such server or collection, or one of another form.
    """

    def __init__(self, folder: Path, url: str, collection: str, search: str = ""):
        self._params, self._collection = search_params(search), collection
        self.client = connect(folder, url)
        self.name = f"Qdrant at {url or folder}, collection {collection!r}"
        # The embedded mode is not made for threads.
        self._lock: AbstractContextManager[Any] = nullcontext() if "://" in url else threading.Lock()
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
        """Return the nearest points for float32 [Q, dimension]; raises Unavailable without an answer."""
        requests = [
            models.QueryRequest(
                query=vector.tolist(), limit=k, params=self._params, with_payload=with_payload
            )
            for vector in vectors
        ]
        try:
            with self._lock:
                answers = self.client.query_batch_points(self._collection, requests)
        except ERRORS as error:
            raise Unavailable(f"{self.name}: no answer ({reason(error)}); is the server up?") from error
        return [answer.points for answer in answers]

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Vectors`; raises Unavailable without an answer."""

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

    Raises RetrieverError: no such collection, no text in its payload, or vectors of another encoder.
    """

    def __init__(self, options: argparse.Namespace):
        name, url, collection = options.retriever_name, options.qdrant_url, options.qdrant_collection
        if name in LEXICAL:
            raise RetrieverError(f"--retriever_name {name}: needs --index_path; or name e5, bge or dense")
        vectors = QdrantVectors(Path(), url, collection, options.qdrant_search)
        encoder = make_encoder(name, options.retriever_model, ())
        self._vectors, self._encoder, self._text = vectors, encoder, options.qdrant_text
        check_dimension(vectors.name, vectors.dimension, encoder)
        points, _ = vectors.client.scroll(collection, limit=1, with_vectors=True, with_payload=True)
        if not points:
            raise RetrieverError(f"{vectors.name}: is empty; upload into it first")
        place, vector = f"{vectors.name}, point {points[0].id}", np.asarray(points[0].vector, np.float32)
        check_vector(place, vector, self._row(points[0]), encoder)
        self.manifest = {"kind": "qdrant", "documents": vectors.documents, "dimension": vectors.dimension}
        self.manifest |= {"encoder": encoder.name, "model": encoder.model}
        self.manifest |= {"url": url, "collection": collection}
        if options.qdrant_search:
            self.manifest["search"] = options.qdrant_search

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """As `interfaces.Searcher`; raises RetrieverError for a row without text."""
        points_of_queries = self._vectors.query(self._encoder.encode_queries(queries), k, with_payload=True)
        return [[(self._row(point), float(point.score)) for point in points] for points in points_of_queries]

    def _row(self, point: Any) -> CorpusRow:
        payload: CorpusRow = point.payload or {}
        text = payload.get(self._text)
        if not isinstance(text, str):
            problem = f"point {point.id} has no text in {self._text!r} (it has {', '.join(payload)})"
            raise RetrieverError(f"{self._vectors.name}: {problem}; set --qdrant_text")
        return payload | {"id": str(payload.get("id", point.id)), "contents": text}


def search_params(text: str) -> Any:
    """Return Qdrant's parameters of ``hnsw_ef=128,oversampling=2``, or None; raises RetrieverError."""
    if not text:
        return None
    of_codes = models.QuantizationSearchParams.model_fields
    try:
        values: dict[str, Any] = dict(item.split("=") for item in text.replace(" ", "").split(","))
        if quantization := {name: values.pop(name) for name in of_codes if name in values}:
            values["quantization"] = quantization
        return models.SearchParams(**values)
    except ValueError as error:  # pydantic's too
        names = ", ".join([*models.SearchParams.model_fields, *of_codes])
        raise RetrieverError(f"search parameters {text!r}: expected NAME=VALUE of {names}") from error


def connect(folder: Path, url: str) -> Any:
    """Return a client, whose calls raise ERRORS; raises RetrieverError if another process has the folder."""
    if "://" in url:
        return QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
    folder = Path(url) if url else folder
    try:
        return QdrantClient(path=str(folder))
    except RuntimeError as error:
        raise RetrieverError(f"{folder}: open in another process; stop it, or set --qdrant_url") from error


@contextmanager
def connected(folder: Path, url: str, problem: str) -> Iterator[Any]:
    """Yield a client whose errors become a RetrieverError with this problem."""
    client = connect(folder, url)
    try:
        yield client
    except ERRORS as error:
        raise RetrieverError(f"{url or folder}: {problem} ({reason(error)})") from error
    finally:
        client.close()
