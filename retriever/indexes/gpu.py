"""FAISS on GPUs: a flat index as an fp16 shard on each device, filled from the memory map.

FAISS' own cloner holds a float32 matrix and two fp16 copies: 129 GB for 21 million vectors of 768, where the
index takes 32 GB. `GpuIndexFlat.add` on an empty index converts pages of 256 MB (faiss/gpu/GpuIndexFlat.cu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from retriever.errors import RetrieverError, reason

ON_GPU = {b"IxFI": "Flat", b"IwFl": "IVF…,Flat", b"IwPQ": "IVF…,PQ…", b"IwSq": "IVF…,SQ…"}
WORKSPACE = 5 * 2**29  # bytes a device: FAISS' temporary memory, pages under conversion, scores, the encoder
NORM_BYTES = 8  # a row: its norm, and the norms before while a page is added
IVF_FACTOR = 1.1  # inverted lists are padded
ADVICE = "take more GPUs, --kind jax, or factory IVF4096,PQ64"


def check_kind(kind: bytes, what: str) -> None:
    """Raise RetrieverError for an index that FAISS would leave on the CPU, or copy there."""
    if kind not in ON_GPU:
        raise RetrieverError(
            f"--faiss_gpu: {what} would stay on the CPU; build one of {', '.join(ON_GPU.values())}"
        )


def plan_shards(documents: int, dimension: int, free: list[int], what: str) -> list[range]:
    """Return the rows of each device for a flat index in fp16, in order and as even as can be.

    `free` are the bytes of each device. Raises RetrieverError: a part does not fit.
    """
    starts = [documents * i // len(free) for i in range(len(free) + 1)]
    shards = [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]
    for device, rows in enumerate(shards):
        need = len(rows) * (2 * dimension + NORM_BYTES) + WORKSPACE
        _require(need, free, device, f"{what} in fp16")
    return shards


def require_ivf_memory(size: int, free: list[int], what: str) -> None:
    """Raise RetrieverError if an even part of inverted lists of `size` bytes does not fit on a device."""
    need = int(size * IVF_FACTOR) // len(free) + WORKSPACE
    _require(need, free, free.index(min(free)), what)


def _require(need: int, free: list[int], device: int, what: str) -> None:
    if need > free[device]:
        raise RetrieverError(
            f"--faiss_gpu: {what} over {len(free)} GPU(s) needs {need / 2**30:,.1f} GiB on each, and GPU"
            f" {device} has {free[device] / 2**30:,.1f} GiB free; {ADVICE}"
        )


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


def to_gpus(
    faiss: Any, kind: bytes, path: Path, vectors: Callable[[], np.ndarray], load: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Put the index of a file onto all GPUs that CUDA shows.

    `vectors` maps a flat index; `load` reads any other into memory. Returns the index, and objects that must
    live as long: C++ does not own them. Raises RetrieverError: no GPU, a type that stays on the CPU, too
    little memory.
    """
    check_kind(kind, str(path))
    if not hasattr(faiss, "GpuIndexFlatIP") or faiss.get_num_gpus() == 0:
        raise RetrieverError("--faiss_gpu: FAISS has no GPU support or sees no GPU; pip install faiss-gpu")
    free = free_memory(faiss.get_num_gpus())
    try:
        if ON_GPU[kind] == "Flat":
            matrix = vectors()
            documents, dimension = matrix.shape
            shards = plan_shards(documents, dimension, free, str(path))
            resources = [faiss.StandardGpuResources() for _ in free]

            def make_shard(device: int) -> Any:
                config = faiss.GpuIndexFlatConfig()
                config.device, config.useFloat16 = device, True
                return faiss.GpuIndexFlatIP(resources[device], matrix.shape[1], config)

            index, parts = fill(faiss, matrix, shards, make_shard)
            return index, [*parts, *resources]
        require_ivf_memory(path.stat().st_size, free, str(path))
        options = faiss.GpuMultipleClonerOptions()
        options.shard, options.useFloat16 = True, True
        return faiss.index_cpu_to_all_gpus(load(), co=options), []
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
