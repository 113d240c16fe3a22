"""BM25 over words (Lucene's form), through bm25s."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import IndexOptions
from retriever.corpus.passages import Corpus
from retriever.encoders.hashed import K1, B
from retriever.encoders.tokenizer import tokenize
from retriever.errors import RetrieverError, require
from retriever.indexes.backend import Backend, Build
from retriever.indexes.progress import progress_bar
from retriever.indexes.ranking import top_k
from retriever.indexes.resources import require_memory
from retriever.interfaces import Ranker

# Name of bm25s's folder in the folder of an index.
FOLDER = "bm25"
# Passages whose words are counted to estimate the memory.
SAMPLE = 1000
# Row numbers that are checked at a time when an index is opened, which bounds the memory.
CHECKED_ROWS = 2**20


class Bm25Backend(Backend):
    """A sparse index of the words of all passages."""

    def __init__(self) -> None:
        self._library = _import_bm25s()

    def write(self, build: Build) -> dict[str, Any]:
        """Count the words of all passages and write the index; the manifest gets no entries."""
        alternatives = "use --retriever_name hashed --factory IVF4096,PQ64"
        require_memory(_peak_memory(build.corpus), "BM25", alternatives)
        vocabulary: dict[str, int] = {}
        ids_of_passages = []
        with progress_bar(len(build.corpus), "words", build.progress) as bar:
            for row in build.corpus:
                word_ids = []
                for word in tokenize(row["contents"]):
                    word_ids.append(vocabulary.setdefault(word, len(vocabulary)))
                ids_of_passages.append(word_ids)
                bar.update()
        index = self._library.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        is_shown = build.progress and sys.stderr.isatty()
        index.index((ids_of_passages, vocabulary), show_progress=is_shown)
        index.save(str(build.folder / FOLDER), show_progress=False)
        return {}

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Ranker:
        """Open the index, read whole or memory-mapped."""
        return Bm25(self._library, folder / FOLDER, options.mmap, check_places=options.skip_checksum)


def _peak_memory(corpus: Corpus) -> int:
    """Estimate the bytes that a build takes at most.

    They are the word ids as lists, then three arrays of distinct words and their sort.
    """
    sample = corpus[:: max(1, len(corpus) // SAMPLE)]
    sample_words = sum(len(tokenize(row["contents"])) for row in sample)
    words = len(corpus) * sample_words // len(sample)
    distinct_words = words * 2 // 3  # in each passage, of all passages together
    return 8 * words + 40 * distinct_words + 64 * len(corpus)


def _import_bm25s() -> Any:
    """Import bm25s without JAX, which it would start, and which would take a TPU or most of a GPU."""
    modules: dict[str, Any] = sys.modules
    imported = modules.get("jax.lax")
    modules["jax.lax"] = None  # an import of it fails now
    try:
        return require("bm25s", "pip install bm25s, or name another --retriever_name")
    finally:
        del modules["jax.lax"]
        if imported is not None:
            modules["jax.lax"] = imported


class Bm25:
    """Ranks all passages for texts.

    Args:
        library: The module bm25s.
        folder: Its folder.
        mmap: Read its parts from disk when they are needed, instead of into memory.
        check_places: Read all places, to check that they lie within the index. Checksums make this needless.

    Attributes:
        documents: Number of passages.

    Raises:
        RetrieverError: The index is damaged, or too large for the memory.
    """

    def __init__(self, library: Any, folder: Path, mmap: bool = False, check_places: bool = False):
        try:
            if not mmap:
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_memory(size, str(folder), "serve it with --mmap")
            self._index = library.BM25.load(str(folder), mmap=mmap, show_progress=False)
            is_whole = _is_consistent(self._index) if check_places else True
        except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{folder}: not a whole BM25 index ({error}); build it again") from error
        self.documents = int(self._index.scores["num_docs"])
        if not is_whole:
            raise RetrieverError(f"{folder}: not a whole BM25 index (places out of range); build it again")

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k], as `interfaces.Ranker` says.

        The row number is -1 where a passage has no word in common with the query.
        """
        score_rows = []
        id_rows = []
        for query in queries:
            scores, ids = top_k(self._scores(query), k)
            score_rows.append(scores)
            id_rows.append(ids)
        scores = np.stack(score_rows)
        ids = np.stack(id_rows)
        return scores, np.where(scores > 0, ids, -1)

    def _scores(self, query: str) -> np.ndarray:
        """Return the score of each passage, float32 [documents]."""
        known_words = [word for word in tokenize(query) if word in self._index.vocab_dict]
        if not known_words:
            return np.zeros(self.documents, np.float32)
        return self._index.get_scores(known_words)


def _is_consistent(index: Any) -> bool:
    """Return whether all places of an index lie within it.

    bm25s's compiled code does not check them. The index is a sparse matrix by columns: a word has a column,
    and a passage a row.

    Args:
        index: A `bm25s.BM25` that was loaded. Its `scores` hold `data`, float32 [N], and the row of each
            entry, `indices`, int [N]. The entries of column c are those from `indptr[c]` to `indptr[c + 1]`.
    """
    entries = index.scores["data"]
    rows = index.scores["indices"]
    starts = index.scores["indptr"]
    if len(starts) == 0 or len(rows) != len(entries):
        return False
    if starts[0] != 0 or starts[-1] != len(rows) or np.any(starts[1:] < starts[:-1]):
        return False
    num_columns = len(starts) - 1
    # bm25s adds the empty word, which has no column.
    columns = [column for word, column in index.vocab_dict.items() if word]
    if columns and not 0 <= min(columns) <= max(columns) < num_columns:
        return False
    num_passages = index.scores["num_docs"]
    for start in range(0, len(rows), CHECKED_ROWS):
        block = rows[start : start + CHECKED_ROWS]
        if block.min() < 0 or block.max() >= num_passages:
            return False
    return True
