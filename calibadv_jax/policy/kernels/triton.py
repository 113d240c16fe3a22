"""JAX's Pallas Triton attention for packed rows on GPU (Ampere or later).

JAX deprecates the kernel from 0.11 on, so that this module is imported only where it is chosen.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as triton

from calibadv_jax.policy.kernels.padding import pad_tokens, round_up
from calibadv_jax.policy.recomputation import name_attention

BLOCK = 64
BACKWARD_BLOCK = BLOCK // 2
BLOCK_SIZES = triton.BlockSizes(
    block_q=BLOCK,
    block_k=BLOCK,
    block_q_dkv=BACKWARD_BLOCK,
    block_kv_dkv=BACKWARD_BLOCK,
    block_q_dq=BACKWARD_BLOCK,
    block_kv_dq=BACKWARD_BLOCK,
)
# What JAX's functions take beside the arrays.
DEFAULTS: dict[str, Any] = {
    "backward_pass_impl": "triton",
    "num_warps": None,
    "num_stages": 2,
    "grid": None,
    "debug": False,
}


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
    length = q.shape[1]
    padded_length = round_up(length, BLOCK)
    # The padding is in segment 0, as that of the batch.
    segments = jnp.pad(segment_ids, ((0, 0), (0, padded_length - length)))
    queries, keys, values = (pad_tokens(x, padded_length) for x in (q, k, v))
    return _attention(interpret, queries, keys, values, segments)[:, :length]


# JAX's own gradient would keep the repeated keys and values, and gives the statistics no name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(interpret: bool, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _forward(interpret, q, k, v, segments)[0]


def _forward(interpret: bool, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Any]:
    keys, values = _repeat(q, k), _repeat(q, v)
    out, log_sum_exp = triton.mha(
        q, keys, values, segments, return_residuals=True, interpret=interpret, **_options(q)
    )
    out, log_sum_exp = name_attention(out, log_sum_exp)
    return out, (q, k, v, segments, out, log_sum_exp)


def _backward(interpret: bool, saved: Any, gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, log_sum_exp = saved
    residuals = (q, _repeat(q, k), _repeat(q, v), segments, out, log_sum_exp)
    q_gradient, key_gradients, value_gradients, _ = triton._mha_backward(
        **_options(q), interpret=interpret, return_residuals=False, res=residuals, do=gradient, **DEFAULTS
    )
    return q_gradient, _sum_repeated(key_gradients, k), _sum_repeated(value_gradients, v), None


_attention.defvjp(_forward, _backward)


def _options(q: Array) -> dict[str, Any]:
    return {"sm_scale": 1.0 / math.sqrt(q.shape[-1]), "causal": True, "block_sizes": BLOCK_SIZES}


def _repeat(q: Array, x: Array) -> Array:
    """Repeat [B, T, K, H] to [B, T, N, H]: the kernel needs a key-value head for every query head."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], 2)


def _sum_repeated(gradients: Array, x: Array) -> Array:
    """Sum the gradients [B, T, N, H] of the repeated heads to the shape and dtype of [B, T, K, H]."""
    batch, length, num_kv, head_dim = x.shape
    by_head = gradients.reshape(batch, length, num_kv, -1, head_dim)
    return by_head.sum(axis=3, dtype=jnp.float32).astype(x.dtype)
