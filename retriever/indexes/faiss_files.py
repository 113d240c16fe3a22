"""FAISS files: their headers, flat files as matrices, and whole files read with checks."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import REASON_LENGTH, RetrieverError
from retriever.indexes.manifest import REBUILD
from retriever.indexes.resources import require_memory

# Name of the FAISS file in the folder of an index.
INDEX_FILE = "index.faiss"
# FAISS type of a flat index with inner product.
FLAT = b"IxFI"
# Bytes of a flat file before its vectors.
FLAT_HEADER = 45
# First bytes of every file: type, dimension, documents, two unused numbers, whether it is trained, metric.
HEAD = struct.Struct("<4siqqqbi")
# FAISS's number of the inner product.
INNER_PRODUCT = 0
# What to do with an index that is too large for the memory.
SMALLER_INDEXES = (
    "serve it with --mmap, on GPUs in fp16 with --faiss_gpu, or build a smaller index:"
    " python -m retriever.build_index --factory IVF4096,PQ64 (or SQfp16, half the size)"
)


@dataclass(frozen=True)
class Header:
    """The first bytes of a file, read before anything is loaded.

    Attributes:
        kind: FAISS's type, four letters such as IxFI.
        dimension: Number of elements D of each vector.
        documents: Number of vectors.
    """

    kind: bytes
    dimension: int
    documents: int


def index_file(path: Path) -> Path:
    """Return the FAISS file of an index's folder, or `path` itself if it is a file."""
    return path if path.is_file() else path / INDEX_FILE


def read_header(path: Path) -> Header:
    """Read the header of a FAISS file.

    Args:
        path: The file.

    Returns:
        Its type and sizes.

    Raises:
        RetrieverError: There is no such file, it is not a FAISS file, its metric is not the inner product, or
            it is a flat index that was cut off.
    """
    if not path.is_file():
        raise RetrieverError(f"{path}: no such index; build it with python -m retriever.build_index")
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size or not re.fullmatch(rb"I[\x21-\x7e]{3}", head[:4]):
        raise RetrieverError(f"{path}: not a FAISS index; name the file that faiss.write_index wrote")
    kind, dimension, documents, _, _, _, metric = HEAD.unpack(head)
    if metric != INNER_PRODUCT:
        raise RetrieverError(
            f"{path}: its metric is FAISS number {metric}; build it with METRIC_INNER_PRODUCT"
        )
    size = path.stat().st_size
    flat_size = FLAT_HEADER + 4 * dimension * documents
    if kind == FLAT and size != flat_size:
        raise RetrieverError(
            f"{path}: has {size:,} bytes, but {documents:,} vectors of dimension {dimension} take"
            f" {flat_size:,}; it was cut off: download or build it again"
        )
    return Header(kind, dimension, documents)


def flat_header(faiss: Any, empty: Any, count: int) -> bytes:
    """Return the first bytes of a flat file.

    Args:
        faiss: The module.
        empty: An empty flat index.
        count: Number of vectors that follow.

    Returns:
        FLAT_HEADER bytes.
    """
    head = bytearray(faiss.serialize_index(empty).tobytes())
    struct.pack_into("<q", head, 8, count)  # number of vectors
    struct.pack_into("<Q", head, len(head) - 8, count * empty.d)  # number of float32 values
    return bytes(head)


def map_flat(path: Path) -> np.ndarray:
    """Memory-map the vectors of a flat index.

    Args:
        path: A FAISS file.

    Returns:
        float32 [documents, D], read-only.

    Raises:
        RetrieverError: As `read_header`, or the index is not flat.
    """
    header = read_header(path)
    if header.kind != FLAT:
        raise RetrieverError(f"{path}: FAISS type {header.kind.decode()}; --engine jax needs factory Flat")
    shape = (header.documents, header.dimension)
    return np.memmap(path, np.float32, mode="r", offset=FLAT_HEADER, shape=shape)


def read_index(faiss: Any, path: Path, mmap: bool) -> Any:
    """Read an index whole or map it, and check its ids.

    Args:
        faiss: The module.
        path: The file.
        mmap: Map it, instead of reading it into memory.

    Returns:
        The index.

    Raises:
        RetrieverError: It is too large for the memory, FAISS cannot read it, or its ids are not row numbers.
    """
    # A file may say that its inverted lists are in another one, at any path, which FAISS would open for
    # writing: a file of that name beside it is read instead.
    flag = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
    if mmap:
        # Inverted lists have one flag, and vectors, codes and links another. IxPT, a transform, stands before
        # inverted lists.
        kind = read_header(path).kind
        has_lists = kind[:2] == b"Iw" or kind == b"IxPT"
        flag |= faiss.IO_FLAG_MMAP if has_lists else faiss.IO_FLAG_MMAP_IFC
    else:
        require_memory(path.stat().st_size, str(path), SMALLER_INDEXES)
    try:
        index = faiss.read_index(str(path), flag)
    except RuntimeError as error:
        raise RetrieverError(f"{path}: FAISS cannot read it ({faiss_reason(error)}); {REBUILD}") from error
    if mmap:
        _refuse_other_file(faiss, index, path)
    _check_ids(faiss, index, path)
    return index


def _refuse_other_file(faiss: Any, index: Any, path: Path) -> None:
    """Refuse inverted lists in another file, which FAISS does not map with IO_FLAG_MMAP, and then crashes."""
    try:
        lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    except RuntimeError:  # it has no inverted lists
        return
    file = getattr(lists, "filename", "")
    if file and Path(file) != path:
        raise RetrieverError(
            f"{path}: its inverted lists are in another file, {Path(file).name}, which FAISS maps without"
            " --mmap; leave the option out"
        )


def _check_ids(faiss: Any, index: Any, path: Path) -> None:
    """Raise RetrieverError unless the kept ids are the row numbers 0 … n - 1, in any order."""
    index = faiss.downcast_index(index)
    is_used = np.zeros(index.ntotal, bool)
    count = 0
    example = ""
    for ids in _kept_ids(faiss, index):
        outside = ids[(ids < 0) | (ids >= len(is_used))].tolist()
        if outside:
            example = f"there is id {outside[0]}"
            break
        is_used[ids] = True
        count += len(ids)
    if not example and is_used.sum() != count:
        example = "some occur twice"
    if example:
        raise RetrieverError(
            f"{path}: its ids are not the row numbers 0 … {len(is_used) - 1} of the corpus ({example});"
            f" {REBUILD}"
        )
    # The index within an id map or a transform, the quantizer's index, and the base of a refinement.
    for name in ("index", "index_ivf", "base_index"):
        if hasattr(index, name):
            _check_ids(faiss, getattr(index, name), path)


def _kept_ids(faiss: Any, index: Any) -> Iterator[np.ndarray]:
    """Yield int64 [n]: the ids of an id map, or of each inverted list."""
    if hasattr(index, "id_map"):
        yield faiss.vector_to_array(index.id_map)
    lists: Any = getattr(index, "invlists", None)
    if not lists:
        return
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if size:
            ids = lists.get_ids(number)
            yield faiss.rev_swig_ptr(ids, size)
            lists.release_ids(number, ids)


def faiss_reason(error: RuntimeError) -> str:
    """Return FAISS's message without its source position."""
    message = re.sub(r"^Error in .*? at \S+: ", "", str(error).strip())
    return message.splitlines()[0][:REASON_LENGTH]
