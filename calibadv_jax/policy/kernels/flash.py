"""JAX's own flash attention kernels for packed rows: Splash on TPU, Triton on GPU."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as triton
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

SPLASH_LANES = 128  # Splash needs blocks whose side is a multiple of this.
SPLASH_BLOCKS = (512, 256, SPLASH_LANES)  # Sides of blocks, the most preferred first.
TRITON_BLOCK = 64
TRITON_BACKWARD_BLOCK = TRITON_BLOCK // 2


def splash_attention(q: Array, k: Array, v: Array, segment_ids: Array, interpret: bool = False) -> Array:
    """Attend causally within segments, by Splash on a TPU.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        segment_ids: int32 [B, T]; a token sees only its own segment.
        interpret: run the kernel's operations one by one, on any device.

    Returns:
        [B, T, N, H] in the dtype of `v`.
    """
    length, num_heads, head_dim = q.shape[1:]
    padded_length = _round_up(length, SPLASH_LANES)
    block = next(size for size in SPLASH_BLOCKS if padded_length % size == 0)
    # Larger blocks, and the fused backward kernel, need more memory in TPU's compiler than they save time.
    block_sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    causal_mask = masks.CausalMask((padded_length, padded_length))
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([causal_mask] * num_heads),
        block_sizes=block_sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel does not scale the scores. The keys are scaled, since they are fewer than the queries.
    k = k * (1.0 / math.sqrt(head_dim))
    queries = _pad_tokens(q, padded_length).transpose(0, 2, 1, 3)  # [B, N, T, H]
    keys = _pad_tokens(k, padded_length).transpose(0, 2, 1, 3)  # [B, K, T, H]
    values = _pad_tokens(v, padded_length).transpose(0, 2, 1, 3)
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded_length - length)))
    out = jax.vmap(kernel)(queries, keys, values, segment_ids=splash.SegmentIds(segments, segments))
    return out.transpose(0, 2, 1, 3)[:, :length].astype(v.dtype)


def triton_attention(q: Array, k: Array, v: Array, segment_ids: Array, interpret: bool = False) -> Array:
    """Attend causally within segments, by Triton on a GPU (Ampere or later).

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        segment_ids: int32 [B, T]; a token sees only its own segment.
        interpret: run the kernel's operations one by one, on any device.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    length, num_heads, head_dim = q.shape[1:]
    padded_length = _round_up(length, TRITON_BLOCK)
    # The kernel needs a key-value head for every query head.
    queries_per_kv = num_heads // k.shape[2]
    repeated_k = jnp.repeat(k, queries_per_kv, 2)  # [B, T, N, H]
    repeated_v = jnp.repeat(v, queries_per_kv, 2)
    queries = _pad_tokens(q, padded_length)
    keys = _pad_tokens(repeated_k, padded_length)
    values = _pad_tokens(repeated_v, padded_length)
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded_length - length)))
    block_sizes = triton.BlockSizes(
        block_q=TRITON_BLOCK,
        block_k=TRITON_BLOCK,
        block_q_dkv=TRITON_BACKWARD_BLOCK,
        block_kv_dkv=TRITON_BACKWARD_BLOCK,
        block_q_dq=TRITON_BACKWARD_BLOCK,
        block_kv_dq=TRITON_BACKWARD_BLOCK,
    )
    scale = 1.0 / math.sqrt(head_dim)
    out = triton.mha(
        queries, keys, values, segments, scale, causal=True, block_sizes=block_sizes, interpret=interpret
    )
    return out[:, :length]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad_tokens(x: Array, length: int) -> Array:
    """Pad [B, T, N, H] with zeros to `length` tokens. The padding is in segment 0."""
    padding = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
