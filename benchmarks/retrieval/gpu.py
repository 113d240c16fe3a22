"""A flat index on GPUs: filled from the memory map, beside FAISS' own cloner and the search in JAX.

    python -m benchmarks.retrieval.gpu --folder F [--rows 5000000] [--dimension 768] [--json FILE]

Random vectors in a flat FAISS file (kept in F, `rows` x `dimension` x 4 bytes). Each engine in a process of
its own: seconds to fill, peak memory of the first GPU (nvidia-smi, every 0.1 s), queries/s at several batch
sizes, and recall@10 on a sample against the exact search of the CPU. An engine that cannot be had prints its
error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retriever.errors import RetrieverError
from retriever.indexes.faiss import FaissVectors
from retriever.indexes.faiss_files import flat_header, map_flat
from retriever.indexes.jax import JaxVectors

ENGINES = ("shards", "cloner", "jax")
BATCHES = (1, 64, 2560)
SAMPLE, K = 64, 10
BLOCK = 2**18  # rows written at once


def write_vectors(path: Path, rows: int, dimension: int) -> None:
    """Write random vectors of length 1 as a flat FAISS file."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(flat_header(faiss, faiss.IndexFlatIP(dimension), rows))
        for start in range(0, rows, BLOCK):
            block = rng.standard_normal((min(BLOCK, rows - start), dimension), dtype=np.float32)
            block /= np.linalg.norm(block, axis=1, keepdims=True)
            block.tofile(file)


def queries_of(path: Path, count: int) -> np.ndarray:
    """Return float32 [count, dimension]: rows with some noise."""
    vectors = map_flat(path)
    rng = np.random.default_rng(1)
    rows = np.sort(rng.integers(0, len(vectors), count))
    return vectors[rows] + 0.03 * rng.standard_normal((count, vectors.shape[1]), dtype=np.float32)


class Cloner:
    """FAISS' own way: the whole index read and copied."""

    def __init__(self, path: Path):
        options = faiss.GpuMultipleClonerOptions()
        options.shard = options.useFloat16 = True
        self._index = faiss.index_cpu_to_all_gpus(faiss.read_index(str(path)), co=options)

    def nearest(self, vectors: np.ndarray, k: int) -> Any:
        return self._index.search(vectors, k)


def gpu_megabytes() -> int:
    """Return the megabytes in use on the first GPU; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


def run_engine(engine: str, path: Path) -> dict[str, Any]:
    peak, ended = [gpu_megabytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak.append(gpu_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        begun = time.monotonic()
        if engine == "shards":
            index: Any = FaissVectors(path, gpu=True)
        else:
            index = Cloner(path) if engine == "cloner" else JaxVectors(map_flat(path), str(path))
        row: dict[str, Any] = {"fill s": round(time.monotonic() - begun, 1)}
        for size in BATCHES:
            queries = queries_of(path, size)
            index.nearest(queries, K)  # compiles
            begun, done = time.monotonic(), 0
            while time.monotonic() - begun < 5:
                index.nearest(queries, K)
                done += size
            row[f"queries/s at {size}"] = round(done / (time.monotonic() - begun), 1)
        _, nearest = index.nearest(queries_of(path, SAMPLE), K)
        row["recall"] = recall(path, np.asarray(nearest))
        return row | {"peak MB": max(peak) - peak[0]}
    except (RetrieverError, RuntimeError, AttributeError) as error:
        return {"error": str(error).strip().splitlines()[0][:200]}
    finally:
        ended.set()
        watcher.join()


def recall(path: Path, nearest: np.ndarray) -> float:
    """Return the share of the CPU's K best that were found."""
    _, expected = FaissVectors(path, mmap=True).nearest(queries_of(path, SAMPLE), K)
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(nearest, expected, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.folder / f"flat-{arguments.rows}-{arguments.dimension}.faiss"
    if arguments.engine:
        sys.stdout.write(json.dumps(run_engine(arguments.engine, path)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_vectors(path, arguments.rows, arguments.dimension)
    table = {}
    for engine in ENGINES:
        command = [sys.executable, "-m", "benchmarks.retrieval.gpu", "--folder", str(arguments.folder)]
        command += [
            "--rows",
            str(arguments.rows),
            "--dimension",
            str(arguments.dimension),
            "--engine",
            engine,
        ]
        finished = subprocess.run(command, capture_output=True, text=True)
        last = (finished.stderr.strip().splitlines() or [""])[-1]
        table[engine] = json.loads(finished.stdout) if finished.returncode == 0 else {"error": last[:200]}
        sys.stdout.write(f"{engine:>7}  {table[engine]}\n")
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
