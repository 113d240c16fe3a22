"""FAISS indexes on GPUs: whether they fit, and how they are spread over all devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError, reason
from retriever.indexes.faiss_files import map_flat, read_index

# FAISS types that are searched on a GPU, with their factory strings.
ON_GPU = {b"IxFI": "Flat", b"IwFl": "IVF…,Flat", b"IwPQ": "IVF…,PQ…", b"IwSq": "IVF…,SQ…"}
# Bytes of a device beside the index: FAISS's temporary memory, pages under conversion, scores, the encoder.
WORKSPACE = 5 * 2**29
# Bytes of a row beside its vector: its norm, and the previous array of norms while a page is added.
NORM_BYTES = 8
# Inverted lists are padded by this factor.
IVF_FACTOR = 1.1
# What to do with an index that is too large for the GPUs.
ADVICE = "take more GPUs, --kind jax, or factory IVF4096,PQ64"


def plan_shards(documents: int, dimension: int, free: list[int], name: str) -> list[range]:
    """Divide the rows of a flat index in fp16 among devices, in order and as evenly as possible.

    Args:
        documents: Number of rows.
        dimension: Number of elements D of each vector.
        free: Free bytes of each device.
        name: The index, for messages.

    Returns:
        The rows of each device.

    Raises:
        RetrieverError: A device has too little memory.
    """
    starts = [documents * i // len(free) for i in range(len(free) + 1)]
    shards = [range(start, stop) for start, stop in pairwise(starts)]
    for device, rows in enumerate(shards):
        need = len(rows) * (2 * dimension + NORM_BYTES) + WORKSPACE
        _require_device_memory(need, free, device, f"{name} in fp16")
    return shards


def require_ivf_memory(size: int, free: list[int], name: str) -> None:
    """Raise RetrieverError if an even part of inverted lists does not fit on a device.

    Args:
        size: Bytes of the file.
        free: Free bytes of each device.
        name: The index, for messages.
    """
    need = int(size * IVF_FACTOR) // len(free) + WORKSPACE
    smallest = free.index(min(free))
    _require_device_memory(need, free, smallest, name)


def _require_device_memory(need: int, free: list[int], device: int, name: str) -> None:
    if need > free[device]:
        raise RetrieverError(
            f"--faiss_gpu: {name} over {len(free)} GPU(s) needs {need / 2**30:,.1f} GiB on each, and GPU"
            f" {device} has {free[device] / 2**30:,.1f} GiB free; {ADVICE}"
        )


def fill_shards(
    faiss: Any, vectors: np.ndarray, shards: list[range], make_shard: Callable[[int], Any]
) -> tuple[Any, list[Any]]:
    """Make one index of an index for each device.

    Args:
        faiss: The module.
        vectors: float32 [documents, D], memory-mapped.
        shards: Rows of each device, as `plan_shards` returns them.
        make_shard: Returns an empty index on a device, by its number.

    Returns:
        The index of all rows, and the indexes of the devices, which must live as long.
    """
    shard_indexes = []
    for device, rows in enumerate(shards):
        shard_index = make_shard(device)
        shard_index.add(vectors[rows.start : rows.stop])
        shard_indexes.append(shard_index)
    if len(shard_indexes) == 1:
        return shard_indexes[0], shard_indexes
    dimension = vectors.shape[1]
    is_threaded = True  # each device is searched by its own thread
    has_successive_ids = True  # the row numbers of a shard follow those of the shard before it
    index = faiss.IndexShards(dimension, is_threaded, has_successive_ids)
    for shard_index in shard_indexes:
        index.add_shard(shard_index)
    return index, shard_indexes


def to_gpus(faiss: Any, kind: bytes, path: Path, mmap: bool) -> tuple[Any, list[Any]]:
    """Put the index of a file onto all GPUs that CUDA shows; a flat one is mapped, any other read.

    Args:
        faiss: The module.
        kind: FAISS's type of the index.
        path: The file.
        mmap: Map inverted lists too, while they are copied.

    Returns:
        The index, and objects that must live as long, because C++ does not own them.

    Raises:
        RetrieverError: There is no GPU, FAISS would leave the type on the CPU or copy it there, or the memory
            is too small.
    """
    if kind not in ON_GPU:
        raise RetrieverError(
            f"--faiss_gpu: {path} would stay on the CPU; build one of {', '.join(ON_GPU.values())}"
        )
    if not hasattr(faiss, "GpuIndexFlatIP") or faiss.get_num_gpus() == 0:
        raise RetrieverError("--faiss_gpu: FAISS has no GPU support or sees no GPU; pip install faiss-gpu")
    free = free_memory(faiss.get_num_gpus())
    try:
        if ON_GPU[kind] == "Flat":
            return _flat_to_gpus(faiss, path, free)
        require_ivf_memory(path.stat().st_size, free, str(path))
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        return faiss.index_cpu_to_all_gpus(read_index(faiss, path, mmap), co=options), []
    except RuntimeError as error:
        raise RetrieverError(f"--faiss_gpu: {path} cannot be put onto GPUs ({reason(error)})") from error


def _flat_to_gpus(faiss: Any, path: Path, free: list[int]) -> tuple[Any, list[Any]]:
    """Spread the vectors of a flat index over all GPUs in fp16."""
    matrix = map_flat(path)
    documents, dimension = matrix.shape
    shards = plan_shards(documents, dimension, free, str(path))
    resources = [faiss.StandardGpuResources() for _ in free]

    def make_shard(device: int) -> Any:
        config = faiss.GpuIndexFlatConfig()
        config.device = device
        config.useFloat16 = True
        return faiss.GpuIndexFlatIP(resources[device], dimension, config)

    index, shard_indexes = fill_shards(faiss, matrix, shards, make_shard)
    return index, [*shard_indexes, *resources]


def free_memory(devices: int) -> list[int]:
    """Return the free bytes of each device, in CUDA's order.

    Args:
        devices: Number of devices.

    Raises:
        RetrieverError: There is no working CUDA driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RetrieverError(f"--faiss_gpu: no CUDA driver ({error}); leave --faiss_gpu out") from error

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise RetrieverError(f"--faiss_gpu: {name} of the CUDA driver failed with {code}; see nvidia-smi")

    call("cuInit", 0)
    free_bytes = []
    for number in range(devices):
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxPushCurrent_v2", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        call("cuDevicePrimaryCtxRelease_v2", device)
        free_bytes.append(free.value)
    return free_bytes
