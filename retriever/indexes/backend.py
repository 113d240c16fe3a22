"""A backend builds and opens indexes of one kind; `retriever.backends.KINDS` names those that ship."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import BuildOptions, IndexOptions, find_kind, load_object, require_package
from retriever.corpus.passages import Corpus
from retriever.errors import RetrieverError
from retriever.interfaces import Encoder, Ranker, Vectors


@dataclass(frozen=True)
class Embeddings:
    """A corpus's vectors, in complete shards of [rows, dimension] each, in corpus order."""

    folder: Path
    encoder: Encoder
    documents: int
    shard_rows: int

    def shards(self) -> Iterator[np.ndarray]:
        """Yield float32 or float16 [shard_rows, dimension], the last shorter; memory-mapped."""
        for start in range(0, self.documents, self.shard_rows):
            yield np.load(shard_path(self.folder, start, self.shard_rows), mmap_mode="r")

    def sample(self, count: int) -> np.ndarray:
        """Return float32 [at most count, dimension], spread evenly over the corpus."""
        step = max(1, -(-self.documents // count))
        parts, start = [], 0
        for shard in self.shards():
            parts.append(np.asarray(shard[-start % step :: step], np.float32))
            start += len(shard)
        return np.concatenate(parts)


def shard_path(folder: Path, start: int, shard_rows: int) -> Path:
    """The file of the shard that begins with row `start`."""
    return folder / f"shard-{start // shard_rows:05d}.npy"


@dataclass(frozen=True)
class Build:
    """The input of `Backend.write`."""

    folder: Path  # to write into
    corpus: Corpus
    options: BuildOptions
    embeddings: Embeddings | None  # None for a kind without vectors
    progress: bool  # whether to show it


class Backend:
    """Subclass it, and name it as an entry of KINDS or as ``--kind package.module:Class``."""

    def check(self, options: BuildOptions) -> None:
        """Raise RetrieverError for wrong values, before anything is read."""

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Raise RetrieverError for failures of `write` that can be foreseen; `shards`: folder of vectors."""

    def write(self, build: Build) -> dict[str, Any]:
        """Write the index and return its own entries of the manifest."""
        raise NotImplementedError

    def sizes(self, folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
        """Return (vectors, dimension) of the files without reading them whole; None: unknown until opened."""
        return None

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors | Ranker:
        """Open what `write` wrote; may change entries of the manifest that is served."""
        raise NotImplementedError


def load_backend(kind: str, building: bool = False) -> Backend:
    """Return the backend of a kind; raises RetrieverError without it or the package that it needs."""
    entry = find_kind(kind)
    require_package(entry.build_package if building else entry.package)
    backend = load_object(entry.backend)
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise RetrieverError(f"--kind {kind}: not a subclass of retriever.indexes.backend.Backend")
    return backend()
