"""The vectors of a corpus, in files that are kept until the index is built, or for further indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retriever.interfaces import Encoder


@dataclass(frozen=True)
class Embeddings:
    """The vectors of a corpus in corpus order, in files of `shard_rows` vectors each.

    Attributes:
        folder: The folder of the files.
        encoder: The encoder that made the vectors.
        documents: Number of vectors.
        shard_rows: Number of vectors in each file but the last.
    """

    folder: Path
    encoder: Encoder
    documents: int
    shard_rows: int

    def shards(self) -> Iterator[np.ndarray]:
        """Read the files in corpus order.

        Yields:
            float32 or float16 [shard_rows, D], the last one shorter; memory-mapped, read-only.
        """
        for start in range(0, self.documents, self.shard_rows):
            yield np.load(shard_path(self.folder, start, self.shard_rows), mmap_mode="r")

    def sample(self, count: int) -> np.ndarray:
        """Return vectors that are spread evenly over the corpus.

        Args:
            count: Largest number of vectors, at least 1.

        Returns:
            float32 [at most count, D], every n-th vector in corpus order.
        """
        step = max(1, -(-self.documents // count))  # rounded up
        samples = []
        start = 0  # row number of the first vector of the shard
        for shard in self.shards():
            first = -start % step  # of the shard, the first vector whose row number is a multiple of step
            samples.append(np.asarray(shard[first::step], np.float32))
            start += len(shard)
        return np.concatenate(samples)


def shard_path(folder: Path, start: int, shard_rows: int) -> Path:
    """Return the file of the vectors from row number `start` on, a multiple of `shard_rows`."""
    return folder / f"shard-{start // shard_rows:05d}.npy"
