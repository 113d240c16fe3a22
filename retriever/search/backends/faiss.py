"""FAISS files, read whole or memory-mapped, or as shards on GPUs in fp16; `indexing.faiss` writes them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import REASON_LENGTH, RetrieverError, require
from retriever.search.backends.gpu import to_gpus
from retriever.search.index_memory import available_cores, require_memory
from retriever.search.ties import search_in_corpus_order

FLAT, FLAT_HEADER = b"IxFI", 45  # inner product; bytes before the vectors
LARGE = 2**28  # bytes from which a search of all vectors takes several threads
MULTIPLIED = 4  # queries from which one matrix product is faster than a pass over the vectors a query
HEAD = struct.Struct("<4siqqqbi")  # type, dimension, documents, two unused, is trained, metric
INSTALL = "pip install faiss-cpu (or faiss-gpu on CUDA)"
LESS = (
    "serve it with --mmap, on GPUs in fp16 with --faiss_gpu, or build a smaller index:"
    " python -m retriever.build_index --factory IVF4096,PQ64 (or SQfp16, half the size)"
)


@dataclass(frozen=True)
class Header:
    """What the first bytes of a file say, read before anything is loaded."""

    kind: bytes
    dimension: int
    documents: int


def read_header(path: Path) -> Header:
    """The header of a FAISS file.

    Raises:
        RetrieverError: no such file, not one of FAISS's, a metric other than inner product, or a flat
            index whose size is not what its header says.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such index; build it with python -m retriever.build_index")
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size or not re.fullmatch(rb"I[\x21-\x7e]{3}", head[:4]):
        raise RetrieverError(f"{path}: not a FAISS index; name the file that faiss.write_index wrote")
    kind, dimension, documents, _, _, _, metric = HEAD.unpack(head)
    if metric != 0:
        raise RetrieverError(
            f"{path}: its metric is FAISS number {metric}, not inner product (0); build it again with"
            " faiss.METRIC_INNER_PRODUCT"
        )
    size, whole = path.stat().st_size, FLAT_HEADER + 4 * dimension * documents
    if kind == FLAT and size != whole:
        raise RetrieverError(
            f"{path}: has {size:,} bytes, but {documents:,} vectors of dimension {dimension} take"
            f" {whole:,}; it was cut off: download or build it again"
        )
    return Header(kind, dimension, documents)


def map_flat(path: Path) -> np.ndarray:
    """float32 [documents, dimension]: the vectors of a flat index, memory-mapped.

    Raises:
        RetrieverError: as `read_header`, or the index is of another type.
    """
    header = read_header(path)
    if header.kind != FLAT:
        raise RetrieverError(
            f"{path}: is of FAISS type {header.kind.decode()}; --engine jax needs factory Flat"
        )
    shape = (header.documents, header.dimension)
    return np.memmap(path, np.float32, mode="r", offset=FLAT_HEADER, shape=shape)


class FaissVectors:
    """Vectors of a FAISS file, ranked by inner product."""

    def __init__(self, path: Path, mmap: bool = False, gpu: bool = False, threads: int = 0):
        """Reads the file.

        Args:
            threads: that one search of a large exhaustive index takes, 0 for all cores; other searches take
                those of OMP_NUM_THREADS, and callers may search in several threads at once.

        Raises:
            RetrieverError: as `read_header`; too large for the memory; cut off; or no GPU for it.
        """
        faiss = require("faiss", INSTALL)
        header = read_header(path)
        self.dimension, self.documents = header.dimension, header.documents
        multiply_sooner(faiss, self.dimension)
        self._faiss = faiss
        self._rescored = header.kind == FLAT and not gpu
        if gpu:
            self._index, self._held = to_gpus(
                faiss, header.kind, path, lambda: map_flat(path), lambda: _read(faiss, path, mmap)
            )
        else:
            self._index = _read(faiss, path, mmap)
        self._searcher: ThreadPoolExecutor | None = None
        if not gpu and path.stat().st_size >= LARGE and _is_exhaustive(header):
            # One search at a time reads the whole matrix with all threads: several would only share the
            # memory's speed, and a single query would wait for one core. OpenMP keeps a pool a caller.
            count = threads or available_cores()
            self._searcher = ThreadPoolExecutor(1, "faiss", lambda: faiss.omp_set_num_threads(count))

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> float32 [Q, k] and int64 [Q, k], -1 if an approximate index found no more;
        best first, ties in corpus order."""
        vectors = np.ascontiguousarray(vectors, np.float32)
        if self._searcher is None:
            return search_in_corpus_order(partial(self._search, vectors), k, self.documents)
        submit = self._searcher.submit
        return search_in_corpus_order(
            lambda count: submit(self._search, vectors, count).result(), k, self.documents
        )

    def _search(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [Q, count] and rows int64 [Q, count], best first."""
        scores, ids = self._index.search(vectors, count)
        if not self._rescored:
            return scores, ids
        # A matrix product rounds equal vectors differently, and a query differently in another batch.
        queries, found, rows = map(self._faiss.swig_ptr, (vectors, scores, ids))
        self._index.compute_distance_subset(len(vectors), queries, count, found, rows)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


def multiply_sooner(faiss: Any, dimension: int) -> None:
    """Lets this process search all vectors for MULTIPLIED queries or more by one matrix product.

    FAISS 1.15 does so from 128,000 / dimension queries, which suits many threads and small vectors. Below
    it reads the whole matrix once a query: up to 10 times the time (benchmarks/retrieval.md). Until 1.14 its
    limit was a number of queries (facebookresearch/faiss#5022).
    """
    counts_queries = tuple(int(part) for part in faiss.__version__.split(".")[:2]) < (1, 15)
    faiss.cvar.distance_compute_blas_threshold = MULTIPLIED * (1 if counts_queries else dimension)


def _is_exhaustive(header: Header) -> bool:
    """Whether each search reads all vectors: Flat, SQ and PQ do, inverted lists and graphs do not."""
    return header.kind[:2] == b"Ix" and header.kind != b"IxPT"


def _map_flag(faiss: Any, kind: bytes) -> int:
    """Inverted lists are mapped by one flag, vectors, codes and links by another; together they fail.

    A transform (IxPT) stands before inverted lists in practice (OPQ…,IVF…,PQ…).
    """
    return int(faiss.IO_FLAG_MMAP if kind[:2] == b"Iw" or kind == b"IxPT" else faiss.IO_FLAG_MMAP_IFC)


def _read(faiss: Any, path: Path, mmap: bool) -> Any:
    if not mmap:
        require_memory(path.stat().st_size, str(path), LESS)
    try:
        index = faiss.read_index(str(path), _map_flag(faiss, read_header(path).kind) if mmap else 0)
    except RuntimeError as error:
        raise RetrieverError(
            f"{path}: FAISS cannot read it ({faiss_reason(error)}); it was cut off or comes from a newer"
            " FAISS: download or build it again, or upgrade FAISS"
        ) from error
    _check_ids(faiss, index, path)
    return index


def _check_ids(faiss: Any, index: Any, path: Path) -> None:
    """Raise RetrieverError unless the ids that an index keeps are row numbers 0 … n - 1, in any order.

    Of a file of codes it reads the 8 bytes of each id only. An index in a wrapper is checked too.
    """
    index = faiss.downcast_index(index)
    seen, count = np.zeros(index.ntotal, bool), 0
    for ids in _kept_ids(faiss, index):
        if outside := ids[(ids < 0) | (ids >= len(seen))].tolist():
            break
        seen[ids], count = True, count + len(ids)
    else:
        outside = []
    if outside or seen.sum() != count:
        example = f"there is id {outside[0]}" if outside else "some occur twice"
        raise RetrieverError(
            f"{path}: its ids are not the row numbers 0 … {len(seen) - 1} of the corpus ({example}); add the"
            " vectors with index.add, in the order of the corpus, or build it with python -m"
            " retriever.build_index"
        )
    for name in (
        "index",
        "index_ivf",
        "base_index",
    ):  # of an id map or a transform, a quantizer, a refinement
        if hasattr(index, name):
            _check_ids(faiss, getattr(index, name), path)


def _kept_ids(faiss: Any, index: Any) -> Iterator[np.ndarray]:
    """Yield int64 [n] of an id map, or of each inverted list; nothing where ids follow from the order."""
    if hasattr(index, "id_map"):
        yield faiss.vector_to_array(index.id_map)
    lists: Any = getattr(index, "invlists", None)
    for number in range(lists.nlist if lists else 0):
        if size := lists.list_size(number):
            ids = lists.get_ids(number)
            yield faiss.rev_swig_ptr(ids, size)
            lists.release_ids(number, ids)


def faiss_reason(error: RuntimeError) -> str:
    """The sentence in FAISS's message, without its source position."""
    return re.sub(r"^Error in .*? at \S+: ", "", str(error).strip()).splitlines()[0][:REASON_LENGTH]
