"""The FAISS backend: files that are read whole or memory-mapped, or put onto GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import BuildOptions, IndexOptions
from retriever.errors import RetrieverError
from retriever.indexes.backend import Backend, Build
from retriever.indexes.faiss_build import make_empty, write_faiss
from retriever.indexes.faiss_files import FLAT, INDEX_FILE, index_file, read_header, read_index
from retriever.indexes.faiss_gpu import to_gpus
from retriever.indexes.manifest import REBUILD
from retriever.indexes.ranking import search_in_corpus_order
from retriever.indexes.resources import available_cores
from retriever.interfaces import Vectors

# Bytes of a file from which a search of all vectors takes several threads.
LARGE = 2**28
# Queries from which one matrix product is faster than a pass over the vectors for each query.
PRODUCT_QUERIES = 4
# FAISS's first version whose limit of the matrix product counts elements of the queries.
COUNTS_ELEMENTS = (1, 15)


class FaissBackend(Backend):
    """A FAISS file."""

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Raise RetrieverError for an unknown factory or search parameter."""
        make_empty(dimension, options.factory, options.search)

    def write(self, build: Build) -> dict[str, Any]:
        """Write the file; the manifest gets its factory, search parameters and bytes."""
        assert build.embeddings is not None
        options = build.options
        path = build.folder / INDEX_FILE
        write_faiss(path, build.embeddings, options.factory, options.search, build.progress)
        entries: dict[str, Any] = {"factory": options.factory}
        if options.search:
            entries["search"] = options.search
        entries["bytes"] = path.stat().st_size
        return entries

    def sizes(self, folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
        """Return the sizes of the file's header; raise RetrieverError if the file was cut off.

        A truncated file may load by chance, and then crash a memory-mapped search.
        """
        path = folder / INDEX_FILE
        expected = manifest["bytes"]
        if path.is_file():
            size = path.stat().st_size
            if size != expected:
                raise RetrieverError(
                    f"{path}: has {size:,} bytes and its manifest says {expected:,}; {REBUILD}"
                )
        header = read_header(path)
        return header.documents, header.dimension

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        """Open the file of a folder, or a bare file."""
        return FaissVectors(index_file(folder), options.mmap, options.faiss_gpu, options.threads)


class FaissVectors:
    """Vectors of a FAISS file, ranked by inner product. Several threads may search at the same time.

    Args:
        path: The file.
        mmap: Read its parts from disk when they are needed, instead of into memory.
        gpu: Spread it over all GPUs.
        threads: Threads of one search of a large index that reads all vectors; 0 for all cores. Other
            searches have those of OMP_NUM_THREADS.

    Attributes:
        dimension: Number of elements D of each vector.
        documents: Number of vectors.

    Raises:
        RetrieverError: The index is too large for the memory, it was cut off, or there is no GPU for it.
    """

    def __init__(self, path: Path, mmap: bool = False, gpu: bool = False, threads: int = 0):
        import faiss

        header = read_header(path)
        self.dimension = header.dimension
        self.documents = header.documents
        set_product_threshold(faiss, self.dimension)
        self._faiss = faiss
        # Whether the scores of a search are computed once more, one by one.
        self._is_rescored = header.kind == FLAT and not gpu
        if gpu:
            # The objects on the devices must live as long as the index.
            self._index, self._device_objects = to_gpus(faiss, header.kind, path, mmap)
        else:
            self._index = read_index(faiss, path, mmap)
        # The thread of all searches of a large index; None: each caller searches in its own thread.
        self._search_thread: ThreadPoolExecutor | None = None
        # Flat, SQ and PQ read all vectors in each search; inverted lists and graphs do not.
        is_exhaustive = header.kind[:2] == b"Ix" and header.kind != b"IxPT"
        if not gpu and path.stat().st_size >= LARGE and is_exhaustive:
            # One search at a time reads the whole matrix with all threads: several would share the memory's
            # speed, and a single query would have one core. OpenMP keeps a pool for each caller.
            count = threads or available_cores()
            self._search_thread = ThreadPoolExecutor(1, "faiss", lambda: faiss.omp_set_num_threads(count))

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k], as `interfaces.Vectors` says.

        Args:
            vectors: float32 [Q, D].
            k: Number of rows for each query; a larger one than `documents` counts as `documents`.
        """
        queries = np.ascontiguousarray(vectors, np.float32)
        thread = self._search_thread

        def search(count: int) -> tuple[np.ndarray, np.ndarray]:
            if thread is None:
                return self._search(queries, count)
            return thread.submit(self._search, queries, count).result()

        return search_in_corpus_order(search, k, self.documents)

    def _search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, count] and row numbers int64 [Q, count], best first."""
        scores, ids = self._index.search(queries, count)
        if not self._is_rescored:
            return scores, ids
        # A matrix product rounds equal vectors differently, and a query differently in another batch.
        self._index.compute_distance_subset(
            len(queries),
            self._faiss.swig_ptr(queries),
            count,
            self._faiss.swig_ptr(scores),  # written in place
            self._faiss.swig_ptr(ids),
        )
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


def set_product_threshold(faiss: Any, dimension: int) -> None:
    """Make FAISS search all vectors by one matrix product from PRODUCT_QUERIES queries on.

    FAISS 1.15 does so from 128,000 / dimension queries; with fewer, a query takes up to 10 times as long
    (benchmarks/retrieval.md). Until 1.14 its limit was a number of queries (facebookresearch/faiss#5022).

    Args:
        faiss: The module.
        dimension: Number of elements D of each vector.
    """
    major, minor = faiss.__version__.split(".")[:2]
    counts_elements = (int(major), int(minor)) >= COUNTS_ELEMENTS
    elements = dimension if counts_elements else 1
    faiss.cvar.distance_compute_blas_threshold = PRODUCT_QUERIES * elements
