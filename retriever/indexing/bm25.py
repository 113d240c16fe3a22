"""Builds a sparse index."""

from __future__ import annotations

import sys
from pathlib import Path

from retriever.corpus.passages import Corpus
from retriever.encoders.words import K1, B, words
from retriever.errors import require
from retriever.indexing.progress import progress_bar
from retriever.search.backends.bm25 import INSTALL
from retriever.search.index_memory import bm25_bytes, require_memory

SAMPLE = 1000  # passages whose words are counted to estimate the memory


def write_bm25(corpus: Corpus, folder: Path, progress: bool) -> None:
    """Indexes the contents of all passages.

    Raises:
        RetrieverError: bm25s is missing, or the memory is too small.
    """
    bm25s = require("bm25s", INSTALL)
    sample = corpus[:: max(1, len(corpus) // SAMPLE)]
    count = len(corpus) * sum(len(words(row["contents"])) for row in sample) // len(sample)
    require_memory(
        bm25_bytes(len(corpus), count), "BM25", "use --retriever_name hashed --factory IVF4096,PQ64"
    )
    vocabulary: dict[str, int] = {}
    ids = []
    with progress_bar(len(corpus), "words", progress) as bar:
        for row in corpus:
            ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in words(row["contents"])])
            bar.update()
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
    index.index((ids, vocabulary), show_progress=progress and sys.stderr.isatty())
    index.save(str(folder), show_progress=False)
