"""Encodes a corpus and builds an index in a folder; a stopped build continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import BuildOptions, find_kind
from retriever.corpus.passages import Corpus
from retriever.encoders.dense import encode_on_devices
from retriever.encoders.registry import load_encoder, make_encoder
from retriever.encoders.tokenizer import words_version
from retriever.errors import RetrieverError
from retriever.files import atomic_folder, atomic_write
from retriever.indexes.backend import Backend, Build, load_backend
from retriever.indexes.embeddings import Embeddings, shard_path
from retriever.indexes.lock import locked
from retriever.indexes.manifest import MANIFEST, checksums
from retriever.indexes.progress import progress_bar
from retriever.indexes.resources import require_disk
from retriever.interfaces import Encoder

# Name of the file in the folder of vectors that says how they were made.
SETTINGS = "settings.json"
# Passages encoded at once.
BLOCK = 2048


def build_index(
    corpus: Corpus, folder: Path, options: BuildOptions | None = None, progress: bool = True
) -> None:
    """Encode the corpus and write the index; started again after a stop, it continues.

    Args:
        corpus: The rows.
        folder: The folder of the index; an index in it is replaced when the new one is complete.
        options: How to build it; None for the defaults, an exact FAISS index of the hashed encoder.
        progress: Show a progress bar, or lines in a log.

    Raises:
        RetrieverError: An encoder, factory or option is unknown, the folder holds something else, memory or
            disk are too small, or the vectors were started with other settings.
    """
    options = options or BuildOptions()
    options.check()
    kind = options.index_kind
    backend = load_backend(kind, building=True)
    backend.check(options)
    with _writing(folder), locked(folder):
        _check_replaceable(folder)
        shards = options.embeddings or folder.with_name(folder.name + ".embeddings")
        embeddings = None
        if find_kind(kind).has_vectors:
            with locked(shards), _writing(shards):
                embeddings = embed(corpus, shards, options, progress, backend)
        with atomic_folder(folder) as unfinished, _writing(unfinished):
            if embeddings is not None:
                embeddings.encoder.save(unfinished)
            entries = backend.write(Build(unfinished, corpus, options, embeddings, progress))
            manifest = _make_manifest(corpus, options, embeddings)
            manifest["factory"] = kind
            manifest.update(entries)
            files = unfinished.glob(find_kind(kind).checked_files)
            manifest["checksums"] = checksums(unfinished, files)
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if embeddings is not None and options.embeddings is None:
            shutil.rmtree(shards)


def _check_replaceable(folder: Path) -> None:
    """Refuse a file, or a folder that holds something else than an index."""
    is_used = folder.is_file() or (folder.exists() and any(folder.iterdir()))
    if is_used and not (folder / MANIFEST).is_file():
        raise RetrieverError(f"{folder}: exists and is not an index; choose another --index_path")


def _make_manifest(corpus: Corpus, options: BuildOptions, embeddings: Embeddings | None) -> dict[str, Any]:
    """Return the entries of the manifest that do not depend on the backend."""
    manifest: dict[str, Any] = {"corpus_sha256": corpus.sha256, "documents": len(corpus)}
    manifest.update(words_version(options.retriever_name))
    manifest["kind"] = options.index_kind
    manifest["encoder"] = options.retriever_name
    if embeddings is not None:
        encoder = embeddings.encoder
        manifest["encoder"] = encoder.name
        manifest["model"] = encoder.model
        manifest["dimension"] = encoder.dimension
    return manifest


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn errors of writing into a folder into a RetrieverError that names it."""
    try:
        yield
    except OSError as error:
        raise RetrieverError(
            f"{folder}: cannot be written ({error.strerror or error}); make room or name another folder, and"
            " start again: what was encoded is kept"
        ) from error


def embed(
    corpus: Corpus,
    folder: Path,
    options: BuildOptions,
    progress: bool = True,
    backend: Backend | None = None,
) -> Embeddings:
    """Encode all passages; complete shards of an earlier start are kept.

    Args:
        corpus: The rows.
        folder: The folder of the vectors: a new one, an empty one, or that of an earlier start.
        options: The options of the builder.
        progress: Show a progress bar, or lines in a log.
        backend: The backend that will write the index; it is prepared before anything is encoded.

    Returns:
        The vectors.

    Raises:
        RetrieverError: The folder holds something else, or vectors of other settings; the backend refuses
            the build; or the disk is too small.
    """
    settings = _embedding_settings(corpus, options)
    is_resumed = (folder / SETTINGS).is_file()
    if is_resumed:
        _check_settings(folder, settings)
        encoder = load_encoder(folder, options.retriever_name, options.retriever_model)
    else:
        encoder = make_encoder(options.retriever_name, options.retriever_model, corpus)
    if backend:
        backend.prepare(encoder.dimension, options, folder)
    if not is_resumed:
        if folder.exists() and any(folder.iterdir()):
            raise RetrieverError(f"{folder}: exists and holds no embeddings; choose another --embeddings")
        with atomic_folder(folder) as unfinished:
            encoder.save(unfinished)
            (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    _encode_missing(corpus, encoder, folder, options, progress)
    return Embeddings(folder, encoder, len(corpus), options.shard_rows)


def _embedding_settings(corpus: Corpus, options: BuildOptions) -> dict[str, Any]:
    """Return what decides the vectors and their files."""
    settings = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "encoder": options.retriever_name,
        "model": options.retriever_model,
        "shard_rows": options.shard_rows,
        "dtype": options.embedding_dtype,
    }
    settings.update(words_version(options.retriever_name))
    return settings


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse to continue vectors of other settings."""
    previous = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    changes = []
    for key, value in settings.items():
        if previous.get(key) != value:
            changes.append(f"{key} was {previous.get(key)!r} and is {value!r}")
    if changes:
        raise RetrieverError(
            f"{folder}: started with other settings ({', '.join(changes)}); restore or delete it"
        )


def _encode_missing(
    corpus: Corpus, encoder: Encoder, folder: Path, options: BuildOptions, progress: bool
) -> None:
    """Encode the passages whose shards are not complete."""
    shard_rows = options.shard_rows
    dtype = np.dtype(options.embedding_dtype)
    missing: list[range] = []  # rows of each shard
    for start in range(0, len(corpus), shard_rows):
        if not shard_path(folder, start, shard_rows).is_file():
            missing.append(range(start, min(start + shard_rows, len(corpus))))
    missing_passages = sum(len(rows) for rows in missing)
    require_disk(
        folder,
        missing_passages * encoder.dimension * dtype.itemsize,
        "the vectors need",
        "use another --embeddings folder or --embedding_dtype float16",
    )
    devices = options.devices.split(",") if options.devices else []
    block = BLOCK * max(1, 4 * len(devices))
    done = len(corpus) - missing_passages
    with encode_on_devices(encoder, devices), progress_bar(len(corpus), "encode", progress, done) as bar:
        for rows in missing:
            path = shard_path(folder, rows.start, shard_rows)
            _encode_shard(corpus, encoder, rows, path, dtype, block, bar)


def _encode_shard(
    corpus: Corpus, encoder: Encoder, rows: range, path: Path, dtype: np.dtype, block: int, bar: Any
) -> None:
    """Encode rows in blocks and write them into one file in NumPy's format."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (len(rows), encoder.dimension),
    }
    # Written, not mapped: on a full disk a mapping ends the process without a message.
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in rows[::block]:
            last = min(first + block, rows.stop)
            vectors = encoder.encode_passages(corpus[first:last])  # float32 [block, D]
            file.write(vectors.astype(dtype).data)
            bar.update(last - first)
