"""FAISS files: built, read whole or memory-mapped, or put onto GPUs."""

from __future__ import annotations

import ctypes
import errno
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import BuildOptions, IndexOptions
from retriever.errors import REASON_LENGTH, RetrieverError, reason
from retriever.indexes.backend import (
    AGAIN,
    INDEX_FILE,
    Backend,
    Build,
    Embeddings,
    available_cores,
    progress_bar,
    require_disk,
    require_memory,
    vector_bytes,
)
from retriever.interfaces import Vectors

ON_GPU = {b"IxFI": "Flat", b"IwFl": "IVF…,Flat", b"IwPQ": "IVF…,PQ…", b"IwSq": "IVF…,SQ…"}
WORKSPACE = 5 * 2**29  # bytes a device: FAISS' temporary memory, pages under conversion, scores, the encoder
NORM_BYTES = 8  # a row: its norm, and the norms before while a page is added
IVF_FACTOR = 1.1  # inverted lists are padded
ADVICE = "take more GPUs, --kind jax, or factory IVF4096,PQ64"


def plan_shards(documents: int, dimension: int, free: list[int], name: str) -> list[range]:
    """Return the rows of each device for a flat index in fp16, in order and as even as can be.

    `free` are the bytes of each device. Raises RetrieverError: a part does not fit.
    """
    starts = [documents * i // len(free) for i in range(len(free) + 1)]
    shards = [range(start, stop) for start, stop in pairwise(starts)]
    for device, rows in enumerate(shards):
        need = len(rows) * (2 * dimension + NORM_BYTES) + WORKSPACE
        _require(need, free, device, f"{name} in fp16")
    return shards


def require_ivf_memory(size: int, free: list[int], name: str) -> None:
    """Raise RetrieverError if an even part of inverted lists of `size` bytes does not fit on a device."""
    need = int(size * IVF_FACTOR) // len(free) + WORKSPACE
    _require(need, free, free.index(min(free)), name)


def _require(need: int, free: list[int], device: int, name: str) -> None:
    if need > free[device]:
        problem = f"--faiss_gpu: {name} over {len(free)} GPU(s) needs {need / 2**30:,.1f} GiB on each"
        available = f"GPU {device} has {free[device] / 2**30:,.1f} GiB free"
        raise RetrieverError(f"{problem}, and {available}; {ADVICE}")


def fill(
    faiss: Any, vectors: np.ndarray, shards: list[range], make_shard: Callable[[int], Any]
) -> tuple[Any, list[Any]]:
    """Add each device's rows of float32 [documents, dimension], usually memory-mapped, in one call.

    `make_shard` returns an empty index on a device. Returns the index, and objects that must live as long.
    """
    parts = []
    for device, rows in enumerate(shards):
        part = make_shard(device)
        part.add(vectors[rows.start : rows.stop])
        parts.append(part)
    if len(parts) == 1:
        return parts[0], parts
    index = faiss.IndexShards(vectors.shape[1], True, True)  # threads; row numbers follow each other
    for part in parts:
        index.add_shard(part)
    return index, parts


def to_gpus(faiss: Any, kind: bytes, path: Path, mmap: bool) -> tuple[Any, list[Any]]:
    """Put the index of a file onto all GPUs that CUDA shows; a flat one is mapped, any other read.

    Returns the index, and objects that must live as long: C++ does not own them. Raises RetrieverError: no
    GPU, a type that FAISS would leave on the CPU or copy there, too little memory.
    """
    if kind not in ON_GPU:
        problem = f"--faiss_gpu: {path} would stay on the CPU"
        raise RetrieverError(f"{problem}; build one of {', '.join(ON_GPU.values())}")
    if not hasattr(faiss, "GpuIndexFlatIP") or faiss.get_num_gpus() == 0:
        raise RetrieverError("--faiss_gpu: FAISS has no GPU support or sees no GPU; pip install faiss-gpu")
    free = free_memory(faiss.get_num_gpus())
    try:
        if ON_GPU[kind] == "Flat":
            matrix = map_flat(path)
            documents, dimension = matrix.shape
            shards = plan_shards(documents, dimension, free, str(path))
            resources = [faiss.StandardGpuResources() for _ in free]

            def make_shard(device: int) -> Any:
                config = faiss.GpuIndexFlatConfig()
                config.device = device
                config.useFloat16 = True
                return faiss.GpuIndexFlatIP(resources[device], matrix.shape[1], config)

            index, parts = fill(faiss, matrix, shards, make_shard)
            return index, [*parts, *resources]
        require_ivf_memory(path.stat().st_size, free, str(path))
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        return faiss.index_cpu_to_all_gpus(_read(faiss, path, mmap), co=options), []
    except RuntimeError as error:
        raise RetrieverError(f"--faiss_gpu: {path} cannot be put onto GPUs ({reason(error)})") from error


def free_memory(devices: int) -> list[int]:
    """Return the free bytes of each device, in CUDA's order; RetrieverError without a working driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RetrieverError(f"--faiss_gpu: no CUDA driver ({error}); leave --faiss_gpu out") from error

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(driver, name)(*arguments):
            raise RetrieverError(f"--faiss_gpu: {name} of the CUDA driver failed with {code}; see nvidia-smi")

    call("cuInit", 0)
    free_bytes = []
    for number in range(devices):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxPushCurrent_v2", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        call("cuDevicePrimaryCtxRelease_v2", device)
        free_bytes.append(free.value)
    return free_bytes


EXTRA_ROWS = 16  # fetched beyond k at first
MAX_ROWS = 1024  # if more than this tie (an empty query), the first of those fetched are taken
TRAINING = 262_144  # vectors at most that train an index
FLAT, FLAT_HEADER = b"IxFI", 45  # inner product; bytes before the vectors
LARGE = 2**28  # bytes from which a search of all vectors takes several threads
PRODUCT_QUERIES = 4  # queries from which one matrix product is faster than a pass over the vectors a query
HEAD = struct.Struct("<4siqqqbi")  # type, dimension, documents, two unused, is trained, metric
SMALLER_INDEXES = (
    "serve it with --mmap, on GPUs in fp16 with --faiss_gpu, or build a smaller index:"
    " python -m retriever.build_index --factory IVF4096,PQ64 (or SQfp16, half the size)"
)


class FaissBackend(Backend):
    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        make_empty(dimension, options.factory, options.search)

    def write(self, build: Build) -> dict[str, Any]:
        assert build.embeddings is not None
        options, path = build.options, build.folder / INDEX_FILE
        write_faiss(path, build.embeddings, options.factory, options.search, build.progress)
        search = {"search": options.search} if options.search else {}
        return {"factory": options.factory} | search | {"bytes": path.stat().st_size}

    def sizes(self, folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
        path, size = folder / INDEX_FILE, manifest["bytes"]
        if path.is_file() and path.stat().st_size != size:
            # A truncated file may load by chance, and then crash a memory-mapped search.
            problem = f"has {path.stat().st_size:,} bytes and its manifest says {size:,}"
            raise RetrieverError(f"{path}: {problem}; {AGAIN}")
        header = read_header(path)
        return header.documents, header.dimension

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        return FaissVectors(index_file(folder), options.mmap, options.faiss_gpu, options.threads)


def index_file(path: Path) -> Path:
    """The file of an index's folder, or a bare file itself."""
    return path if path.is_file() else path / INDEX_FILE


def search_in_corpus_order(
    search: Callable[[int], tuple[np.ndarray, np.ndarray]], k: int, documents: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best, ties in corpus order: fetch until the tie for the k-th place has ended.

    `search` returns for a count scores float32 [Q, count] and row numbers int64 [Q, count], or -1. The result
    is [Q, k] of both, best first; -1 comes last.
    """
    k, fetch = min(k, documents), min(k + EXTRA_ROWS, documents)
    while True:
        scores, ids = search(fetch)
        scores = np.where(ids < 0, -np.inf, scores)
        is_cut = (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0)
        if fetch >= min(MAX_ROWS, documents) or not is_cut.any():
            break
        fetch = min(4 * fetch, MAX_ROWS, documents)
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


@dataclass(frozen=True)
class Header:
    """The first bytes of a file, read before anything is loaded."""

    kind: bytes
    dimension: int
    documents: int


def read_header(path: Path) -> Header:
    """Read the header of a FAISS file.

    Raises RetrieverError: not a FAISS file, another metric than inner product, or a flat index that was cut
    off.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such index; build it with python -m retriever.build_index")
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size or not re.fullmatch(rb"I[\x21-\x7e]{3}", head[:4]):
        raise RetrieverError(f"{path}: not a FAISS index; name the file that faiss.write_index wrote")
    kind, dimension, documents, _, _, _, metric = HEAD.unpack(head)
    if metric != 0:
        problem = f"{path}: its metric is FAISS number {metric}"
        raise RetrieverError(f"{problem}; build it with METRIC_INNER_PRODUCT")
    size, whole = path.stat().st_size, FLAT_HEADER + 4 * dimension * documents
    if kind == FLAT and size != whole:
        problem = f"{size:,} bytes, but {documents:,} vectors of dimension {dimension} take {whole:,}"
        raise RetrieverError(f"{path}: has {problem}; it was cut off: download or build it again")
    return Header(kind, dimension, documents)


def map_flat(path: Path) -> np.ndarray:
    """Memory-map the vectors of a flat index, float32 [documents, dimension]; raises RetrieverError."""
    header = read_header(path)
    if header.kind != FLAT:
        raise RetrieverError(f"{path}: FAISS type {header.kind.decode()}; --engine jax needs factory Flat")
    shape = (header.documents, header.dimension)
    return np.memmap(path, np.float32, mode="r", offset=FLAT_HEADER, shape=shape)


class FaissVectors:
    """Vectors of a FAISS file, ranked by inner product. Callers may search in several threads at once.

    `threads` are those of one search of a large exhaustive index, 0 for all cores; other searches have those
    of OMP_NUM_THREADS. Raises RetrieverError: too large for the memory, cut off, or no GPU for it.
    """

    def __init__(self, path: Path, mmap: bool = False, gpu: bool = False, threads: int = 0):
        import faiss

        header = read_header(path)
        self.dimension, self.documents = header.dimension, header.documents
        multiply_sooner(faiss, self.dimension)
        self._faiss = faiss
        self._rescored = header.kind == FLAT and not gpu
        if gpu:
            self._index, self._held = to_gpus(faiss, header.kind, path, mmap)
        else:
            self._index = _read(faiss, path, mmap)
        self._searcher: ThreadPoolExecutor | None = None
        # Flat, SQ and PQ read all vectors in each search; inverted lists and graphs do not.
        is_exhaustive = header.kind[:2] == b"Ix" and header.kind != b"IxPT"
        if not gpu and path.stat().st_size >= LARGE and is_exhaustive:
            # One search at a time reads the whole matrix with all threads: several would share the memory's
            # speed, and a single query would have one core. OpenMP keeps a pool for each caller.
            count = threads or available_cores()
            self._searcher = ThreadPoolExecutor(1, "faiss", lambda: faiss.omp_set_num_threads(count))

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Vectors`."""
        search = partial(self._search, np.ascontiguousarray(vectors, np.float32))
        if (searcher := self._searcher) is None:
            return search_in_corpus_order(search, k, self.documents)
        return search_in_corpus_order(lambda n: searcher.submit(search, n).result(), k, self.documents)

    def _search(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        scores, ids = self._index.search(vectors, count)
        if not self._rescored:
            return scores, ids
        # A matrix product rounds equal vectors differently, and a query differently in another batch.
        queries, best, rows = map(self._faiss.swig_ptr, (vectors, scores, ids))
        self._index.compute_distance_subset(len(vectors), queries, count, best, rows)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


def multiply_sooner(faiss: Any, dimension: int) -> None:
    """Make FAISS search all vectors by one matrix product from PRODUCT_QUERIES queries on.

    FAISS 1.15 does so from 128,000 / dimension queries; below, a query takes up to 10 times as long
    (benchmarks/retrieval.md). Until 1.14 its limit was a number of queries (facebookresearch/faiss#5022).
    """
    counts_queries = tuple(int(part) for part in faiss.__version__.split(".")[:2]) < (1, 15)
    faiss.cvar.distance_compute_blas_threshold = PRODUCT_QUERIES * (1 if counts_queries else dimension)


def _read(faiss: Any, path: Path, mmap: bool) -> Any:
    flag = 0
    if mmap:
        # Inverted lists have one flag, vectors, codes and links another; IxPT stands before inverted lists.
        kind = read_header(path).kind
        flag = faiss.IO_FLAG_MMAP if kind[:2] == b"Iw" or kind == b"IxPT" else faiss.IO_FLAG_MMAP_IFC
    else:
        require_memory(path.stat().st_size, str(path), SMALLER_INDEXES)
    try:
        index = faiss.read_index(str(path), flag)
    except RuntimeError as error:
        raise RetrieverError(f"{path}: FAISS cannot read it ({faiss_reason(error)}); {AGAIN}") from error
    _check_ids(faiss, index, path)
    return index


def _check_ids(faiss: Any, index: Any, path: Path) -> None:
    """Raise RetrieverError unless the kept ids are the row numbers 0 … n - 1, in any order."""
    index = faiss.downcast_index(index)
    is_used, count, example = np.zeros(index.ntotal, bool), 0, ""
    for ids in _kept_ids(faiss, index):
        if outside := ids[(ids < 0) | (ids >= len(is_used))].tolist():
            example = f"there is id {outside[0]}"
            break
        is_used[ids], count = True, count + len(ids)
    if not example and is_used.sum() != count:
        example = "some occur twice"
    if example:
        numbers = f"the row numbers 0 … {len(is_used) - 1} of the corpus"
        raise RetrieverError(f"{path}: its ids are not {numbers} ({example}); {AGAIN}")
    for name in ("index", "index_ivf", "base_index"):  # of an id map or transform, quantizer, refinement
        if hasattr(index, name):
            _check_ids(faiss, getattr(index, name), path)


def _kept_ids(faiss: Any, index: Any) -> Iterator[np.ndarray]:
    """Yield int64 [n] of an id map, or of each inverted list."""
    if hasattr(index, "id_map"):
        yield faiss.vector_to_array(index.id_map)
    lists: Any = getattr(index, "invlists", None)
    for number in range(lists.nlist if lists else 0):
        if size := lists.list_size(number):
            ids = lists.get_ids(number)
            yield faiss.rev_swig_ptr(ids, size)
            lists.release_ids(number, ids)


def faiss_reason(error: RuntimeError) -> str:
    """FAISS's message without its source position."""
    return re.sub(r"^Error in .*? at \S+: ", "", str(error).strip()).splitlines()[0][:REASON_LENGTH]


def make_empty(dimension: int, factory: str, search: str = "") -> Any:
    """Return an untrained index; raises RetrieverError for an unknown factory or search parameter.

    `search`, such as ``nprobe=32``, is kept in the file; empty: a quarter of the lists (128 at most),
    efSearch 128.
    """
    import faiss

    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrieverError(f"--factory {factory!r}: not a FAISS factory string; try Flat") from error
    if not search and (lists := re.search(r"IVF(\d+)", factory)):
        search = f"nprobe={max(1, min(128, int(lists[1]) // 4))}"
    elif not search and factory.startswith("HNSW"):
        search = "efSearch=128"
    try:
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RetrieverError(f"--search {search!r}: not a parameter of {factory}") from error
    return index


def write_faiss(path: Path, embeddings: Embeddings, factory: str, search: str, progress: bool) -> None:
    """Train, fill and write an index; a flat one is streamed to disk. Raises OSError on a full disk.

    Raises RetrieverError: as `make_empty`; too large for memory or disk; or too few passages to train on.
    """
    import faiss

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
            problem = f"--factory {factory}: cannot be trained on {count:,} passages"
            raise RetrieverError(f"{problem}; take fewer lists or Flat") from error
        for shard in embeddings.shards():
            index.add(np.asarray(shard, np.float32))
            bar.update(len(shard))
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, faiss_reason(error)) from error


def flat_header(faiss: Any, empty: Any, count: int) -> bytes:
    """Return the header of an empty index with its counts replaced."""
    head = bytearray(faiss.serialize_index(empty).tobytes())
    struct.pack_into("<q", head, 8, count)
    struct.pack_into("<Q", head, len(head) - 8, count * empty.d)
    return bytes(head)
