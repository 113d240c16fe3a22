"""Opens an index over its corpus: a folder with a manifest, or a bare FAISS file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import LEXICAL, IndexOptions, find_kind
from retriever.corpus.passages import Corpus
from retriever.encoders.dense import check_dimension, check_vector, load_encoder, make_encoder
from retriever.encoders.hashed import HashedEncoder, words, words_version
from retriever.errors import RetrieverError
from retriever.indexes.backend import load_backend
from retriever.indexes.faiss import FLAT, map_flat, read_header
from retriever.indexes.storage import AGAIN, check_files, read_manifest
from retriever.interfaces import CorpusRow, Encoder, Hits, Ranker, Vectors

SPARE = 16  # passages fetched in place of those that turn out to be noise


class Dense:
    """Ranks rows by an encoder and an index of vectors."""

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder, self.documents = encoder, vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._vectors.nearest(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it.

    A hit of the hashed encoder has a word of the query and a score above 0: its projection gives all other
    passages a little noise.
    """

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus, self.manifest = corpus, manifest
        self._ranker = ranker
        self._is_noisy = manifest.get("encoder") == HashedEncoder.name

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the k best rows of each query with their scores, best first; ties in corpus order."""
        if not queries:
            return []
        fetched = min(k + SPARE * self._is_noisy, len(self.corpus))
        scores, ids = self._ranker.rank(queries, fetched)
        ranked = zip(queries, scores.tolist(), ids.tolist(), strict=True)
        return [list(islice(self._hits(*ranking), k)) for ranking in ranked]

    def _hits(self, query: str, scores: list[float], ids: list[int]) -> Iterator[tuple[CorpusRow, float]]:
        query_words = set(words(query)) if self._is_noisy else set()
        for score, i in zip(scores, ids, strict=True):
            if i < 0:
                continue
            row = self.corpus[i]
            if not self._is_noisy or (score > 0 and not query_words.isdisjoint(words(row["contents"]))):
                yield row, score


def open_index(path: Path, corpus: Corpus, options: IndexOptions | None = None) -> Index:
    """Load an index that was built from exactly this corpus: a folder, or a bare FAISS file.

    Raises RetrieverError: it is missing, damaged or too large, belongs to another corpus, or the options do
    not fit it.
    """
    options = options or IndexOptions()
    if path.is_file():
        return _open_file(path, corpus, options)
    manifest = read_manifest(path)
    _check_source(path, manifest, corpus, options)
    options.check(manifest["kind"])
    kind = manifest["kind"] = options.engine or manifest["kind"]
    options.check(kind)
    backend = load_backend(kind)
    encoder = None
    if find_kind(kind).has_vectors:
        model = options.retriever_model or manifest.get("model", "")
        encoder = load_encoder(path, manifest["encoder"], model)
    if encoder and (sizes := backend.sizes(path, manifest)):
        _check_count(path, sizes[0], corpus)
        check_dimension(path, sizes[1], encoder)
    if not options.skip_checksum:
        check_files(path, manifest)
    index: Any = backend.open(path, manifest, options)
    _check_count(path, index.documents, corpus)
    if encoder:
        check_dimension(path, index.dimension, encoder)
    return Index(corpus, Dense(encoder, index) if encoder else index, manifest)


def _open_file(path: Path, corpus: Corpus, options: IndexOptions) -> Index:
    """Open a FAISS file without a manifest: only sizes, dimension and the first vector can be checked."""
    name, engine = options.retriever_name, options.engine or "faiss"
    if name in ("", *LEXICAL):
        raise RetrieverError(f"{path}: has no manifest: set --retriever_name to e5, bge or dense")
    options.check(engine)
    header = read_header(path)
    _check_count(path, header.documents, corpus)
    encoder = make_encoder(name, options.retriever_model, corpus)
    check_dimension(path, header.dimension, encoder)
    index: Any = load_backend(engine).open(path, {}, options)
    if header.kind == FLAT:
        check_vector(f"{path}, first passage", map_flat(path)[0], corpus[0], encoder)
    manifest = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "kind": engine,
        "encoder": encoder.name,
        "model": encoder.model,
        "dimension": encoder.dimension,
        "factory": "Flat" if header.kind == FLAT else header.kind.decode(),
        "bytes": path.stat().st_size,
    }
    return Index(corpus, Dense(encoder, index), manifest)


def _check_source(folder: Path, manifest: dict[str, Any], corpus: Corpus, options: IndexOptions) -> None:
    """Refuse an index of another corpus, word splitter or encoder."""
    if manifest["corpus_sha256"] != corpus.sha256:
        raise RetrieverError(
            f"{folder}: built from another corpus ({manifest['documents']} passages; this one has"
            f" {len(corpus)}); {AGAIN}"
        )
    if manifest.get("words") != words_version(manifest["encoder"]).get("words"):
        raise RetrieverError(f"{folder}: split into words by another version of this program; {AGAIN}")
    if options.retriever_name and options.retriever_name != manifest["encoder"]:
        raise RetrieverError(f"--retriever_name: {folder} was built with {manifest['encoder']}; leave it out")


def _check_count(path: Path, documents: int, corpus: Corpus) -> None:
    if documents != len(corpus):
        raise RetrieverError(
            f"{path}: holds {documents:,} vectors and the corpus {corpus.path} {len(corpus):,} passages; set"
            " --corpus_path to the corpus that it was built from"
        )
