"""A corpus's vectors in shards on disk: a build that was stopped continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from retriever.corpus.passages import Corpus
from retriever.encoders.dense import spread
from retriever.encoders.factory import load_encoder, make_encoder
from retriever.encoders.words import words_version
from retriever.errors import RetrieverError
from retriever.files import replacing, replacing_folder
from retriever.indexing.options import BuildOptions
from retriever.indexing.progress import progress_bar
from retriever.interfaces import Encoder
from retriever.search.index_memory import require_disk

SETTINGS = "settings.json"
BLOCK = 2048  # passages encoded at once


@dataclass(frozen=True)
class Embeddings:
    """Complete shards of [rows, dimension] each, in corpus order."""

    folder: Path
    encoder: Encoder
    documents: int
    shard_rows: int

    def shards(self) -> Iterator[np.ndarray]:
        """float32 or float16 [shard_rows, dimension] each, the last shorter; memory-mapped."""
        for start in range(0, self.documents, self.shard_rows):
            yield np.load(shard_path(self.folder, start, self.shard_rows), mmap_mode="r")

    def sample(self, count: int) -> np.ndarray:
        """float32 [at most count, dimension], spread evenly over the corpus, to train an index on."""
        step = max(1, -(-self.documents // count))
        parts, start = [], 0
        for shard in self.shards():
            parts.append(np.asarray(shard[-start % step :: step], np.float32))
            start += len(shard)
        return np.concatenate(parts)


def embed(
    corpus: Corpus,
    folder: Path,
    options: BuildOptions,
    progress: bool = True,
    before: Callable[[Encoder], None] = lambda _: None,
) -> Embeddings:
    """Encodes all passages; shards that are complete are taken as they are.

    Args:
        options: whose encoder, dtype and shard_rows are meant.
        before: called with the encoder before anything is encoded; it may raise.

    Raises:
        RetrieverError: the folder was started with other settings, or the disk is too small.
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
        _begin(folder, settings, encoder)
    dtype = np.dtype(options.embedding_dtype)
    _require_disk(folder, len(corpus), options.shard_rows, encoder.dimension * dtype.itemsize)
    devices = options.devices.split(",") if options.devices else []
    with spread(encoder, devices):
        _encode(corpus, encoder, folder, options, BLOCK * max(1, 4 * len(devices)), progress)
    return Embeddings(folder, encoder, len(corpus), options.shard_rows)


def _begin(folder: Path, settings: dict[str, Any], encoder: Encoder) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise RetrieverError(f"{folder}: exists and holds no embeddings; choose another --embeddings")
    with replacing_folder(folder) as unfinished:
        encoder.save(unfinished)
        (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _resume(folder: Path, settings: dict[str, Any]) -> Encoder:
    begun = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    changed = [
        f"{key} was {begun.get(key)!r} and is {settings[key]!r}"
        for key in settings
        if begun.get(key) != settings[key]
    ]
    if changed:
        raise RetrieverError(
            f"{folder}: was started with other settings ({', '.join(changed)}); restore them, or delete"
            " the folder to start again"
        )
    return load_encoder(folder, settings["encoder"], settings["model"])


def _encode(
    corpus: Corpus, encoder: Encoder, folder: Path, options: BuildOptions, block: int, progress: bool
) -> None:
    rows, dtype = options.shard_rows, np.dtype(options.embedding_dtype)
    todo = [
        (start, min(start + rows, len(corpus)))
        for start in range(0, len(corpus), rows)
        if not shard_path(folder, start, rows).is_file()
    ]
    done = len(corpus) - sum(stop - start for start, stop in todo)
    with progress_bar(len(corpus), "encode", progress, done) as bar:
        for start, stop in todo:
            path = shard_path(folder, start, rows)
            # Written, not mapped: on a full disk a mapping ends the process without a word.
            with replacing(path) as partial, partial.open("wb") as file:
                _write_header(file, (stop - start, encoder.dimension), dtype)
                for first in range(start, stop, block):
                    last = min(first + block, stop)
                    file.write(encoder.encode_passages(corpus[first:last]).astype(dtype).data)
                    bar.update(last - first)


def _write_header(file: BinaryIO, shape: tuple[int, int], dtype: np.dtype) -> None:
    """That of a .npy file."""
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def shard_path(folder: Path, start: int, shard_rows: int) -> Path:
    """The file of the shard that begins with row `start`."""
    return folder / f"shard-{start // shard_rows:05d}.npy"


def _require_disk(folder: Path, documents: int, shard_rows: int, vector_bytes: int) -> None:
    missing = sum(
        min(shard_rows, documents - start)
        for start in range(0, documents, shard_rows)
        if not shard_path(folder, start, shard_rows).is_file()
    )
    alternatives = "use another --embeddings folder or --embedding_dtype float16"
    require_disk(folder, missing * vector_bytes, "the vectors need", alternatives)
