"""Builds an index in a folder, which appears when it is complete; a stopped build continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import BuildOptions, find_kind
from retriever.corpus.passages import Corpus
from retriever.encoders.dense import load_encoder, make_encoder, spread
from retriever.encoders.hashed import words_version
from retriever.errors import RetrieverError
from retriever.files import replacing, replacing_folder
from retriever.indexes.backend import Backend, Build, Embeddings, load_backend, shard_path
from retriever.indexes.storage import (
    MANIFEST,
    checksums,
    locked,
    progress_bar,
    require_disk,
    write_manifest,
)
from retriever.interfaces import Encoder

SETTINGS = "settings.json"
BLOCK = 2048  # passages encoded at once


def build_index(
    corpus: Corpus, folder: Path, options: BuildOptions | None = None, progress: bool = True
) -> None:
    """Encode the corpus and write the index; started again after a stop, it continues.

    Raises RetrieverError: unknown encoder, factory or option; the folder holds something else; too little
    memory or disk; embeddings started with other settings.
    """
    options = options or BuildOptions()
    options.check()
    backend = load_backend(options.index_kind, building=True)
    backend.check(options)
    with locked(folder):
        if (
            folder.exists()
            and (folder.is_file() or any(folder.iterdir()))
            and not (folder / MANIFEST).is_file()
        ):
            raise RetrieverError(f"{folder}: exists and is not an index; choose another --index_path")
        if find_kind(options.index_kind).has_vectors:
            _build_vectors(corpus, folder, backend, options, progress)
        else:
            with replacing_folder(folder) as unfinished, _writing(unfinished):
                entries = backend.write(Build(unfinished, corpus, options, None, progress))
                name = options.retriever_name
                _finish(
                    unfinished, corpus, options, {"kind": name, "encoder": name, "factory": name} | entries
                )


def _build_vectors(
    corpus: Corpus, folder: Path, backend: Backend, options: BuildOptions, progress: bool
) -> None:
    shards = options.embeddings or folder.with_name(folder.name + ".embeddings")

    def prepare(encoder: Encoder) -> None:
        backend.prepare(encoder.dimension, options, shards)

    with locked(shards), _writing(shards):
        embeddings = embed(corpus, shards, options, progress, before=prepare)
    encoder = embeddings.encoder
    entries: dict[str, Any] = {"kind": options.kind, "encoder": encoder.name, "model": encoder.model}
    entries |= {"dimension": encoder.dimension, "factory": options.kind}
    with replacing_folder(folder) as unfinished, _writing(unfinished):
        encoder.save(unfinished)
        entries |= backend.write(Build(unfinished, corpus, options, embeddings, progress))
        _finish(unfinished, corpus, options, entries)
    if options.embeddings is None:
        shutil.rmtree(shards)


def _finish(folder: Path, corpus: Corpus, options: BuildOptions, entries: dict[str, Any]) -> None:
    source = {"corpus_sha256": corpus.sha256, "documents": len(corpus)}
    files = folder.glob(find_kind(options.index_kind).checked_files)
    sums = {"checksums": checksums(folder, files)}
    write_manifest(folder, source | words_version(options.retriever_name) | entries | sums)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RetrieverError(
            f"{folder}: cannot be written ({error.strerror or error}); make room there, then give the same"
            " command again: what was encoded is kept"
        ) from error


def embed(
    corpus: Corpus,
    folder: Path,
    options: BuildOptions,
    progress: bool = True,
    before: Callable[[Encoder], None] = lambda _: None,
) -> Embeddings:
    """Encode all passages; complete shards of an earlier start are kept.

    `before` is called with the encoder before anything is encoded. Raises RetrieverError: the folder was
    started with other settings, or the disk is too small.
    """
    settings = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "encoder": options.retriever_name,
        "model": options.retriever_model,
        "shard_rows": options.shard_rows,
        "dtype": options.embedding_dtype,
    } | words_version(options.retriever_name)
    if (folder / SETTINGS).is_file():
        encoder = _resume(folder, settings)
        before(encoder)
    else:
        encoder = make_encoder(options.retriever_name, options.retriever_model, corpus)
        before(encoder)
        if folder.exists() and any(folder.iterdir()):
            raise RetrieverError(f"{folder}: exists and holds no embeddings; choose another --embeddings")
        with replacing_folder(folder) as unfinished:
            encoder.save(unfinished)
            (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    rows, dtype = options.shard_rows, np.dtype(options.embedding_dtype)
    missing = [
        (start, min(start + rows, len(corpus)))
        for start in range(0, len(corpus), rows)
        if not shard_path(folder, start, rows).is_file()
    ]
    passages = sum(stop - start for start, stop in missing)
    alternatives = "use another --embeddings folder or --embedding_dtype float16"
    require_disk(folder, passages * encoder.dimension * dtype.itemsize, "the vectors need", alternatives)
    devices = options.devices.split(",") if options.devices else []
    block = BLOCK * max(1, 4 * len(devices))
    with (
        spread(encoder, devices),
        progress_bar(len(corpus), "encode", progress, len(corpus) - passages) as bar,
    ):
        for start, stop in missing:
            _encode(corpus, encoder, range(start, stop), shard_path(folder, start, rows), dtype, block, bar)
    return Embeddings(folder, encoder, len(corpus), rows)


def _resume(folder: Path, settings: dict[str, Any]) -> Encoder:
    begun = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    changed = [
        f"{key} was {begun.get(key)!r} and is {value!r}"
        for key, value in settings.items()
        if begun.get(key) != value
    ]
    if changed:
        raise RetrieverError(
            f"{folder}: started with other settings ({', '.join(changed)}); restore or delete it"
        )
    return load_encoder(folder, settings["encoder"], settings["model"])


def _encode(
    corpus: Corpus, encoder: Encoder, rows: range, path: Path, dtype: np.dtype, block: int, bar: Any
) -> None:
    # Written, not mapped: on a full disk a mapping ends the process without a message.
    with replacing(path) as partial, partial.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": (len(rows), encoder.dimension)})
        for first in rows[::block]:
            last = min(first + block, rows.stop)
            file.write(encoder.encode_passages(corpus[first:last]).astype(dtype).data)
            bar.update(last - first)
