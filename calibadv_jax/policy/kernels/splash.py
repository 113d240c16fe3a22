"""JAX's Splash attention for packed rows on TPU."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from calibadv_jax.policy.kernels.padding import pad_tokens, round_up
from calibadv_jax.policy.recomputation import ATTENTION

LANES = 128  # Splash needs blocks whose side is a multiple of this.
BLOCKS = (512, 256, LANES)  # Sides of blocks, the most preferred first.


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
    padded_length = round_up(length, LANES)
    block = next(size for size in BLOCKS if padded_length % size == 0)
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
        residual_checkpoint_name=ATTENTION,
    )
    # The kernel does not scale the scores. The keys are scaled, since they are fewer than the queries.
    k = k * (1.0 / math.sqrt(head_dim))
    queries = pad_tokens(q, padded_length).transpose(0, 2, 1, 3)  # [B, N, T, H]
    keys = pad_tokens(k, padded_length).transpose(0, 2, 1, 3)  # [B, K, T, H]
    values = pad_tokens(v, padded_length).transpose(0, 2, 1, 3)
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded_length - length)))
    out = jax.vmap(kernel)(queries, keys, values, segment_ids=splash.SegmentIds(segments, segments))
    return out.transpose(0, 2, 1, 3)[:, :length].astype(v.dtype)
