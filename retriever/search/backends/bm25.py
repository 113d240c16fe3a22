"""BM25 over words, through bm25s; `indexing.bm25` writes what is read here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retriever.encoders.words import words
from retriever.errors import RetrieverError, require
from retriever.search.index_memory import require_memory

BLOCK = 2**20  # places checked at once
INSTALL = "pip install bm25s, or name another --retriever_name"


class Bm25:
    """Ranks all passages by BM25 (Lucene's form)."""

    def __init__(self, folder: Path, mmap: bool = False, check: bool = True):
        """Loads what `write_bm25` wrote.

        Args:
            check: reads all of it, so that no search meets a place that is not there.

        Raises:
            RetrieverError: bm25s is missing, or files of the index are missing or damaged.
        """
        bm25s = require("bm25s", INSTALL)
        try:
            if not mmap:
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_memory(size, str(folder), "serve it with --mmap")
            self._index = bm25s.BM25.load(str(folder), mmap=mmap, show_progress=False)
        except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{folder}: not a whole BM25 index ({error}); build it again") from error
        self.documents = int(self._index.scores["num_docs"])
        if check and not _is_consistent(self._index):
            raise RetrieverError(f"{folder}: not a whole BM25 index (places out of range); build it again")

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, k] and int64 [Q, k], -1 without a word in common; best first, ties in corpus order."""
        found = [top_k(self._scores(query), k) for query in queries]
        scores, ids = (np.stack(parts) for parts in zip(*found, strict=True))
        return scores, np.where(scores > 0, ids, -1)

    def _scores(self, query: str) -> np.ndarray:
        known = [word for word in words(query) if word in self._index.vocab_dict]
        if not known:
            return np.zeros(self.documents, np.float32)
        return self._index.get_scores(known)


def _is_consistent(index: Any) -> bool:
    """Whether each word's column lies within the matrix and its rows within the passages."""
    data, rows, starts = (index.scores[name] for name in ("data", "indices", "indptr"))
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(rows) or len(rows) != len(data):
        return False
    columns = [column for word, column in index.vocab_dict.items() if word]  # bm25s adds an empty one
    if np.any(starts[1:] < starts[:-1]) or max(columns, default=-1) >= len(starts) - 1:
        return False
    blocks = (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))
    return all(block.min() >= 0 and block.max() < index.scores["num_docs"] for block in blocks)


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of [N] with their places, ties in order of place also at the k-th."""
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        better = np.flatnonzero(scores > least)
        equal = np.flatnonzero(scores == least)[: k - len(better)]
        ids = np.concatenate([better, equal])
    else:
        ids = np.arange(len(scores))
    ids = ids[np.lexsort((ids, -scores[ids]))]
    return scores[ids], ids
