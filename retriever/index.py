"""A FAISS index and the encoder that belongs to it, in one folder with a manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retriever.corpus import Corpus
from retriever.encoders import encoder_class
from retriever.errors import RetrieverError

MANIFEST = "manifest.json"
BLOCK = 2048  # passages encoded at once


def import_faiss() -> Any:
    """FAISS.

    Raises:
        RetrieverError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise RetrieverError(
            "FAISS is not installed: pip install faiss-cpu (or faiss-gpu on CUDA)"
        ) from error
    return faiss


class Index:
    """Searches a corpus."""

    def __init__(self, corpus: Corpus, encoder: Any, index: Any, manifest: dict[str, Any]):
        self.corpus, self.encoder, self.manifest = corpus, encoder, manifest
        self._index = index

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[dict[str, Any], float]]]:
        """The k best rows of each query with their scores, best first; ties in corpus order."""
        scores, found = self._index.search(self.encoder.encode_queries(queries), min(k, len(self.corpus)))
        return [
            [(self.corpus.rows[i], float(score)) for score, i in _ordered(row, ids) if i >= 0]
            for row, ids in zip(scores, found, strict=True)
        ]


def _ordered(scores: np.ndarray, ids: np.ndarray) -> list[tuple[float, int]]:
    order = np.lexsort((ids, -scores))
    return [(float(scores[j]), int(ids[j])) for j in order]


def build_index(
    corpus: Corpus, folder: Path, encoder_name: str, factory: str = "Flat", progress: bool = True
) -> None:
    """Encodes the corpus and writes the index; the folder appears only when it is complete.

    Args:
        factory: FAISS factory string; Flat is exact.

    Raises:
        RetrieverError: unknown encoder or factory string, or the folder holds something else.
    """
    from tqdm import tqdm

    faiss = import_faiss()
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise RetrieverError(f"{folder}: exists and is no index; choose another --index_path")
    encoder = encoder_class(encoder_name).fit(corpus)
    try:
        index = faiss.index_factory(encoder.dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrieverError(f"factory {factory!r} is not a FAISS factory string; try Flat") from error
    if not index.is_trained:
        sample = min(len(corpus), 100_000)
        index.train(encoder.encode_passages(corpus, 0, sample))
    starts = range(0, len(corpus), BLOCK)
    for start in tqdm(starts, desc="index", unit="block", disable=None if progress else True, leave=False):
        index.add(encoder.encode_passages(corpus, start, min(start + BLOCK, len(corpus))))
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    faiss.write_index(index, str(unfinished / "index.faiss"))
    encoder.save(unfinished)
    manifest = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "encoder": encoder_name,
        "factory": factory,
    }
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_index(folder: Path, corpus: Corpus) -> Index:
    """Loads an index that was built from this very corpus.

    Raises:
        RetrieverError: no complete index there, or it belongs to another corpus.
    """
    faiss = import_faiss()
    if not (folder / MANIFEST).is_file():
        raise RetrieverError(f"{folder}: no complete index; build it with python -m retriever.build_index")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["corpus_sha256"] != corpus.sha256:
        raise RetrieverError(
            f"{folder}: built from another corpus ({manifest['documents']} passages; this one has"
            f" {len(corpus)}); build it again with python -m retriever.build_index"
        )
    encoder = encoder_class(manifest["encoder"]).load(folder)
    return Index(corpus, encoder, faiss.read_index(str(folder / "index.faiss")), manifest)
