"""Memory, cores and disk of this machine, or of its container, and whether an index fits them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from retriever.errors import RetrieverError

# Share of the available memory that an index may take; the rest is for queries and the interpreter.
MARGIN = 0.95
# Limits of the container.
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Return the free bytes of the machine, or of the container if it has fewer."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMINFO.is_file() and (match := re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())):
        free = int(match[1]) * 1024
    limit = CGROUP / "memory.max"
    used = CGROUP / "memory.current"
    if limit.is_file() and used.is_file():
        limit_text = limit.read_text().strip()
        if limit_text.isdigit():  # "max" without a limit
            free = min(free, int(limit_text) - int(used.read_text()))
    return max(0, free)


def available_cores() -> int:
    """Return the number of cores of the machine, or of the container if it has fewer."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = CGROUP / "cpu.max"
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota.isdigit():  # "max" without a limit
            cores = min(cores, -(-int(quota) // int(period)))  # rounded up
    return max(1, cores)


def require_memory(need: int, name: str, alternatives: str, available: int | None = None) -> None:
    """Raise RetrieverError if an index does not fit the memory.

    Args:
        need: Bytes that it takes.
        name: The index, for the message.
        alternatives: What needs less memory, for the message.
        available: Free bytes; None for those of this machine.
    """
    free = available_memory() if available is None else available
    if need > MARGIN * free:
        raise RetrieverError(
            f"{name}: needs {need / 2**30:,.1f} GiB of memory and {free / 2**30:,.1f} GiB are available;"
            f" {alternatives}"
        )


def require_disk(folder: Path, need: int, purpose: str, alternatives: str) -> None:
    """Raise RetrieverError if there is not enough room on a disk.

    Args:
        folder: An existing folder on the disk.
        need: Bytes to be written.
        purpose: What needs them, with its verb, such as "the index needs", for the message.
        alternatives: What needs less room, for the message.
    """
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RetrieverError(
            f"{folder}: {purpose} {need:,} bytes and the disk has {free:,} free; {alternatives}"
        )
