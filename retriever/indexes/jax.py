"""Exact search on accelerators: the matrix sharded over all devices by rows, product and top-k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import IndexOptions
from retriever.indexes.backend import require_memory
from retriever.indexes.faiss import FaissBackend, index_file, map_flat
from retriever.interfaces import Vectors

QUERIES = 32  # at once; scores of 32 queries over 21 million rows take 2.7 GB over all devices


class JaxBackend(FaissBackend):
    """A flat FAISS file, searched on all JAX devices."""

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        path = index_file(folder)
        return JaxVectors(map_flat(path), str(path))


class JaxVectors:
    """Ranks float32 [documents, dimension] by inner product, as a flat FAISS index; `name` is for errors.

    Raises RetrieverError: the devices' memory is too small.
    """

    def __init__(self, vectors: np.ndarray, name: str):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.documents, self.dimension = vectors.shape
        devices = jax.devices()
        state = devices[0].memory_stats() if devices[0].platform != "cpu" else None
        free = (state["bytes_limit"] - state["bytes_in_use"]) * len(devices) if state else None
        place = f"{name} on {len(devices)} {devices[0].platform} device(s)"
        require_memory(vectors.nbytes, place, "take more devices, or --engine faiss --mmap", free)
        mesh = Mesh(np.array(devices), ("rows",))
        part = -(-self.documents // len(devices))  # rows a device; the last is padded

        def rows(index: Any) -> np.ndarray:
            start = index[0].start or 0
            block = np.asarray(vectors[start : start + part], np.float32)
            return np.pad(block, ((0, part - len(block)), (0, 0)))

        sharding = NamedSharding(mesh, PartitionSpec("rows"))
        shape = (part * len(devices), self.dimension)
        self._vectors = jax.make_array_from_callback(shape, sharding, rows)
        self._search = _make_search(mesh, self.documents)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `interfaces.Vectors`."""
        size = min(self.documents, _power_of_two(k))  # few shapes are compiled
        parts = []
        for start in range(0, len(vectors), QUERIES):
            queries = np.asarray(vectors[start : start + QUERIES], np.float32)
            count = len(queries)
            padded = np.pad(queries, ((0, _power_of_two(count) - count), (0, 0)))
            scores, ids = self._search(padded, self._vectors, size)
            parts.append((np.asarray(scores)[:count, :k], np.asarray(ids)[:count, :k]))
        scores, ids = map(np.concatenate, zip(*parts, strict=True))
        return scores, ids.astype(np.int64)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _make_search(mesh: Any, documents: int) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def local(queries: Any, vectors: Any, k: int) -> tuple[Any, Any]:
        """Return the best scores and row numbers [Q, min(k, N)] of this device's vectors [N, D]."""
        count = vectors.shape[0]
        first = jax.lax.axis_index("rows") * count
        scores = jnp.dot(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)  # [Q, N]
        is_row = first + jnp.arange(count) < documents
        best, places = jax.lax.top_k(jnp.where(is_row, scores, -jnp.inf), min(k, count))
        return best, places + first

    def search(queries: Any, vectors: Any, k: int) -> tuple[Any, Any]:
        spread = jax.shard_map(
            lambda q, v: local(q, v, k),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("rows")),
            out_specs=PartitionSpec(None, "rows"),
        )
        scores, ids = spread(queries, vectors)  # [Q, devices * k], rows of earlier devices first
        # top_k takes the earlier of equals, here as on each device: ties stay in corpus order.
        best, places = jax.lax.top_k(scores, k)
        return best, jnp.take_along_axis(ids, places, axis=1)

    return jax.jit(search, static_argnums=2)
