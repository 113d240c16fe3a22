"""Builds an index in a folder with a manifest; the folder appears only when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retriever.corpus.passages import Corpus
from retriever.encoders.words import words_version
from retriever.errors import RetrieverError
from retriever.files import replacing_folder
from retriever.indexing.bm25 import write_bm25
from retriever.indexing.embeddings import Embeddings, embed
from retriever.indexing.faiss import make_empty, write_faiss
from retriever.indexing.locking import locked
from retriever.indexing.options import BuildOptions
from retriever.indexing.qdrant import check_server, write_qdrant
from retriever.interfaces import Encoder
from retriever.search.manifest import BM25, INDEX_FILE, MANIFEST, checksums, write_manifest


def build_index(
    corpus: Corpus, folder: Path, options: BuildOptions | None = None, progress: bool = True
) -> None:
    """Encodes the corpus and writes the index; started again after a stop, it continues.

    Raises:
        RetrieverError: unknown encoder, factory or option; the folder holds something else; too little
            memory or disk; embeddings started with other settings.
    """
    options = options or BuildOptions()
    options.check()
    with locked(folder):
        _build(corpus, folder, options, progress)


def _build(corpus: Corpus, folder: Path, options: BuildOptions, progress: bool) -> None:
    if folder.exists() and (folder.is_file() or any(folder.iterdir())) and not (folder / MANIFEST).is_file():
        raise RetrieverError(f"{folder}: exists and is not an index; choose another --index_path")
    words = words_version(options.retriever_name)
    source = {"corpus_sha256": corpus.sha256, "documents": len(corpus)} | words
    if options.retriever_name == BM25:
        with replacing_folder(folder) as unfinished, writing(unfinished):
            write_bm25(corpus, unfinished / BM25, progress)
            _finish(unfinished, source | {"kind": BM25, "encoder": BM25, "factory": BM25})
        return
    shards = options.embeddings or folder.with_name(folder.name + ".embeddings")
    with locked(shards), writing(shards):
        embeddings = embed(
            corpus, shards, options, progress, before=lambda encoder: _check_factory(encoder, options, shards)
        )
    with replacing_folder(folder) as unfinished, writing(unfinished):
        _finish(unfinished, source | _write(unfinished, corpus, embeddings, options, progress))
    if options.embeddings is None:
        shutil.rmtree(shards)


def _write(
    folder: Path, corpus: Corpus, embeddings: Embeddings, options: BuildOptions, progress: bool
) -> dict[str, Any]:
    """The kind's files; its part of the manifest."""
    encoder = embeddings.encoder
    encoder.save(folder)
    manifest = {
        "kind": options.kind,
        "encoder": encoder.name,
        "model": encoder.model,
        "dimension": encoder.dimension,
        "factory": options.factory,
    }
    if options.kind == "qdrant":
        write_qdrant(folder, corpus, embeddings, options, progress)
        where = {"url": options.qdrant_url, "collection": options.qdrant_collection, "search": options.search}
        return manifest | where | {"factory": "qdrant"}
    write_faiss(folder / INDEX_FILE, embeddings, options.factory, options.search, progress)
    search = {"search": options.search} if options.search else {}
    return manifest | search | {"bytes": (folder / INDEX_FILE).stat().st_size}


def _check_factory(encoder: Encoder, options: BuildOptions, shards: Path) -> None:
    """Before hours of encoding, not after."""
    if options.kind == "qdrant":
        check_server(options, shards)
    else:
        make_empty(encoder.dimension, options.factory, options.search)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While files are written: what the disk refuses becomes one RetrieverError that names the folder."""
    try:
        yield
    except OSError as error:
        raise RetrieverError(
            f"{folder}: cannot be written ({error.strerror or error}); make room there, then give the same"
            " command again: what was encoded is kept"
        ) from error


def _files(folder: Path, kind: str) -> Iterator[Path]:
    """Those that do not change while they are served; embedded Qdrant's own do."""
    return folder.glob("*") if kind == "qdrant" else folder.rglob("*")


def _finish(folder: Path, manifest: dict[str, Any]) -> None:
    sums = checksums(folder, _files(folder, manifest["kind"]))
    write_manifest(folder, manifest | {"checksums": sums})
