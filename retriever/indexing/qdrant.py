"""Uploads vectors to Qdrant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from retriever.errors import RetrieverError, reason, require
from retriever.indexing.embeddings import Embeddings
from retriever.search.qdrant import INSTALL, connect

BATCH = 256


def check_server(url: str, collection: str) -> None:
    """Before hours of encoding: the client is installed, the server answers and the name is free.

    Raises:
        RetrieverError: one of these does not hold.
    """
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
    if taken:
        raise RetrieverError(
            f"--qdrant_collection {collection}: {url} has one of this name; choose another or delete it"
        )


def write_qdrant(folder: Path, url: str, collection: str, embeddings: Embeddings, progress: bool) -> None:
    """Makes a collection and uploads all vectors; call `check_server` first.

    Raises:
        RetrieverError: the server does not answer.
    """
    client, errors = connect(folder, url)
    from qdrant_client import models

    silent = None if progress else True
    try:
        size = models.VectorParams(size=embeddings.encoder.dimension, distance=models.Distance.DOT)
        client.create_collection(collection, vectors_config=size)
        start = 0
        with tqdm(
            total=embeddings.documents, desc="upload", unit="passage", disable=silent, leave=False
        ) as bar:
            for shard in embeddings.shards():
                for first in range(0, len(shard), BATCH):
                    part = np.asarray(shard[first : first + BATCH], np.float32)
                    ids = range(start + first, start + first + len(part))
                    client.upsert(collection, models.Batch(ids=list(ids), vectors=part.tolist()), wait=True)
                    bar.update(len(part))
                start += len(shard)
    except errors as error:
        raise RetrieverError(
            f"Qdrant at {url or folder}: upload into {collection!r} failed ({reason(error)}); delete the"
            " collection and start again: the vectors are kept"
        ) from error
    finally:
        client.close()
