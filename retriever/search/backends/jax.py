"""Exact search on accelerators: the matrix sharded over all devices by rows, product and top-k."""

from __future__ import annotations

from typing import Any

import numpy as np

from retriever.errors import require
from retriever.search.index_memory import require_memory

QUERIES = 32  # at once; scores of 32 queries over 21 million rows take 2.7 GB over all devices


class JaxVectors:
    """Ranks by inner product; finds what a flat FAISS index finds."""

    def __init__(self, vectors: np.ndarray, what: str):
        """Puts the vectors onto the devices, a device's part at a time.

        Args:
            vectors: float32 [documents, dimension], usually memory-mapped.
            what: named in errors.

        Raises:
            RetrieverError: JAX is missing, or the devices' memory is too small.
        """
        jax = require("jax", "pip install jax (or jax[tpu]), or leave out --engine jax")
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.documents, self.dimension = vectors.shape
        devices = jax.devices()
        _require_device_memory(devices, vectors.nbytes, what)
        mesh = Mesh(np.array(devices), ("rows",))
        part = -(-self.documents // len(devices))  # rows a device; the last is padded

        def rows(index: Any) -> np.ndarray:
            """The part of one device, from its slices of both dimensions."""
            start = index[0].start or 0
            block = np.asarray(vectors[start : start + part], np.float32)
            return np.pad(block, ((0, part - len(block)), (0, 0)))

        sharding = NamedSharding(mesh, PartitionSpec("rows"))
        shape = (part * len(devices), self.dimension)
        self._vectors = jax.make_array_from_callback(shape, sharding, rows)
        self._search = _make_search(mesh, self.documents)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [Q, D] -> float32 [Q, k] and int64 [Q, k], best first, ties in corpus order."""
        size = min(self.documents, _bucket(k))  # few shapes are compiled
        found = []
        for start in range(0, len(vectors), QUERIES):
            part = np.asarray(vectors[start : start + QUERIES], np.float32)
            padded = np.pad(part, ((0, _bucket(len(part)) - len(part)), (0, 0)))
            scores, ids = self._search(padded, self._vectors, size)
            found.append((np.asarray(scores)[: len(part), :k], np.asarray(ids)[: len(part), :k]))
        scores, ids = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, ids.astype(np.int64)


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _make_search(mesh: Any, documents: int) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def local(queries: Any, vectors: Any, k: int) -> tuple[Any, Any]:
        """[Q, D] and this device's [N, D] -> its best [Q, min(k, N)] scores and row numbers."""
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


def _require_device_memory(devices: list[Any], need: int, what: str) -> None:
    state = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    free = (state["bytes_limit"] - state["bytes_in_use"]) * len(devices) if state else None
    require_memory(
        need,
        f"{what} on {len(devices)} {devices[0].platform} device(s)",
        "take more devices, or --engine faiss --mmap",
        free,
    )
