"""Bytes that an index needs, and a refusal before loading what will not fit."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from retriever.errors import RetrieverError

MARGIN = 0.95  # of the available memory; the rest is for queries and the interpreter
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be taken without swapping: of the machine, or of the container if that is less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        free = int(found[1]) * 1024 if found else free
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def available_cores() -> int:
    """Of the machine, or of the container if that has fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = CGROUP / "cpu.max"
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota.isdigit():
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def vector_bytes(documents: int, dimension: int, factory: str) -> int:
    """Bytes of a FAISS index of this factory string in memory, and within 1 % on disk.

    A storage this table does not know counts as Flat, which is the largest.
    """
    per_vector = total = 0
    stored = False
    for part in re.sub(r"\(.*?\)", "", factory).split(","):
        if found := re.fullmatch(r"(?:OPQ\d+_|PCA[RW]*)(\d+)", part):
            total += 4 * dimension * int(found[1])
            dimension = int(found[1])
        elif found := re.fullmatch(r"IVF(\d+)(_HNSW\d*)?", part):
            total += 4 * dimension * int(found[1])
            per_vector += 8  # its id
        elif found := re.fullmatch(r"HNSW(\d*)(?:_(\w+))?", part):
            per_vector += 4 * 2 * int(found[1] or 32) + 16  # links of the lowest layer and bookkeeping
            if found[2]:
                per_vector += _code_bytes(found[2], dimension)
                stored = True
        elif not re.fullmatch(r"OPQ\d+|L2norm|RFlat", part):
            per_vector += _code_bytes(part, dimension)
            stored = True
    return total + documents * (per_vector + (0 if stored else 4 * dimension))


def _code_bytes(storage: str, dimension: int) -> int:
    if found := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(?:np|fs|fsr)?", storage):
        return -(-int(found[1]) * int(found[2] or 8) // 8)
    bits = {"SQ8": 8, "SQ6": 6, "SQ4": 4, "SQfp16": 16, "SQbf16": 16}.get(storage, 32)
    return -(-dimension * bits // 8)


def bm25_bytes(documents: int, words: int) -> int:
    """Peak of building: word ids as Python lists, then three arrays of the distinct words and their sort."""
    return 8 * words + 40 * (words * 2 // 3) + 64 * documents


def require_memory(need: int, what: str, alternatives: str, available: int | None = None) -> None:
    """Call before loading or building.

    Args:
        alternatives: what takes less; the end of the message.

    Raises:
        RetrieverError: `need` bytes are not there, with both numbers.
    """
    free = available_memory() if available is None else available
    if need > MARGIN * free:
        raise RetrieverError(
            f"{what}: needs {need / 2**30:,.1f} GiB of memory and {free / 2**30:,.1f} GiB are available;"
            f" {alternatives}"
        )


def require_disk(folder: Path, need: int, what: str, alternatives: str) -> None:
    """Call before hours of work, not after.

    Raises:
        RetrieverError: `need` bytes are not free where the folder lies, with both numbers.
    """
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RetrieverError(
            f"{folder}: {what} {need:,} bytes and the disk has {free:,} free; {alternatives}"
        )
