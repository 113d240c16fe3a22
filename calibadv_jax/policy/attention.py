"""Rotary embeddings and attention: packed rows for the learner, cached rows for the sampler."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from calibadv_jax.policy.architecture import Architecture, RopeScaling

Kernel = Literal["xla", "cudnn"]

MASKED = -1e30  # finite, so that a row without any visible key gives no NaN


def inverse_frequencies(architecture: Architecture) -> jax.Array:
    """Rotary frequencies, float32 [H/2], with Llama 3's scaling where the config asks for it."""
    exponents = jnp.arange(0, architecture.head_dim, 2, dtype=jnp.float32) / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def _llama3(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_length / scaling.low_freq_factor
    high = scaling.original_length / scaling.high_freq_factor
    smooth = (scaling.original_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = jnp.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return jnp.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies rotary embeddings, halves convention of HuggingFace. x [B, T, N, H]; cos, sin [B, T, H/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, kernel: Kernel, chunk: int
) -> jax.Array:
    """Causal attention within the segments of packed rows.

    Args:
        q: [B, T, N, H]. k, v: [B, T, K, H].
        segment_ids: int32 [B, T]; tokens see only their own segment.
        kernel: "xla" or "cudnn" (bfloat16/float16 on CUDA).
        chunk: queries handled at once by the XLA kernel; T must be a multiple, or smaller.

    Returns:
        [B, T, N, H].
    """
    length = q.shape[1]
    if kernel == "cudnn":
        mask = _packed_mask(segment_ids, segment_ids, 0)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if length <= chunk:
        return _masked_attention(q, k, v, _packed_mask(segment_ids, segment_ids, 0))
    num_chunks = math.ceil(length / chunk)
    padded = num_chunks * chunk - length
    q = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
    query_segments = jnp.pad(segment_ids, ((0, 0), (0, padded)))

    @jax.checkpoint
    def attend(index: jax.Array) -> jax.Array:
        start = index * chunk
        queries = jax.lax.dynamic_slice_in_dim(q, start, chunk, 1)
        segments = jax.lax.dynamic_slice_in_dim(query_segments, start, chunk, 1)
        mask = _packed_mask(segments, segment_ids, start)
        return _masked_attention(queries, k, v, mask)

    chunks = jax.lax.map(attend, jnp.arange(num_chunks))  # [C, B, chunk, N, H]
    return jnp.moveaxis(chunks, 0, 1).reshape(q.shape)[:, :length]


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


def _packed_mask(query_segments: jax.Array, key_segments: jax.Array, start: jax.Array | int) -> jax.Array:
    """bool [B, 1, Tq, Tk]: same segment and not in the future; queries begin at column `start`."""
    queries = start + jnp.arange(query_segments.shape[1])
    causal = queries[:, None] >= jnp.arange(key_segments.shape[1])
    return (causal & (query_segments[:, :, None] == key_segments[:, None, :]))[:, None]


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens to a KV cache whose column is the position.

    Args:
        q: [B, n, N, H] at `positions` int32 [B, n].
        k, v: [B, K, T, H], the new tokens already written.

    Returns:
        [B, n, N, H].
    """
    batch, num_new, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    grouped = q.reshape(batch, num_new, num_kv, num_heads // num_kv, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, num_kv, -1, head_dim)  # [B, K, n*G, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (1.0 / math.sqrt(head_dim))
    visible = jnp.arange(k.shape[2]) <= jnp.repeat(positions, num_heads // num_kv, axis=1)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights, v)
    out = out.reshape(batch, num_kv, num_new, num_heads // num_kv, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, num_new, num_heads, head_dim)
