"""Attention within packed rows, by one of several kernels. That of the sampler to its cache: `cache`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from calibadv_jax.policy.kernels.blockwise import MASKED, blockwise_attention
from calibadv_jax.policy.kernels.flash import splash_attention, triton_attention
from calibadv_jax.policy.sharding import RULES, axis_size

Kernel = Literal["xla", "splash", "triton", "cudnn"]
KERNELS: dict[str, Kernel] = {"tpu": "splash", "gpu": "triton"}  # of a backend; "xla" where none is named
SHARING: tuple[Kernel, ...] = ("xla", "cudnn")  # in which sequences may share what they begin with
Local = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kernel: Kernel,
    chunk: int,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within the segments of packed rows, or within the branches of their trees.

    No kernel but cuDNN's holds an array of T x T once T is above `chunk`; see benchmarks/learner.md.

    Args:
        q: [B, T, N, H]. k, v: [B, T, K, H].
        segment_ids: int32 [B, T]; tokens see only their own segment, whose columns are contiguous.
        kernel: "xla" anywhere, "splash" on TPU, "triton" on GPU, "cudnn" (bfloat16/float16 on CUDA).
        chunk: side of the blocks of the XLA kernel; shorter rows are one block.
        ends: int32 [B, T] in place of the segments: the first column that does not see this one. Only for a
            kernel of SHARING.

    Returns:
        [B, T, N, H].
    """
    if kernel not in SHARING:
        assert ends is None, kernel
        flash = splash_attention if kernel == "splash" else triton_attention
        return _on_every_device(flash, q, k, v, segment_ids)
    columns = jnp.arange(q.shape[1])
    ends = _segment_ends(segment_ids) if ends is None else jnp.maximum(ends, columns + 1)
    if kernel == "xla" and q.shape[1] > chunk:
        return _on_every_device(lambda *rows: blockwise_attention(*rows, chunk), q, k, v, ends)
    mask = ((columns[:, None] >= columns) & (columns[:, None] < ends[:, None, :]))[:, None]  # [B, 1, T, T]
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    return _masked_attention(q, k, v, mask)


def keys_computed(kernel: Kernel, length: int, chunk: int) -> float:
    """Keys that `packed_attention` computes for a token of a row of `length` tokens, on average.

    Those that the row's width adds: what follows the segments alone is the same in every row.
    """
    if kernel == "cudnn" or (kernel == "xla" and length <= chunk):
        return float(length)
    return 0.0 if kernel == "xla" else length / 2  # causal


def _on_every_device(
    kernel: Local, q: jax.Array, k: jax.Array, v: jax.Array, of_rows: jax.Array
) -> jax.Array:
    """Calls `kernel` with the rows and heads that each device of the mesh holds.

    The compiler cannot split these kernels by itself, and the blocks that one may skip are another's work.
    Key-value heads that the tensor axis does not divide are held by all and chosen by each.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(q, k, v, of_rows)
    num_heads, num_kv = q.shape[2], k.shape[2]
    tensor = axis_size(mesh, RULES["heads"])
    rows = RULES["batch"] if q.shape[0] % axis_size(mesh, RULES["batch"]) == 0 else None
    heads = RULES["heads"] if num_heads % tensor == 0 else None
    kv_heads = heads if num_kv % tensor == 0 else None

    def local(q: jax.Array, k: jax.Array, v: jax.Array, of_rows: jax.Array) -> jax.Array:
        if heads is not None and kv_heads is None:
            mine = jax.lax.axis_index(heads) * q.shape[2] + jnp.arange(q.shape[2])
            k, v = (x[:, :, mine // (num_heads // num_kv)] for x in (k, v))
        return kernel(q, k, v, of_rows)

    queries, keys = P(rows, None, heads, None), P(rows, None, kv_heads, None)
    return jax.shard_map(
        local, in_specs=(queries, keys, keys, P(rows, None)), out_specs=queries, check_vma=False
    )(q, k, v, of_rows)


def _masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, Tq, N, H]; k, v [B, K, Tk, H]; mask bool [B, 1, Tq, Tk] -> [B, Tq, N, H].

    Heads come first, and the queries of a key-value head are one matrix: plain batched products.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv, num_keys = k.shape[1:3]
    grouped = q.transpose(0, 2, 1, 3).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*Tq, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, num_kv, -1, num_queries, num_keys) * (1.0 / math.sqrt(head_dim))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights.reshape(batch, num_kv, -1, num_keys), v)
    return out.reshape(batch, num_heads, num_queries, head_dim).transpose(0, 2, 1, 3)


def _segment_ends(segment_ids: jax.Array) -> jax.Array:
    """int32 [B, T]: one past the last column of each one's segment."""
    columns = jnp.arange(1, segment_ids.shape[1] + 1)
    is_last = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return jax.lax.cummin(jnp.where(is_last, columns, len(columns)), axis=1, reverse=True)
