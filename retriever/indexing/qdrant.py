"""Uploads vectors and rows to Qdrant, in parallel; an upload that was stopped goes on by shards."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from retriever.corpus.passages import Corpus
from retriever.errors import RetrieverError, reason, require
from retriever.files import replacing
from retriever.indexing.embeddings import Embeddings
from retriever.indexing.options import BuildOptions
from retriever.indexing.progress import progress_bar
from retriever.search.backends.qdrant import INSTALL, connect

BATCH = 256  # points of one request
AHEAD = 4  # requests a connection that may wait


def check_server(options: BuildOptions, shards: Path) -> None:
    """Before hours of encoding: the client is installed, the server answers, and the name is free or ours.

    Args:
        shards: folder of the vectors, which also says how far an upload has come.

    Raises:
        RetrieverError: one of these does not hold.
    """
    url, collection = options.qdrant_url, options.qdrant_collection
    if not url:
        require("qdrant_client", INSTALL)
        return
    client, errors = connect(Path(), url)
    try:
        taken = client.collection_exists(collection)
    except errors as error:
        raise RetrieverError(
            f"--qdrant_url {url}: no answer ({reason(error)}); start the server or correct the URL"
        ) from error
    finally:
        client.close()
    if taken and not _state_file(shards, options).is_file():
        raise RetrieverError(
            f"--qdrant_collection {collection}: {url} has one of this name; choose another or delete it, or"
            " serve it as it is: python -m retriever.serve --qdrant_url --qdrant_collection --retriever_name"
        )


def write_qdrant(
    folder: Path, corpus: Corpus, embeddings: Embeddings, options: BuildOptions, progress: bool
) -> None:
    """Makes a collection, and uploads every vector with its row as payload; call `check_server` first.

    Raises:
        RetrieverError: the server does not answer; the same command goes on with what is missing.
    """
    url, collection = options.qdrant_url, options.qdrant_collection
    client, errors = connect(folder, url)
    state = _state_file(embeddings.folder, options)
    # The embedded mode is plain Python and not made for threads.
    workers = options.qdrant_parallel if "://" in url else 1
    try:
        done = _begin(client, embeddings, options, state)
        uploaded = min(len(done) * embeddings.shard_rows, embeddings.documents)
        with (
            progress_bar(embeddings.documents, "upload", progress, uploaded) as bar,
            ThreadPoolExecutor(workers) as pool,
        ):
            for number, shard in enumerate(embeddings.shards()):
                if number in done:
                    continue
                start = number * embeddings.shard_rows
                _upload(client, collection, pool, AHEAD * workers, corpus, shard, start, bar)
                done.append(number)
                _keep(state, done)
    except errors as error:
        raise RetrieverError(
            f"Qdrant at {url or folder}: upload into {collection!r} failed ({reason(error)}); give the same"
            " command again: vectors and what was uploaded are kept"
        ) from error
    finally:
        client.close()
    state.unlink(missing_ok=True)


def settings_of_collection(dimension: int, options: BuildOptions) -> dict[str, Any]:
    """Arguments of ``create_collection``."""
    from qdrant_client import models

    quantization = {
        "": None,
        "int8": models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        ),
        "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
    }[options.qdrant_quantization]
    on_disk = options.qdrant_on_disk
    return {
        "vectors_config": models.VectorParams(size=dimension, distance=models.Distance.DOT, on_disk=on_disk),
        "on_disk_payload": True,
        "shard_number": options.qdrant_shards,
        "replication_factor": options.qdrant_replicas,
        "quantization_config": quantization,
    }


def _begin(client: Any, embeddings: Embeddings, options: BuildOptions, state: Path) -> list[int]:
    """The shards that an earlier upload has finished; makes the collection if there was none."""
    if state.is_file() and client.collection_exists(options.qdrant_collection):
        done: list[int] = json.loads(state.read_text(encoding="utf-8"))
        return done
    settings = settings_of_collection(embeddings.encoder.dimension, options)
    client.create_collection(options.qdrant_collection, **settings)
    _keep(state, [])
    return []


def _upload(
    client: Any,
    collection: str,
    pool: ThreadPoolExecutor,
    ahead: int,
    corpus: Corpus,
    shard: np.ndarray,
    start: int,
    bar: Any,
) -> None:
    """All points of a shard; raises what a request raises, when those under way have ended."""
    from qdrant_client import models

    def send(first: int) -> int:
        part = np.asarray(shard[first : first + BATCH], np.float32)
        ids = list(range(start + first, start + first + len(part)))
        points = models.Batch(ids=ids, vectors=part.tolist(), payloads=corpus[ids[0] : ids[-1] + 1])
        client.upsert(collection, points, wait=True)
        return len(part)

    under_way: set[Future[int]] = set()
    for first in range(0, len(shard), BATCH):
        if len(under_way) >= ahead:
            under_way = _count(under_way, bar)
        under_way.add(pool.submit(send, first))
    while under_way:
        under_way = _count(under_way, bar)


def _count(under_way: set[Future[int]], bar: Any) -> set[Future[int]]:
    """Waits for one of them at least; those that remain."""
    ended, remaining = wait(under_way, return_when=FIRST_COMPLETED)
    for one in ended:
        bar.update(one.result())
    return remaining


def _state_file(shards: Path, options: BuildOptions) -> Path:
    """Which shards have been uploaded to this collection."""
    place = hashlib.sha256(f"{options.qdrant_url} {options.qdrant_collection}".encode()).hexdigest()[:16]
    return shards / f"qdrant-{place}.json"


def _keep(state: Path, done: list[int]) -> None:
    with replacing(state) as partial:
        partial.write_text(json.dumps(done), encoding="utf-8")
