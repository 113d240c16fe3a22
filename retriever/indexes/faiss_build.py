"""Builds FAISS files: an index of a factory string is trained, filled and written."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError
from retriever.indexes.embeddings import Embeddings
from retriever.indexes.faiss_files import faiss_reason, flat_header
from retriever.indexes.progress import progress_bar
from retriever.indexes.resources import require_disk, require_memory

# Most vectors that train an index.
TRAINING = 262_144
# Bits of each element of a vector in a scalar quantizer.
SCALAR_BITS = {
    "SQ8": 8,
    "SQ6": 6,
    "SQ4": 4,
    "SQfp16": 16,
    "SQbf16": 16,
}


def vector_bytes(documents: int, dimension: int, factory: str) -> int:
    """Return the bytes of a FAISS index in memory; on disk it has as many within 1 %.

    Args:
        documents: Number of vectors.
        dimension: Number of elements D of each vector.
        factory: FAISS factory string; storage that is not known here counts as Flat.
    """
    shared = 0  # bytes that do not depend on the number of vectors
    overhead = 0  # bytes for each vector beside its code
    code = 0  # bytes of each vector's code
    for part in re.sub(r"\(.*?\)", "", factory).split(","):
        if match := re.fullmatch(r"(?:OPQ\d+_|PCA[RW]*)(\d+)", part):
            output_dimension = int(match[1])
            shared += 4 * dimension * output_dimension
            dimension = output_dimension
        elif match := re.fullmatch(r"IVF(\d+)(_HNSW\d*)?", part):
            shared += 4 * dimension * int(match[1])  # the centroids
            overhead += 8  # its id
        elif match := re.fullmatch(r"HNSW(\d*)(?:_(\w+))?", part):
            links = 2 * int(match[1] or 32)  # of the lowest layer
            overhead += 4 * links + 16  # and bookkeeping
            if match[2]:
                code += _code_bytes(match[2], dimension)
        elif not re.fullmatch(r"OPQ\d+|L2norm|RFlat", part):
            code += _code_bytes(part, dimension)
    flat_code = 4 * dimension
    return shared + documents * (overhead + (code or flat_code))


def _code_bytes(storage: str, dimension: int) -> int:
    """Return the bytes of a vector's code, rounded up."""
    if match := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(?:np|fs|fsr)?", storage):
        subquantizers = int(match[1])
        bits = int(match[2] or 8)
        return -(-subquantizers * bits // 8)
    bits = SCALAR_BITS.get(storage, 32)
    return -(-dimension * bits // 8)


def make_empty(dimension: int, factory: str, search: str = "") -> Any:
    """Return an untrained index for inner products.

    Args:
        dimension: Number of elements D of each vector.
        factory: FAISS factory string.
        search: Search parameters kept in the file, such as ``nprobe=32``. Empty: a quarter of the inverted
            lists, 128 at most; efSearch 128 for a graph.

    Returns:
        The empty index.

    Raises:
        RetrieverError: The factory or a search parameter is unknown to FAISS.
    """
    import faiss

    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrieverError(f"--factory {factory!r}: not a FAISS factory string; try Flat") from error
    search = search or _default_search(factory)
    try:
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RetrieverError(f"--search {search!r}: not a parameter of {factory}") from error
    return index


def _default_search(factory: str) -> str:
    if lists := re.search(r"IVF(\d+)", factory):
        quarter = int(lists[1]) // 4
        return f"nprobe={max(1, min(128, quarter))}"
    if factory.startswith("HNSW"):
        return "efSearch=128"
    return ""


def write_faiss(path: Path, embeddings: Embeddings, factory: str, search: str, progress: bool) -> None:
    """Train, fill and write an index; a flat one is streamed to disk.

    Args:
        path: The file to write.
        embeddings: The vectors.
        factory: FAISS factory string.
        search: Search parameters, as for `make_empty`.
        progress: Show a progress bar, or lines in a log.

    Raises:
        RetrieverError: As `make_empty`; the index is too large for memory or disk, or there are too few
            passages to train it.
        OSError: The file cannot be written.
    """
    import faiss

    count = embeddings.documents
    dimension = embeddings.encoder.dimension
    index = make_empty(dimension, factory, search)
    size = vector_bytes(count, dimension, factory)
    require_disk(path.parent, size, "the index needs", "choose a smaller --factory or another --index_path")
    with progress_bar(count, "index", progress) as bar:
        if factory == "Flat":
            _write_flat(path, flat_header(faiss, index, count), embeddings, bar)
            return
        require_memory(size, f"factory {factory}", "use IVF…,PQ… or SQfp16")
        try:
            if not index.is_trained:
                index.train(embeddings.sample(TRAINING))
        except RuntimeError as error:
            raise RetrieverError(
                f"--factory {factory}: cannot be trained on {count:,} passages; take fewer lists or Flat"
            ) from error
        for shard in embeddings.shards():
            index.add(np.asarray(shard, np.float32))
            bar.update(len(shard))
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, faiss_reason(error)) from error


def _write_flat(path: Path, header: bytes, embeddings: Embeddings, bar: Any) -> None:
    """Write a flat index shard by shard."""
    with path.open("wb") as file:
        file.write(header)
        for shard in embeddings.shards():
            np.asarray(shard, np.float32).tofile(file)
            bar.update(len(shard))
