"""Opens an index over its corpus: a folder with a manifest, or a bare FAISS file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.corpus.passages import Corpus
from retriever.encoders.factory import load_encoder, make_encoder
from retriever.encoders.probe import cosine
from retriever.encoders.words import words_version
from retriever.errors import RetrieverError
from retriever.interfaces import Encoder, Ranker
from retriever.search.backends.bm25 import Bm25
from retriever.search.backends.faiss import FLAT, FaissVectors, map_flat, read_header
from retriever.search.backends.jax import JaxVectors
from retriever.search.backends.qdrant import QdrantVectors
from retriever.search.index import Dense, Index
from retriever.search.manifest import AGAIN, BM25, INDEX_FILE, check_files, read_manifest

LEAST_COSINE = 0.5  # of a bare file's first vector: built in fp16, or with passages cut elsewhere, it is less


@dataclass(frozen=True)
class IndexOptions:
    """How an index is opened; the fields are named as the service's options."""

    retriever_name: str = ""  # hashed, e5, bge, dense or bm25; empty: as the manifest says
    retriever_model: str = ""  # folder or hub name; empty: as the manifest says, or the name's own
    engine: str = ""  # faiss or jax for a flat index; empty: as it was built
    faiss_gpu: bool = False
    mmap: bool = False
    qdrant_search: str = ""  # as for `backends.qdrant.search_params`; empty: as it was built
    threads: int = 0  # cores to use; 0: all
    skip_checksum: bool = False  # a large file on a slow disk takes minutes to read

    def refuse(self, names: tuple[str, ...], what: str) -> None:
        """Raises RetrieverError if one of these options is set."""
        for name in names:
            if getattr(self, name):
                raise RetrieverError(f"--{name}: has no meaning for {what}; leave it out")


def open_index(path: Path, corpus: Corpus, options: IndexOptions = IndexOptions()) -> Index:
    """Loads an index that was built from exactly this corpus.

    Args:
        path: folder of a built index, or a bare FAISS file such as the published e5_Flat.index.

    Raises:
        RetrieverError: it is missing, damaged or too large, it does not belong to the corpus, or the
            options do not fit it.
    """
    if path.is_file():
        return _open_file(path, corpus, options)
    manifest = read_manifest(path)
    _check_source(path, manifest, corpus, options)
    kind = manifest.get("kind", "faiss")
    if kind != "qdrant":
        options.refuse(("qdrant_search",), f"an index of kind {kind}")
    if kind == BM25:
        options.refuse(("faiss_gpu", "engine", "retriever_model"), BM25)
        ranker: Ranker = Bm25(path / BM25, options.mmap, not options.skip_checksum)
        _check_files(path, manifest, options)
    elif kind == "qdrant":
        options.refuse(("faiss_gpu", "engine", "mmap"), "Qdrant")
        encoder = _load_encoder(path, manifest, options)
        _check_files(path, manifest, options)
        search = options.qdrant_search or manifest.get("search", "")
        vectors = QdrantVectors(path, manifest["url"], manifest["collection"], search)
        manifest = manifest | {"search": search}
        _check_dimension(str(path), vectors.dimension, encoder)
        ranker = Dense(encoder, vectors)
    else:
        kind = options.engine or kind
        _check_size(path / INDEX_FILE, manifest)
        encoder = _load_encoder(path, manifest, options)
        _check_header(path / INDEX_FILE, corpus, encoder)
        _check_files(path, manifest, options)
        ranker = _open_vectors(path / INDEX_FILE, encoder, kind, options)
        manifest = manifest | {"kind": kind}
    _check_count(str(path), ranker.documents, corpus)
    return Index(corpus, ranker, manifest)


def _open_file(path: Path, corpus: Corpus, options: IndexOptions) -> Index:
    """A FAISS file without a manifest: only sizes, dimension and the first vector can be checked."""
    name, engine = options.retriever_name, options.engine or "faiss"
    if name in ("", "hashed", BM25):
        raise RetrieverError(
            f"{path}: a bare FAISS file does not say its encoder; set --retriever_name to e5, bge or dense"
        )
    header = read_header(path)
    _check_count(str(path), header.documents, corpus)
    encoder = make_encoder(name, options.retriever_model, corpus)
    _check_header(path, corpus, encoder)
    ranker = _open_vectors(path, encoder, engine, options)
    if header.kind == FLAT:
        likeness = cosine(map_flat(path)[0], encoder.encode_passages(corpus[:1])[0])
        if likeness < LEAST_COSINE:
            raise RetrieverError(
                f"{path}: its first vector is not what {encoder.model} makes of the first passage (cosine"
                f" {likeness:.2f}); set --retriever_name and --retriever_model to the encoder that built it"
            )
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
    return Index(corpus, ranker, manifest)


def _check_header(path: Path, corpus: Corpus, encoder: Encoder) -> None:
    header = read_header(path)
    _check_count(str(path), header.documents, corpus)
    _check_dimension(str(path), header.dimension, encoder)


def _check_files(folder: Path, manifest: dict[str, Any], options: IndexOptions) -> None:
    if not options.skip_checksum:
        check_files(folder, manifest)


def _open_vectors(path: Path, encoder: Encoder, engine: str, options: IndexOptions) -> Ranker:
    if engine == "faiss":
        return Dense(encoder, FaissVectors(path, options.mmap, options.faiss_gpu, options.threads))
    if engine != "jax":
        raise RetrieverError(f"--engine {engine!r} is unknown; available are faiss and jax")
    options.refuse(("faiss_gpu", "mmap"), "the JAX engine")
    return Dense(encoder, JaxVectors(map_flat(path), str(path)))


def _load_encoder(folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Encoder:
    return load_encoder(folder, manifest["encoder"], options.retriever_model or manifest.get("model", ""))


def _check_source(folder: Path, manifest: dict[str, Any], corpus: Corpus, options: IndexOptions) -> None:
    """The corpus and the encoder are those that the index was built with."""
    if manifest["corpus_sha256"] != corpus.sha256:
        raise RetrieverError(
            f"{folder}: built from another corpus ({manifest['documents']} passages; this one has"
            f" {len(corpus)}); {AGAIN}"
        )
    if manifest.get("words") != words_version(manifest["encoder"]).get("words"):
        raise RetrieverError(
            f"{folder}: its texts were split into words by another version of this program; {AGAIN}"
        )
    if options.retriever_name and options.retriever_name != manifest["encoder"]:
        raise RetrieverError(
            f"--retriever_name {options.retriever_name}: {folder} was built with {manifest['encoder']};"
            " leave the option out"
        )


def _check_size(path: Path, manifest: dict[str, Any]) -> None:
    """A truncated file may load by chance, and then crash a memory-mapped search."""
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
