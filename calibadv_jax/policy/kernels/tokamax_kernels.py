"""tokamax's attention for packed rows on GPU: Mosaic on Hopper and Blackwell, Triton on Ampere and Ada.

Keys are not repeated for grouped queries. Mosaic holds no array of T x T; the backward pass of the Triton
kernel makes a mask of T x T bytes for each row. The functions of tokamax that take a first key for each query
are not public: its version is pinned (`attention.TOKAMAX_VERSION`).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from tokamax._src import gpu_utils
from tokamax._src.ops.attention.base import DotProductAttention, Mask

from calibadv_jax.policy.kernels.padding import pad_tokens, round_up
from calibadv_jax.policy.recomputation import name_attention

CACHE_MISS = "Autotuning cache miss"

BLOCK = 128  # Rows are padded to a multiple of it, so that no block of a kernel is cut.


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Return whether a message of tokamax tells a user something.

    Args:
        record: a message that is about to be logged.

    Returns:
        False for the warning that a kernel was not tuned, which has 800 characters and comes at each trace.
    """
    return not record.msg.startswith(CACHE_MISS)


logging.getLogger("absl").addFilter(is_worth_reading)


def tokamax_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, kernel: DotProductAttention | None = None
) -> Array:
    """Attend causally within segments, by a kernel of tokamax.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        segment_ids: int32 [B, T]; a token sees only its own segment, whose columns are contiguous.
        kernel: tokamax's operation; None: the fastest one that JAX's default device has gradients for.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    length = q.shape[1]
    padded_length = round_up(length, BLOCK)
    starts = segment_starts(segment_ids)
    # The padding belongs to the last segment, which it does not change: no earlier token sees it.
    starts = jnp.pad(starts, ((0, 0), (0, padded_length - length)), mode="edge")
    queries, keys, values = (pad_tokens(x, padded_length) for x in (q, k, v))
    out = _attention(kernel or kernel_of_device(), queries, keys, values, starts)
    return out[:, :length]


def segment_starts(segment_ids: Array) -> Array:
    """Return where the segment of each token begins.

    Args:
        segment_ids: int32 [B, T]; the columns of a segment are contiguous.

    Returns:
        The first column of each column's segment, int32 [B, T].
    """
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    differs_from_previous = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = jnp.pad(differs_from_previous, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)


def kernel_of_device() -> DotProductAttention:
    """Return tokamax's operation for JAX's default device."""
    if gpu_utils.is_sm90() or gpu_utils.is_sm100():
        from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

        return PallasMosaicGpuFlashAttention()
    # Mosaic has no gradients for Ampere and Ada.
    from tokamax._src.ops.attention.pallas_triton import PallasTritonFlashAttention

    return PallasTritonFlashAttention()


# tokamax's own gradient gives the statistics of the softmax no name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel: DotProductAttention, q: Array, k: Array, v: Array, starts: Array) -> Array:
    return _forward(kernel, q, k, v, starts)[0]


def _forward(kernel: DotProductAttention, q: Array, k: Array, v: Array, starts: Array) -> tuple[Array, Any]:
    out, statistics = kernel(q, k, v, **_options(q, starts), return_residuals=True)
    out, *statistics = name_attention(out, *statistics)
    return out, (q, k, v, starts, out, tuple(statistics))


def _backward(kernel: DotProductAttention, saved: Any, gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, starts, out, statistics = saved
    bound = kernel.bind(q, k, v, **_options(q, starts))
    options = dict(bound.kwargs)
    del options["return_residuals"]
    assert kernel.vjp is not None
    gradients = kernel.vjp(statistics, out, gradient, *bound.args, **options)
    return gradients["q"], gradients["k"], gradients["v"], None


_attention.defvjp(_forward, _backward)


def _options(q: Array, starts: Array) -> dict[str, Any]:
    mask = Mask(is_causal=True, k_start=starts[:, None])  # [B, 1, T]: the same for every head
    return {"mask": mask, "logits_scale": 1.0 / math.sqrt(q.shape[-1])}
