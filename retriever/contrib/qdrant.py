"""Qdrant: a server by its URL, or the client's embedded mode in a folder.

Point ids of an index are row numbers. A collection such as RLinf's (one vector a point, the corpus row as
payload) is served as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import ADVICE, LEXICAL, BuildOptions, IndexOptions
from retriever.encoders import check_dimension, check_vector, make_encoder
from retriever.errors import RetrieverError, Unavailable, reason, require
from retriever.files import replacing
from retriever.indexes.backend import Backend, Build, progress_bar
from retriever.indexes.faiss import search_in_corpus_order
from retriever.interfaces import CorpusRow, Hits, Vectors

TIMEOUT = 60  # seconds
BOOLEAN = {"true": True, "false": False}.__getitem__
PARAMETERS: dict[str, Any] = {"hnsw_ef": int, "exact": BOOLEAN, "indexed_only": BOOLEAN}
QUANTIZATION: dict[str, Any] = {"ignore": BOOLEAN, "rescore": BOOLEAN, "oversampling": float}
BATCH = 256  # points of one request


class QdrantBackend(Backend):
    """A collection with every vector and its row as payload."""

    def check(self, options: BuildOptions) -> None:
        search_params(options.search)

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Refuse a server that does not answer, or has a collection of the name that is not ours."""
        url, collection = options["qdrant_url"], options["qdrant_collection"]
        if not url:
            return
        client, errors = connect(Path(), url)
        try:
            exists = client.collection_exists(collection)
        except errors as error:
            problem = f"no answer ({reason(error)}); start the server"
            raise RetrieverError(f"--qdrant_url {url}: {problem}") from error
        finally:
            client.close()
        if exists and not _state_file(shards, options).is_file():
            problem = f"exists in {url}; choose another, or serve it"
            raise RetrieverError(f"--qdrant_collection {collection}: {problem}")

    def write(self, build: Build) -> dict[str, Any]:
        """Upload in parallel; a stopped upload continues with the shards that are missing."""
        options, embeddings = build.options, build.embeddings
        assert embeddings is not None
        url, collection = options["qdrant_url"], options["qdrant_collection"]
        client, errors = connect(build.folder, url)
        state = _state_file(embeddings.folder, options)
        workers = options["qdrant_parallel"] if "://" in url else 1  # no threads in the embedded mode
        try:
            done: list[int] = []  # shards that an earlier upload has finished
            if state.is_file() and client.collection_exists(collection):
                done = json.loads(state.read_text(encoding="utf-8"))
            else:
                settings = collection_settings(embeddings.encoder.dimension, options)
                client.create_collection(collection, **settings)
                _save_state(state, done)
            uploaded = min(len(done) * embeddings.shard_rows, embeddings.documents)
            with (
                progress_bar(embeddings.documents, "upload", build.progress, uploaded) as bar,
                ThreadPoolExecutor(workers) as pool,
            ):
                for number, shard in enumerate(embeddings.shards()):
                    if number not in done:
                        for uploaded in _upload(client, build, pool, shard, number):
                            bar.update(uploaded)
                        done.append(number)
                        _save_state(state, done)
        except errors as error:
            problem = f"upload into {collection!r} failed ({reason(error)}); give the same command again"
            raise RetrieverError(f"{url or build.folder}: {problem}") from error
        finally:
            client.close()
        state.unlink(missing_ok=True)
        return {"url": url, "collection": collection, "search": options.search}

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        manifest["search"] = options.settings.get("qdrant_search") or manifest.get("search", "")
        return QdrantVectors(folder, manifest["url"], manifest["collection"], manifest["search"])


def collection_settings(dimension: int, options: BuildOptions) -> dict[str, Any]:
    """Return the arguments of ``create_collection``."""
    from qdrant_client import models

    scalar = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
    quantization = {
        "": None,
        "int8": models.ScalarQuantization(scalar=scalar),
        "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
    }[options["qdrant_quantization"]]
    on_disk, distance = options["qdrant_on_disk"], models.Distance.DOT
    vectors = models.VectorParams(size=dimension, distance=distance, on_disk=on_disk)
    copies = {"shard_number": options["qdrant_shards"], "replication_factor": options["qdrant_replicas"]}
    storage = {"on_disk_payload": True, "quantization_config": quantization}
    return {"vectors_config": vectors, **copies, **storage}


def _upload(
    client: Any, build: Build, pool: ThreadPoolExecutor, shard: np.ndarray, number: int
) -> Iterator[int]:
    """Upload a shard and yield the number of points of each request."""
    from qdrant_client import models

    start = number * build.options.shard_rows

    def send(first: int) -> int:
        vectors = np.asarray(shard[first : first + BATCH], np.float32)
        ids = list(range(start + first, start + first + len(vectors)))
        points = models.Batch(ids=ids, vectors=vectors.tolist(), payloads=build.corpus[ids[0] : ids[-1] + 1])
        client.upsert(build.options["qdrant_collection"], points, wait=True)
        return len(vectors)

    return pool.map(send, range(0, len(shard), BATCH))  # an error cancels those that have not begun


def _state_file(shards: Path, options: BuildOptions) -> Path:
    place = f"{options['qdrant_url']} {options['qdrant_collection']}"
    return shards / f"qdrant-{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


def _save_state(state: Path, done: list[int]) -> None:
    with replacing(state) as partial:
        partial.write_text(json.dumps(done), encoding="utf-8")


class QdrantVectors:
    """A collection with one vector a point; `nearest` takes point ids as row numbers.

    `folder` is that of the embedded mode, if `url` names neither a server nor another folder. A key is read
    from QDRANT_API_KEY. Raises RetrieverError: no such server or collection, or one of another form.
    """

    def __init__(self, folder: Path, url: str, collection: str, search: str = ""):
        self._params, self._collection = search_params(search), collection
        self.client, self._errors = connect(folder, url)
        self.name = f"Qdrant at {url or folder}, collection {collection!r}"
        # The embedded mode is not made for threads.
        self._lock: AbstractContextManager[Any] = nullcontext() if "://" in url else threading.Lock()
        try:
            vectors = self.client.get_collection(collection).config.params.vectors
            self.documents = self.client.count(collection, exact=True).count
        except self._errors as error:
            raise RetrieverError(f"{self.name}: cannot be opened ({reason(error)})") from error
        if isinstance(vectors, dict):
            raise RetrieverError(f"{self.name}: has named vectors ({', '.join(vectors)}); name one without")
        if str(vectors.distance).rpartition(".")[2].lower() not in ("dot", "cosine"):
            raise RetrieverError(f"{self.name}: its distance is {vectors.distance}, not Dot or Cosine")
        self.dimension = int(vectors.size)

    def query(self, vectors: np.ndarray, k: int, with_payload: bool = False) -> list[list[Any]]:
        """Return the nearest points for float32 [Q, dimension]; raises Unavailable without an answer."""
        from qdrant_client import models

        options = {"limit": k, "params": self._params, "with_payload": with_payload}
        requests = [models.QueryRequest(query=vector.tolist(), **options) for vector in vectors]
        try:
            with self._lock:
                answers = self.client.query_batch_points(self._collection, requests)
        except self._errors as error:
            raise Unavailable(f"{self.name}: no answer ({reason(error)}); is the server up?") from error
        return [answer.points for answer in answers]

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Vectors`; raises Unavailable without an answer."""
        return search_in_corpus_order(lambda count: self._search(vectors, count), k, self.documents)

    def _search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        ids = np.full((len(vectors), k), -1, np.int64)
        for i, points in enumerate(self.query(vectors, k)):
            scores[i, : len(points)] = [point.score for point in points]
            ids[i, : len(points)] = [point.id for point in points]
        return scores, ids


def open_collection(options: argparse.Namespace) -> Collection:
    """Return the searcher of an existing collection, by the service's options."""
    encoder = (options.retriever_name, options.retriever_model)
    collection = (options.qdrant_url, options.qdrant_collection)
    return Collection(*collection, *encoder, options.qdrant_text, options.qdrant_search)


class Collection:
    """Searches a collection whose payloads are the rows. Any number of threads may call it.

    `name` and `model` are those of the encoder, `text` is the field of the payload with title and text.
    Raises RetrieverError: no such collection, no text in its payload, or vectors of another encoder.
    """

    def __init__(
        self, url: str, collection: str, name: str, model: str = "", text: str = "contents", search: str = ""
    ):
        if name in LEXICAL:
            raise RetrieverError(f"--retriever_name {name}: needs --index_path; or name e5, bge or dense")
        require("qdrant_client", ADVICE["qdrant_client"])
        vectors = self._vectors = QdrantVectors(Path(), url, collection, search)
        encoder = self._encoder = make_encoder(name, model, ())
        self._text = text
        check_dimension(vectors.name, vectors.dimension, encoder)
        points, _ = vectors.client.scroll(collection, limit=1, with_vectors=True, with_payload=True)
        if not points:
            raise RetrieverError(f"{vectors.name}: is empty; upload into it first")
        place, vector = f"{vectors.name}, point {points[0].id}", np.asarray(points[0].vector, np.float32)
        check_vector(place, vector, self._row(points[0]), encoder)
        self.manifest = {"kind": "qdrant", "documents": vectors.documents, "encoder": encoder.name}
        self.manifest |= {"model": encoder.model, "dimension": vectors.dimension, "url": url}
        self.manifest |= {"collection": collection} | ({"search": search} if search else {})

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
    from qdrant_client import models

    types = PARAMETERS | QUANTIZATION
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            values[name.strip()] = types[name.strip()](value.lower())
        except (KeyError, ValueError) as error:
            problem = f"search parameter {item!r}: expected NAME=VALUE of {', '.join(types)}"
            raise RetrieverError(problem) from error
    quantization = {name: values.pop(name) for name in QUANTIZATION if name in values}
    if quantization:
        values["quantization"] = models.QuantizationSearchParams(**quantization)
    return models.SearchParams(**values)


def connect(folder: Path, url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a client and the errors of its calls; raises RetrieverError if another process has it."""
    from qdrant_client import QdrantClient
    from qdrant_client.http.exceptions import ApiException

    if "://" in url:
        client = QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
        return client, (ApiException, ValueError)
    folder = Path(url) if url else folder
    try:
        return QdrantClient(path=str(folder)), (ValueError, KeyError)
    except RuntimeError as error:
        raise RetrieverError(f"{folder}: open in another process; stop it, or set --qdrant_url") from error
