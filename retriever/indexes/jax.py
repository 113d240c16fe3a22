"""Exact search on accelerators: the matrix sharded over all devices by rows, product and top-k.

Shapes: Q queries, N rows of a device, D elements of a vector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import IndexOptions
from retriever.indexes.faiss import FaissBackend
from retriever.indexes.faiss_files import index_file, map_flat
from retriever.indexes.resources import require_memory
from retriever.interfaces import Vectors

# Queries searched at once: their scores over 21 million rows take 2.7 GB over all devices.
QUERIES = 32


class JaxBackend(FaissBackend):
    """A flat FAISS file, searched on all JAX devices."""

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors:
        """Put the vectors of a folder's file, or of a bare file, onto all devices."""
        path = index_file(folder)
        return JaxVectors(map_flat(path), str(path))


class JaxVectors:
    """Ranks vectors by inner product as a flat FAISS index does.

    Args:
        vectors: float32 [documents, D], also memory-mapped.
        name: The index, for messages.

    Attributes:
        documents: Number of vectors.
        dimension: Number of elements D of each vector.

    Raises:
        RetrieverError: The devices' memory is too small.
    """

    def __init__(self, vectors: np.ndarray, name: str):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.documents, self.dimension = vectors.shape
        devices = jax.devices()
        place = f"{name} on {len(devices)} {devices[0].platform} device(s)"
        advice = "take more devices, or --engine faiss --mmap"
        require_memory(vectors.nbytes, place, advice, _free_memory(devices))
        rows_per_device = -(-self.documents // len(devices))  # rounded up: the last device has padding

        def device_rows(index: Any) -> np.ndarray:
            """Return the rows of a device, padded with zeros: float32 [rows_per_device, D]."""
            start = index[0].start or 0
            block = np.asarray(vectors[start : start + rows_per_device], np.float32)
            return np.pad(block, ((0, rows_per_device - len(block)), (0, 0)))

        mesh = Mesh(np.array(devices), ("rows",))
        sharding = NamedSharding(mesh, PartitionSpec("rows"))
        shape = (rows_per_device * len(devices), self.dimension)
        self._vectors = jax.make_array_from_callback(shape, sharding, device_rows)
        self._search = _make_search(mesh, self.documents)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores float32 [Q, k] and row numbers int64 [Q, k], as `interfaces.Vectors` says.

        Args:
            vectors: float32 [Q, D], at least one query.
            k: Number of rows for each query; a larger one than `documents` counts as `documents`.
        """
        size = min(self.documents, _power_of_two(k))  # few shapes are compiled
        score_blocks = []
        id_blocks = []
        for start in range(0, len(vectors), QUERIES):
            queries = np.asarray(vectors[start : start + QUERIES], np.float32)
            count = len(queries)
            padded = np.pad(queries, ((0, _power_of_two(count) - count), (0, 0)))
            scores, ids = self._search(padded, self._vectors, size)
            score_blocks.append(np.asarray(scores)[:count, :k])
            id_blocks.append(np.asarray(ids)[:count, :k])
        return np.concatenate(score_blocks), np.concatenate(id_blocks).astype(np.int64)


def _free_memory(devices: list[Any]) -> int | None:
    """Return the free bytes of all devices; None for the memory of the machine."""
    if devices[0].platform == "cpu":
        return None
    state = devices[0].memory_stats()
    if not state:
        return None
    return (state["bytes_limit"] - state["bytes_in_use"]) * len(devices)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below a count."""
    return 1 << (count - 1).bit_length()


def _make_search(mesh: Any, documents: int) -> Any:
    """Return the compiled search.

    It takes queries [Q, D], vectors [rows, D] and k, and returns scores and row numbers [Q, k].
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def search_device(queries: Any, vectors: Any, k: int) -> tuple[Any, Any]:
        """Return the best scores and row numbers [Q, min(k, N)] of this device's vectors [N, D]."""
        count = vectors.shape[0]
        first = jax.lax.axis_index("rows") * count
        scores = jnp.dot(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)  # [Q, N]
        is_row = first + jnp.arange(count) < documents  # [N], False for padding
        best, places = jax.lax.top_k(jnp.where(is_row, scores, -jnp.inf), min(k, count))
        return best, places + first

    def search(queries: Any, vectors: Any, k: int) -> tuple[Any, Any]:
        def search_k(queries: Any, vectors: Any) -> tuple[Any, Any]:
            return search_device(queries, vectors, k)

        search_all_devices = jax.shard_map(
            search_k,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("rows")),
            out_specs=PartitionSpec(None, "rows"),
        )
        # [Q, devices * min(k, N)], the rows of earlier devices first.
        scores, ids = search_all_devices(queries, vectors)
        # top_k takes the earlier of equals, here as on each device: ties stay in corpus order.
        best, places = jax.lax.top_k(scores, k)
        return best, jnp.take_along_axis(ids, places, axis=1)

    return jax.jit(search, static_argnums=2)
