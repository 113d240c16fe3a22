"""Builds an index in a folder with a manifest; the folder appears only when it is complete."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.corpus import Corpus
from retriever.embeddings import DTYPES, Embeddings, embed
from retriever.encoders import Encoder
from retriever.errors import RetrieverError

MANIFEST = "manifest.json"
INDEX_FILE = "index.faiss"
BM25 = "bm25"
KINDS = ("faiss", "jax", "qdrant")


@dataclass(frozen=True)
class BuildOptions:
    """What `build_index` can be told beside encoder and factory."""

    model: str = ""  # folder or hub name of the encoder
    kind: str = "faiss"  # one of KINDS; jax writes a flat FAISS file and searches it on accelerators
    search: str = ""  # FAISS search parameters kept in the index, such as nprobe=32
    embeddings: Path | None = None  # folder of the shards, kept; None: beside the index, then removed
    shard_rows: int = 2**18
    dtype: str = "float32"  # of the shards, one of DTYPES
    qdrant_url: str = ""  # empty: embedded, in the index's folder
    qdrant_collection: str = "passages"


def build_index(
    corpus: Corpus,
    folder: Path,
    encoder_name: str,
    factory: str = "Flat",
    progress: bool = True,
    options: BuildOptions | None = None,
) -> None:
    """Encodes the corpus and writes the index; started again after a stop, it goes on.

    Args:
        encoder_name: hashed, e5, bge, dense or bm25.
        factory: FAISS factory string; Flat is exact.

    Raises:
        RetrieverError: unknown encoder, factory or option; the folder holds something else; too little
            memory or disk; embeddings begun with other settings.
    """
    options = options or BuildOptions()
    _check(folder, encoder_name, factory, options)
    unfinished = folder.with_name(folder.name + ".unfinished")
    manifest: dict[str, Any] = {"corpus_sha256": corpus.sha256, "documents": len(corpus)}
    if encoder_name == BM25:
        from retriever.bm25 import write_bm25

        _empty(unfinished)
        write_bm25(corpus, unfinished / BM25, progress)
        manifest |= {"kind": BM25, "encoder": BM25, "factory": BM25}
        _finish(folder, unfinished, manifest)
        return
    shards = options.embeddings or folder.with_name(folder.name + ".embeddings")
    embeddings = embed(
        corpus,
        shards,
        encoder_name,
        options.model,
        options.shard_rows,
        options.dtype,
        progress,
        before=lambda encoder: _check_factory(encoder, factory, options),
    )
    _empty(unfinished)
    manifest |= _write(unfinished, embeddings, factory, options, progress)
    _finish(folder, unfinished, manifest)
    if options.embeddings is None:
        shutil.rmtree(shards)


def _write(
    folder: Path, embeddings: Embeddings, factory: str, options: BuildOptions, progress: bool
) -> dict[str, Any]:
    """The kind's files; its part of the manifest."""
    encoder = embeddings.encoder
    encoder.save(folder)
    manifest = {
        "kind": options.kind,
        "encoder": encoder.name,
        "model": encoder.model,
        "dimension": encoder.dimension,
        "factory": factory,
    }
    if options.kind == "qdrant":
        from retriever.qdrant import write_qdrant

        write_qdrant(folder, options.qdrant_url, options.qdrant_collection, embeddings, progress)
        where = {"url": options.qdrant_url, "collection": options.qdrant_collection}
        return manifest | where | {"factory": "qdrant"}
    from retriever.faiss_index import write_faiss

    write_faiss(folder / INDEX_FILE, embeddings, factory, options.search, progress)
    return manifest | {"bytes": (folder / INDEX_FILE).stat().st_size}


def _check(folder: Path, encoder_name: str, factory: str, options: BuildOptions) -> None:
    if folder.exists() and (folder.is_file() or any(folder.iterdir())) and not (folder / MANIFEST).is_file():
        raise RetrieverError(f"{folder}: exists and is no index; choose another --index_path")
    if options.kind not in KINDS:
        raise RetrieverError(f"--kind {options.kind!r} is unknown; available are {', '.join(KINDS)}")
    if options.dtype not in DTYPES:
        raise RetrieverError(f"--embedding_dtype {options.dtype!r}: choose from {', '.join(DTYPES)}")
    if options.shard_rows < 1:
        raise RetrieverError(f"--shard_rows {options.shard_rows}: must be 1 or more")
    if options.kind != "faiss" and factory != "Flat":
        raise RetrieverError(f"--factory {factory}: --kind {options.kind} has none; leave it out")
    if encoder_name == BM25 and options != BuildOptions():
        raise RetrieverError("--retriever_name bm25 has no vectors; leave out the options about them")


def _check_factory(encoder: Encoder, factory: str, options: BuildOptions) -> None:
    """Before hours of encoding, not after."""
    if options.kind == "qdrant":
        from retriever.qdrant import check_server

        check_server(options.qdrant_url, options.qdrant_collection)
    else:
        from retriever.faiss_index import make_empty

        make_empty(encoder.dimension, factory, options.search)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(folder: Path, unfinished: Path, manifest: dict[str, Any]) -> None:
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
