"""Builds a FAISS index of any factory string."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError, require
from retriever.indexing.embeddings import Embeddings
from retriever.indexing.progress import progress_bar
from retriever.search.backends.faiss import INSTALL, faiss_reason
from retriever.search.index_memory import require_disk, require_memory, vector_bytes

TRAINING = 262_144  # vectors at most


def make_empty(dimension: int, factory: str, search: str = "") -> Any:
    """An untrained index.

    Args:
        search: FAISS search parameters such as ``nprobe=32`` or ``efSearch=128``, which FAISS keeps in
            the file; empty for a quarter of the lists (128 at most), and efSearch 128.

    Raises:
        RetrieverError: not a factory string, or no such parameter.
    """
    faiss = require("faiss", INSTALL)
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrieverError(
            f"factory {factory!r} is not a FAISS factory string for dimension {dimension}; try Flat"
        ) from error
    if not search and (lists := re.search(r"IVF(\d+)", factory)):
        search = f"nprobe={max(1, min(128, int(lists[1]) // 4))}"
    elif not search and factory.startswith("HNSW"):
        search = "efSearch=128"
    try:
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)
    except RuntimeError as error:
        raise RetrieverError(
            f"--search {search!r}: not a parameter of {factory}; IVF has nprobe=, HNSW has efSearch="
        ) from error
    return index


def write_faiss(path: Path, embeddings: Embeddings, factory: str, search: str, progress: bool) -> None:
    """Trains, fills and writes an index; a flat one without holding it in memory.

    Raises:
        RetrieverError: as `make_empty`; too large for the memory or the disk; or too few passages to train
            on.
        OSError: the disk is full.
    """
    faiss = require("faiss", INSTALL)
    count, dimension = embeddings.documents, embeddings.encoder.dimension
    index = make_empty(dimension, factory, search)
    size = vector_bytes(count, dimension, factory)
    require_disk(path.parent, size, "the index needs", "choose a smaller --factory or another --index_path")
    with progress_bar(count, "index", progress) as bar:
        if factory == "Flat":
            with path.open("wb") as file:
                file.write(flat_header(faiss, index, count))
                for shard in embeddings.shards():
                    np.asarray(shard, np.float32).tofile(file)
                    bar.update(len(shard))
            return
        require_memory(size, f"factory {factory}", "use IVF…,PQ… or SQfp16")
        try:
            if not index.is_trained:
                index.train(embeddings.sample(TRAINING))
        except RuntimeError as error:
            raise RetrieverError(
                f"factory {factory}: cannot be trained on {count:,} passages ({faiss_reason(error)}); take"
                " fewer lists or Flat"
            ) from error
        for shard in embeddings.shards():
            index.add(np.asarray(shard, np.float32))
            bar.update(len(shard))
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, faiss_reason(error)) from error


def flat_header(faiss: Any, empty: Any, count: int) -> bytes:
    """That of an empty index with the counts filled in."""
    head = bytearray(faiss.serialize_index(empty).tobytes())
    struct.pack_into("<q", head, 8, count)
    struct.pack_into("<Q", head, len(head) - 8, count * empty.d)
    return bytes(head)
