"""Backends build and open indexes; the files, memory and locks of an index."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from retriever.backends import ADVICE, KINDS, BuildOptions, IndexOptions, find_kind, load_object
from retriever.corpus.passages import Corpus
from retriever.errors import RetrieverError, require
from retriever.interfaces import Encoder, Ranker, Vectors

MANIFEST = "manifest.json"
INDEX_FILE = "index.faiss"
BLOCK = 16 * 2**20  # bytes read at once for a checksum
AGAIN = "build it again with python -m retriever.build_index"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the entries of an index's manifest; raises RetrieverError if missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise RetrieverError(f"{folder}: no complete index; build it with python -m retriever.build_index")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_complete = manifest.keys() >= {"corpus_sha256", "documents", "encoder", "factory", "checksums"}
        is_known = manifest["kind"] in KINDS or ":" in manifest["kind"]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RetrieverError(f"{path}: damaged ({error}); {AGAIN}") from error
    if not (is_complete and is_known):
        raise RetrieverError(f"{path}: not a manifest of this version; {AGAIN}")
    return manifest


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the CRC-32 of files, by their names within the folder."""
    return {str(file.relative_to(folder)): _checksum(file) for file in sorted(files) if file.is_file()}


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise RetrieverError if a file is not the one that was built: FAISS takes random bytes for vectors."""
    for name, expected in manifest["checksums"].items():
        if _checksum(folder / name) != expected:
            raise RetrieverError(f"{folder / name}: damaged (its checksum is not the manifest's); {AGAIN}")


def _checksum(path: Path) -> str:
    value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    return f"{value:08x}"


MARGIN = 0.95  # of the available memory; the rest is for queries and the interpreter
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the free bytes of the machine, or of the container if that has fewer."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (match := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free = int(match[1]) * 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def available_cores() -> int:
    """Return the number of cores of the machine, or of the container if that has fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = CGROUP / "cpu.max"
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota.isdigit():
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def vector_bytes(documents: int, dimension: int, factory: str) -> int:
    """Return the bytes of a FAISS index in memory, within 1 % on disk; unknown storage counts as Flat."""
    per_vector = total = codes = 0
    for part in re.sub(r"\(.*?\)", "", factory).split(","):
        if match := re.fullmatch(r"(?:OPQ\d+_|PCA[RW]*)(\d+)", part):
            total += 4 * dimension * int(match[1])
            dimension = int(match[1])
        elif match := re.fullmatch(r"IVF(\d+)(_HNSW\d*)?", part):
            total += 4 * dimension * int(match[1])
            per_vector += 8  # its id
        elif match := re.fullmatch(r"HNSW(\d*)(?:_(\w+))?", part):
            per_vector += 4 * 2 * int(match[1] or 32) + 16  # links of the lowest layer and bookkeeping
            codes += _code_bytes(match[2], dimension) if match[2] else 0
        elif not re.fullmatch(r"OPQ\d+|L2norm|RFlat", part):
            codes += _code_bytes(part, dimension)
    return total + documents * (per_vector + (codes or 4 * dimension))


def _code_bytes(storage: str, dimension: int) -> int:
    if match := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(?:np|fs|fsr)?", storage):
        return -(-int(match[1]) * int(match[2] or 8) // 8)
    bits = {"SQ8": 8, "SQ6": 6, "SQ4": 4, "SQfp16": 16, "SQbf16": 16}.get(storage, 32)
    return -(-dimension * bits // 8)


def require_memory(need: int, name: str, alternatives: str, available: int | None = None) -> None:
    """Raise RetrieverError if `need` bytes do not fit the memory, with `alternatives` that need less."""
    free = available_memory() if available is None else available
    if need > MARGIN * free:
        sizes = f"{need / 2**30:,.1f} GiB of memory and {free / 2**30:,.1f} GiB are available"
        raise RetrieverError(f"{name}: needs {sizes}; {alternatives}")


def require_disk(folder: Path, need: int, purpose: str, alternatives: str) -> None:
    """Raise RetrieverError if `need` bytes are not free where the folder lies."""
    free = shutil.disk_usage(folder).free
    if need > free:
        problem = f"{purpose} {need:,} bytes and the disk has {free:,} free"
        raise RetrieverError(f"{folder}: {problem}; {alternatives}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``FOLDER.lock``, else raise RetrieverError; the system releases it however the process ends."""
    path = folder.with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:  # again where the owner of the file has just removed it
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                problem = f"{folder}: another process is building it; wait until it has ended"
                raise RetrieverError(problem) from error
            if path.is_file() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # while locked: a process that finds it must find it so
                return


LOG_SECONDS = 30.0  # between two lines of a log
LINE = "{desc}: {n_fmt} of {total_fmt} ({percentage:.1f} %), {rate_fmt}, {remaining} left"


def progress_bar(total: int, name: str, is_shown: bool = True, done: int = 0) -> Any:
    """Return a tqdm bar over passages: a bar on a terminal, a line now and then in a log.

    Passages `done` by earlier runs count neither for the rate nor for the time left.
    """
    options = {"desc": name, "unit": " passages", "total": total, "initial": done, "leave": False}
    if sys.stderr.isatty():
        return tqdm(disable=not is_shown, unit_scale=True, **options)
    stream = sys.stderr

    def write_line(text: str) -> None:
        if state := text.strip():
            stream.write(state + "\n")

    log = SimpleNamespace(write=write_line, flush=stream.flush)
    wait = {"delay": LOG_SECONDS, "mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS}
    return tqdm(disable=not is_shown, file=log, bar_format=LINE, **wait, **options)


@dataclass(frozen=True)
class Embeddings:
    """A corpus's vectors, in complete shards of [rows, dimension] each, in corpus order."""

    folder: Path
    encoder: Encoder
    documents: int
    shard_rows: int

    def shards(self) -> Iterator[np.ndarray]:
        """Yield float32 or float16 [shard_rows, dimension], the last shorter; memory-mapped."""
        for start in range(0, self.documents, self.shard_rows):
            yield np.load(shard_path(self.folder, start, self.shard_rows), mmap_mode="r")

    def sample(self, count: int) -> np.ndarray:
        """Return float32 [at most count, dimension], spread evenly over the corpus."""
        step = max(1, -(-self.documents // count))
        parts, start = [], 0
        for shard in self.shards():
            parts.append(np.asarray(shard[-start % step :: step], np.float32))
            start += len(shard)
        return np.concatenate(parts)


def shard_path(folder: Path, start: int, shard_rows: int) -> Path:
    return folder / f"shard-{start // shard_rows:05d}.npy"


@dataclass(frozen=True)
class Build:
    """The input of `Backend.write`."""

    folder: Path  # to write into
    corpus: Corpus
    options: BuildOptions
    embeddings: Embeddings | None  # None for a kind without vectors
    progress: bool  # whether to show it


class Backend:
    """Subclass it, and name it as an entry of KINDS or as ``--kind package.module:Class``."""

    def check(self, options: BuildOptions) -> None:
        """Raise RetrieverError for wrong values, before anything is read."""

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Raise RetrieverError for failures of `write` that can be foreseen; `shards`: folder of vectors."""

    def write(self, build: Build) -> dict[str, Any]:
        """Write the index and return its own entries of the manifest."""
        raise NotImplementedError

    def sizes(self, folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
        """Return (vectors, dimension) of the files without reading them whole; None: unknown until opened."""
        return None

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors | Ranker:
        """Open what `write` wrote; may change entries of the manifest that is served."""
        raise NotImplementedError


def load_backend(kind: str, building: bool = False) -> Backend:
    """Return the backend of a kind; raises RetrieverError without it or the package that it needs."""
    entry = find_kind(kind)
    if package := (entry.build_package if building else "") or entry.package:
        require(package, ADVICE.get(package, f"pip install {package}"))
    backend = load_object(entry.backend)
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise RetrieverError(f"--kind {kind}: not a subclass of retriever.indexes.backend.Backend")
    return backend()
