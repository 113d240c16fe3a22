"""Opens an index, checks that it belongs to a corpus, and searches the corpus by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import LEXICAL, IndexOptions, find_kind
from retriever.corpus.passages import Corpus
from retriever.encoders.dense import is_here
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.registry import check_dimension, check_vector, load_encoder, make_encoder
from retriever.encoders.tokenizer import tokenize, words_version
from retriever.errors import RetrieverError
from retriever.indexes.backend import load_backend
from retriever.indexes.faiss_files import FLAT, map_flat, read_header
from retriever.indexes.manifest import REBUILD, check_files, read_manifest
from retriever.interfaces import CorpusRow, Encoder, Hits, Ranker, Vectors

# Passages fetched beyond k, in place of those that turn out to be noise of the hashed encoder.
SPARE = 16


class DenseRanker:
    """Ranks rows by an encoder and an index of vectors.

    Args:
        encoder: Encodes the queries.
        vectors: The index of the passages' vectors.

    Attributes:
        encoder: As above.
        documents: Number of rows that are ranked.
    """

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder = encoder
        self.documents = vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k], as `interfaces.Ranker` says."""
        return self._vectors.nearest(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it.

    A hit of the hashed encoder has a word of the query and a score above 0, because its projection gives all
    other passages a little noise.

    Args:
        corpus: The rows.
        ranker: Ranks their row numbers.
        manifest: The manifest of the index.

    Attributes:
        corpus: The rows.
        manifest: The manifest of the index.
    """

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus = corpus
        self.manifest = manifest
        self._ranker = ranker
        self._is_noisy = manifest.get("encoder") == HashedEncoder.name

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best rows of each query.

        Args:
            queries: Texts; may be empty.
            k: Largest number of rows for each query, at least 1.

        Returns:
            For each query at most k rows with their scores, best first; ties in corpus order.

        Raises:
            Unavailable: Another service holds the vectors and does not answer.
        """
        if not queries:
            return []
        fetched = k + SPARE if self._is_noisy else k
        scores, ids = self._ranker.rank(queries, min(fetched, len(self.corpus)))
        results = []
        for query, scores_of_query, ids_of_query in zip(queries, scores.tolist(), ids.tolist(), strict=True):
            results.append(self._hits(query, scores_of_query, ids_of_query, k))
        return results

    def _hits(self, query: str, scores: list[float], ids: list[int], k: int) -> Hits:
        """Return the first k ranked rows, without those that are noise."""
        query_words = set(tokenize(query)) if self._is_noisy else set()
        hits: Hits = []
        for score, row_number in zip(scores, ids, strict=True):
            if len(hits) == k:
                break
            if row_number < 0:
                continue
            row = self.corpus[row_number]
            if self._is_noisy and not _is_hit(row, score, query_words):
                continue
            hits.append((row, score))
        return hits


def _is_hit(row: CorpusRow, score: float, query_words: set[str]) -> bool:
    """Return whether a row of the hashed encoder has a word of the query and a score above 0."""
    return score > 0 and not query_words.isdisjoint(tokenize(row["contents"]))


def open_index(path: Path, corpus: Corpus, options: IndexOptions | None = None) -> Index:
    """Load an index that was built from exactly this corpus.

    Args:
        path: The folder of the index, or a bare FAISS file.
        corpus: The rows.
        options: How to open it; None for the defaults.

    Returns:
        The index, ready to search.

    Raises:
        RetrieverError: The index is missing, damaged or too large, it belongs to another corpus, or the
            options do not fit it.
    """
    options = options or IndexOptions()
    if path.is_file():
        return _open_file(path, corpus, options)
    manifest = read_manifest(path)
    refuse_deeds(path, manifest, options)
    _check_source(path, manifest, corpus, options)
    options.check(manifest["kind"])
    kind = options.engine or manifest["kind"]
    manifest["kind"] = kind
    options.check(kind)
    backend = load_backend(kind)
    if not find_kind(kind).has_vectors:
        if not options.skip_checksum:
            check_files(path, manifest)
        ranker: Any = backend.open(path, manifest, options)
        _check_count(path, ranker.documents, corpus)
        return Index(corpus, ranker, manifest)
    model = options.retriever_model or manifest.get("model", "")
    encoder = load_encoder(path, manifest["encoder"], model)
    sizes = backend.sizes(path, manifest)
    if sizes is not None:
        documents, dimension = sizes
        _check_count(path, documents, corpus)
        check_dimension(path, dimension, encoder)
    if not options.skip_checksum:
        check_files(path, manifest)
    vectors: Any = backend.open(path, manifest, options)
    _check_count(path, vectors.documents, corpus)
    check_dimension(path, vectors.dimension, encoder)
    return Index(corpus, DenseRanker(encoder, vectors), manifest)


def refuse_deeds(folder: Path, manifest: dict[str, Any], options: IndexOptions) -> None:
    """Refuse an index that does more than holding data, unless the user named its kind and its model.

    Args:
        folder: The folder of the index.
        manifest: Its manifest.
        options: How to open it.

    Raises:
        RetrieverError: Opening it runs code, or contacts an address; or it has another kind than the options
            say.
    """
    kind = manifest["kind"]
    if options.kind and options.kind != kind:
        raise RetrieverError(
            f"--kind {options.kind}: {folder} was built with {kind}; leave the option out, or choose another"
            " --index_path"
        )
    deeds = find_kind(kind).deeds(folder, manifest)
    if deeds and not options.kind:
        raise RetrieverError(
            f"{folder}: opening this index would {' and '.join(deeds)}; if you trust whoever made it, add"
            f" --kind {kind!r} (in the config of a run: retriever.kind)"
        )
    model = str(manifest.get("model", ""))
    if model and not options.retriever_model and not is_here(model):
        raise RetrieverError(
            f"{folder}: opening this index would download the model {model!r}; if you want it, add"
            f" --retriever_model {model!r} (in the config of a run: retriever.model)"
        )


def _open_file(path: Path, corpus: Corpus, options: IndexOptions) -> Index:
    """Open a FAISS file without a manifest: only sizes, dimension and the first vector can be checked."""
    name = options.retriever_name
    engine = options.engine or "faiss"
    if not name or name in LEXICAL:
        raise RetrieverError(f"{path}: has no manifest: set --retriever_name to e5, bge or dense")
    options.check(engine)
    header = read_header(path)
    is_flat = header.kind == FLAT
    _check_count(path, header.documents, corpus)
    encoder = make_encoder(name, options.retriever_model, corpus)
    check_dimension(path, header.dimension, encoder)
    vectors: Any = load_backend(engine).open(path, {}, options)
    if is_flat:
        check_vector(f"{path}, first passage", map_flat(path)[0], corpus[0], encoder)
    manifest = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "kind": engine,
        "encoder": encoder.name,
        "model": encoder.model,
        "dimension": encoder.dimension,
        "factory": "Flat" if is_flat else header.kind.decode(),
        "bytes": path.stat().st_size,
    }
    return Index(corpus, DenseRanker(encoder, vectors), manifest)


def _check_source(folder: Path, manifest: dict[str, Any], corpus: Corpus, options: IndexOptions) -> None:
    """Refuse an index of another corpus, of another version of `tokenize`, or of another encoder."""
    if manifest["corpus_sha256"] != corpus.sha256:
        raise RetrieverError(
            f"{folder}: built from another corpus ({manifest['documents']} passages; this one has"
            f" {len(corpus)}); {REBUILD}"
        )
    if manifest.get("words") != words_version(manifest["encoder"]).get("words"):
        raise RetrieverError(f"{folder}: split into words by another version of this program; {REBUILD}")
    if options.retriever_name and options.retriever_name != manifest["encoder"]:
        raise RetrieverError(f"--retriever_name: {folder} was built with {manifest['encoder']}; leave it out")


def _check_count(path: Path, documents: int, corpus: Corpus) -> None:
    """Refuse an index that has another number of rows than the corpus."""
    if documents != len(corpus):
        raise RetrieverError(
            f"{path}: holds {documents:,} vectors and the corpus {corpus.path} {len(corpus):,} passages; set"
            " --corpus_path to the corpus that it was built from"
        )
