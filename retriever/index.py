"""Opens an index over its corpus: a folder with a manifest, or a bare FAISS file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from retriever.builder import BM25, INDEX_FILE, KINDS, MANIFEST, BuildOptions, build_index
from retriever.corpus import Corpus, load_corpus
from retriever.encoders import Encoder, cosine, load_encoder, make_encoder
from retriever.errors import RetrieverError
from retriever.faiss_index import FLAT, FaissVectors, map_flat, read_header

__all__ = ["MANIFEST", "Index", "build_index", "load_index", "open_index"]

AGAIN = "build it again with python -m retriever.build_index"


class Vectors(Protocol):
    """An index of vectors: FAISS, JAX or Qdrant."""

    dimension: int
    documents: int

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> scores float32 [Q, k], row numbers int64 [Q, k] or -1 where none was found."""
        ...


class Ranker(Protocol):
    """Ranks row numbers for texts."""

    documents: int

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [Q, k], row numbers int64 [Q, k] or -1."""
        ...


class Dense:
    """An encoder before an index of vectors."""

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder, self.documents = encoder, vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._vectors.search(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it."""

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus, self.manifest = corpus, manifest
        self._ranker = ranker

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[dict[str, Any], float]]]:
        """The k best rows of each query with their scores, best first; ties in corpus order."""
        if not queries:
            return []
        scores, found = self._ranker.rank(queries, min(k, len(self.corpus)))
        return [
            [(self.corpus[i], score) for score, i in zip(row.tolist(), ids.tolist(), strict=True) if i >= 0]
            for row, ids in zip(scores, found, strict=True)
        ]


def open_index(
    index_path: Path,
    corpus_path: Path,
    *,
    name: str = "",
    model: str = "",
    faiss_gpu: bool = False,
    mmap: bool = False,
    engine: str = "",
    build_if_missing: bool = False,
    progress: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Index:
    """Loads a corpus and its index.

    Args:
        index_path: folder of a built index, or a bare FAISS file such as the published e5_Flat.index.
        name: encoder (hashed, e5, bge, dense) or bm25; empty: as the manifest says, or hashed to build.
        model: folder or hub name of the encoder's model; empty: as the manifest says, or the name's own.
        engine: faiss or jax for a flat index; empty: as it was built.
        report: told what is being done.

    Raises:
        RetrieverError: either is missing, damaged or too large, they do not belong together, or the
            options do not fit the index.
    """
    report(f"reading the corpus {corpus_path}")
    corpus = load_corpus(corpus_path, progress)
    if build_if_missing and not index_path.is_file() and not (index_path / MANIFEST).is_file():
        report(f"building the index {index_path} over {len(corpus):,} passages")
        build_index(
            corpus, index_path, name or "hashed", progress=progress, options=BuildOptions(model=model)
        )
    report(f"loading the index {index_path} over {len(corpus):,} passages")
    load = _load_file if index_path.is_file() else load_index
    return load(index_path, corpus, name=name, model=model, faiss_gpu=faiss_gpu, mmap=mmap, engine=engine)


def load_index(
    folder: Path,
    corpus: Corpus,
    *,
    name: str = "",
    model: str = "",
    faiss_gpu: bool = False,
    mmap: bool = False,
    engine: str = "",
) -> Index:
    """Loads an index that was built from this very corpus; arguments and errors as `open_index`."""
    manifest = _read_manifest(folder)
    if manifest["corpus_sha256"] != corpus.sha256:
        raise RetrieverError(
            f"{folder}: built from another corpus ({manifest['documents']} passages; this one has"
            f" {len(corpus)}); {AGAIN}"
        )
    if name and name != manifest["encoder"]:
        raise RetrieverError(
            f"--retriever_name {name}: {folder} was built with {manifest['encoder']}; leave the option out"
        )
    kind = manifest.get("kind", "faiss")
    if kind == BM25:
        from retriever.bm25 import Bm25

        _refuse({"--faiss_gpu": faiss_gpu, "--engine": engine, "--retriever_model": model}, BM25)
        ranker: Ranker = Bm25(folder / BM25, mmap)
    elif kind == "qdrant":
        from retriever.qdrant import QdrantVectors

        _refuse({"--faiss_gpu": faiss_gpu, "--engine": engine, "--mmap": mmap}, "Qdrant")
        encoder = _load_encoder(folder, manifest, model)
        vectors = QdrantVectors(folder, manifest["url"], manifest["collection"])
        _check_dimension(str(folder), vectors.dimension, encoder)
        ranker = Dense(encoder, vectors)
    else:
        path = folder / INDEX_FILE
        _check_size(path, manifest)
        encoder = _load_encoder(folder, manifest, model)
        ranker = _open_vectors(path, corpus, encoder, engine or kind, faiss_gpu, mmap)
        manifest = manifest | {"kind": engine or kind}
    _check_count(str(folder), ranker.documents, corpus)
    return Index(corpus, ranker, manifest)


def _load_file(
    path: Path, corpus: Corpus, *, name: str, model: str, faiss_gpu: bool, mmap: bool, engine: str
) -> Index:
    """A FAISS file without a manifest: sizes, dimension and the first vector are what can be checked."""
    if name in ("", "hashed", BM25):
        raise RetrieverError(
            f"{path}: a bare FAISS file does not say its encoder; set --retriever_name to e5, bge or dense"
        )
    header = read_header(path)
    _check_count(str(path), header.documents, corpus)
    encoder = make_encoder(name, model, corpus)
    ranker = _open_vectors(path, corpus, encoder, engine or "faiss", faiss_gpu, mmap)
    if header.kind == FLAT:
        likeness = cosine(map_flat(path)[0], encoder.encode_passages(corpus[:1])[0])
        # Not closer: it may have been built in fp16, or with passages cut elsewhere.
        if likeness < 0.5:
            raise RetrieverError(
                f"{path}: its first vector is not what {encoder.model} makes of the first passage (cosine"
                f" {likeness:.2f}); set --retriever_name and --retriever_model to the encoder that built it"
            )
    manifest = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "kind": engine or "faiss",
        "encoder": encoder.name,
        "model": encoder.model,
        "dimension": encoder.dimension,
        "factory": "Flat" if header.kind == FLAT else header.kind.decode(),
        "bytes": path.stat().st_size,
    }
    return Index(corpus, ranker, manifest)


def _open_vectors(
    path: Path, corpus: Corpus, encoder: Encoder, engine: str, faiss_gpu: bool, mmap: bool
) -> Ranker:
    header = read_header(path)
    _check_count(str(path), header.documents, corpus)
    _check_dimension(str(path), header.dimension, encoder)
    if engine == "faiss":
        return Dense(encoder, FaissVectors(path, mmap, faiss_gpu))
    if engine != "jax":
        raise RetrieverError(f"--engine {engine!r} is unknown; available are faiss and jax")
    from retriever.jax_search import JaxVectors

    _refuse({"--faiss_gpu": faiss_gpu, "--mmap": mmap}, "the JAX engine")
    return Dense(encoder, JaxVectors(map_flat(path), str(path)))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise RetrieverError(f"{folder}: no complete index; build it with python -m retriever.build_index")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        missing = {"corpus_sha256", "documents", "encoder", "factory"} - set(manifest)
    except (ValueError, TypeError) as error:
        raise RetrieverError(f"{path}: damaged ({error}); {AGAIN}") from error
    if missing or manifest.get("kind", "faiss") not in (*KINDS, BM25):
        raise RetrieverError(f"{path}: not a manifest of this version; {AGAIN}")
    return manifest


def _load_encoder(folder: Path, manifest: dict[str, Any], model: str) -> Encoder:
    return load_encoder(folder, manifest["encoder"], model or manifest.get("model", ""))


def _check_size(path: Path, manifest: dict[str, Any]) -> None:
    """A cut file may load by chance, and crashes a memory-mapped search."""
    expected = manifest.get("bytes")  # absent in manifests of the first version
    if expected is not None and path.is_file() and path.stat().st_size != expected:
        raise RetrieverError(
            f"{path}: has {path.stat().st_size:,} bytes and its manifest says {expected:,}; {AGAIN}"
        )


def _check_count(what: str, documents: int, corpus: Corpus) -> None:
    if documents != len(corpus):
        raise RetrieverError(
            f"{what}: holds {documents:,} vectors and the corpus {corpus.path} {len(corpus):,} passages; set"
            " --corpus_path to the corpus that it was built from"
        )


def _check_dimension(what: str, dimension: int, encoder: Encoder) -> None:
    if dimension != encoder.dimension:
        raise RetrieverError(
            f"{what}: holds vectors of dimension {dimension}, and {encoder.model or encoder.name} makes"
            f" {encoder.dimension}; set --retriever_model to the model that built it"
        )


def _refuse(options: dict[str, Any], what: str) -> None:
    for option, value in options.items():
        if value:
            raise RetrieverError(f"{option}: has no meaning for {what}; leave it out")
