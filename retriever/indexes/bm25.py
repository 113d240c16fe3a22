"""BM25 over words (Lucene's form), through bm25s."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import IndexOptions
from retriever.encoders.hashed import K1, B
from retriever.encoders.tokenizer import tokenize
from retriever.errors import RetrieverError, require
from retriever.indexes.backend import Backend, Build, progress_bar, require_memory
from retriever.interfaces import Ranker

FOLDER = "bm25"
SAMPLE = 1000  # passages whose words are counted to estimate the memory


class Bm25Backend(Backend):
    """A sparse index of the words of all passages."""

    def __init__(self) -> None:
        self._library = _library()

    def write(self, build: Build) -> dict[str, Any]:
        corpus = build.corpus
        sample = corpus[:: max(1, len(corpus) // SAMPLE)]
        count = len(corpus) * sum(len(tokenize(row["contents"])) for row in sample) // len(sample)
        # The peak: word ids as lists, then three arrays of distinct words and their sort.
        peak = 8 * count + 40 * (count * 2 // 3) + 64 * len(corpus)
        require_memory(peak, "BM25", "use --retriever_name hashed --factory IVF4096,PQ64")
        vocabulary: dict[str, int] = {}
        ids = []
        with progress_bar(len(corpus), "words", build.progress) as bar:
            for row in corpus:
                ids.append(
                    [vocabulary.setdefault(word, len(vocabulary)) for word in tokenize(row["contents"])]
                )
                bar.update()
        index = self._library.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        index.index((ids, vocabulary), show_progress=build.progress and sys.stderr.isatty())
        index.save(str(build.folder / FOLDER), show_progress=False)
        return {}

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Ranker:
        return Bm25(self._library, folder / FOLDER, options.mmap)


def _library() -> Any:
    """Import bm25s, which starts JAX if it finds it, and that would take a TPU or most of a GPU."""
    modules: dict[str, Any] = sys.modules
    imported = modules.get("jax.lax")
    modules["jax.lax"] = None  # cannot be imported
    try:
        return require("bm25s", "pip install bm25s, or name another --retriever_name")
    finally:
        del modules["jax.lax"]
        if imported is not None:
            modules["jax.lax"] = imported


class Bm25:
    """Ranks all passages; raises RetrieverError for a damaged index, or one too large for the memory."""

    def __init__(self, library: Any, folder: Path, mmap: bool = False):
        try:
            if not mmap:
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_memory(size, str(folder), "serve it with --mmap")
            self._index = library.BM25.load(str(folder), mmap=mmap, show_progress=False)
        except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{folder}: not a whole BM25 index ({error}); build it again") from error
        self.documents = int(self._index.scores["num_docs"])

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Ranker`; row -1 without a word in common."""
        ranked = []
        for query in queries:
            indexed = [word for word in tokenize(query) if word in self._index.vocab_dict]
            scores = self._index.get_scores(indexed) if indexed else np.zeros(self.documents, np.float32)
            ranked.append(top_k(scores, k))
        scores, ids = map(np.stack, zip(*ranked, strict=True))
        return scores, np.where(scores > 0, ids, -1)


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best of scores [N] and their places, ties in order of place."""
    if k < len(scores):
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        better = np.flatnonzero(scores > threshold)
        equal = np.flatnonzero(scores == threshold)[: k - len(better)]
        ids = np.concatenate([better, equal])
    else:
        ids = np.arange(len(scores))
    ids = ids[np.lexsort((ids, -scores[ids]))]
    return scores[ids], ids
