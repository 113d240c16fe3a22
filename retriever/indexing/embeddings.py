"""A corpus's vectors in shards on disk: a build that was stopped continues where it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retriever.corpus.passages import Corpus
from retriever.encoders.factory import load_encoder, make_encoder
from retriever.errors import RetrieverError
from retriever.indexing.options import BuildOptions
from retriever.protocol import Encoder

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
    }
    if (folder / SETTINGS).is_file():
        encoder = _resume(folder, settings)
        before(encoder)
    else:
        encoder = make_encoder(options.retriever_name, options.retriever_model, corpus)
        before(encoder)
        _begin(folder, settings, encoder)
    dtype = np.dtype(options.embedding_dtype)
    _require_disk(folder, len(corpus), options.shard_rows, encoder.dimension * dtype.itemsize)
    _encode(corpus, encoder, folder, options.shard_rows, dtype, progress)
    return Embeddings(folder, encoder, len(corpus), options.shard_rows)


def _begin(folder: Path, settings: dict[str, Any], encoder: Encoder) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise RetrieverError(f"{folder}: exists and holds no embeddings; choose another --embeddings")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    encoder.save(unfinished)
    (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    os.replace(unfinished, folder)  # over an empty folder, too


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
    corpus: Corpus, encoder: Encoder, folder: Path, shard_rows: int, dtype: np.dtype, progress: bool
) -> None:
    silent = None if progress else True
    with tqdm(total=len(corpus), desc="encode", unit="passage", disable=silent, leave=False) as bar:
        for start in range(0, len(corpus), shard_rows):
            stop = min(start + shard_rows, len(corpus))
            path = shard_path(folder, start, shard_rows)
            if path.is_file():
                bar.update(stop - start)
                continue
            unfinished = path.with_name(path.name + ".unfinished")
            shape = (stop - start, encoder.dimension)
            shard = np.lib.format.open_memmap(unfinished, mode="w+", dtype=dtype, shape=shape)
            for first in range(start, stop, BLOCK):
                last = min(first + BLOCK, stop)
                shard[first - start : last - start] = encoder.encode_passages(corpus[first:last])
                bar.update(last - first)
            shard.flush()
            del shard
            os.replace(unfinished, path)


def shard_path(folder: Path, start: int, shard_rows: int) -> Path:
    """The file of the shard that begins with row `start`."""
    return folder / f"shard-{start // shard_rows:05d}.npy"


def _require_disk(folder: Path, documents: int, shard_rows: int, vector_bytes: int) -> None:
    missing = sum(
        min(shard_rows, documents - start)
        for start in range(0, documents, shard_rows)
        if not shard_path(folder, start, shard_rows).is_file()
    )
    need = missing * vector_bytes
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RetrieverError(
            f"{folder}: the vectors need {need:,} bytes and the disk has {free:,} free; use another"
            " --embeddings folder or --embedding_dtype float16"
        )
