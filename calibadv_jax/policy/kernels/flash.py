"""JAX's own flash attention kernels for packed rows: Splash on TPU, Triton on GPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as triton
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

LANES = 128  # Splash wants blocks of a multiple of this
TRITON_BLOCK = 64


def splash_attention(q: Array, k: Array, v: Array, segment_ids: Array, interpret: bool = False) -> Array:
    """Attend causally within segments int32 [B, T]: q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]."""
    length, num_heads, head_dim = q.shape[1:]
    padded = -(-length // LANES) * LANES
    block = next(size for size in (512, 256, LANES) if padded % size == 0)
    # Larger blocks, and the fused backward kernel, need more memory in TPU's compiler than they save time.
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(names, block)
    mask = masks.MultiHeadMask([masks.CausalMask((padded, padded))] * num_heads)
    options: dict[str, Any] = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    kernel = splash.make_splash_mha(mask, block_sizes=splash.BlockSizes(**sizes), **options)
    k = k * (1.0 / math.sqrt(head_dim))  # the kernel does not scale; keys are fewer than queries
    q, k, v = (_padded(x, padded).transpose(0, 2, 1, 3) for x in (q, k, v))
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded - length)))
    out = jax.vmap(kernel)(q, k, v, segment_ids=splash.SegmentIds(segments, segments))
    return out.transpose(0, 2, 1, 3)[:, :length].astype(v.dtype)


def triton_attention(q: Array, k: Array, v: Array, segment_ids: Array, interpret: bool = False) -> Array:
    """Do the same by Triton (Ampere and later)."""
    length, num_heads, head_dim = q.shape[1:]
    padded = -(-length // TRITON_BLOCK) * TRITON_BLOCK
    repeats = num_heads // k.shape[2]  # the kernel knows no groups of queries
    q, k, v = (_padded(x, padded) for x in (q, jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2)))
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded - length)))
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = triton.BlockSizes(TRITON_BLOCK, TRITON_BLOCK, **dict.fromkeys(names, TRITON_BLOCK // 2))
    scale = 1.0 / math.sqrt(head_dim)
    out = triton.mha(q, k, v, segments, scale, causal=True, block_sizes=sizes, interpret=interpret)
    return out[:, :length]


def _padded(x: Array, length: int) -> Array:
    """[B, T, N, H] with zeros up to `length` tokens, which are a segment of their own."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
