"""Parts of a layer with gradients of their own; a CPU gains by them.

Differentiated by JAX itself, RMS norm and gate keep each intermediate array of all tokens: on a CPU, where
nothing is fused across the two passes, writing and reading these costs more than computing them again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Saved = tuple[Any, ...]
MASKED = -1e30  # finite, so that a row without any visible key gives no NaN
FIRST_WITH_FIRST = (((0,), (0,)), ((), ()))
LAST_WITH_LAST = (((1,), (1,)), ((), ()))


def inner_product(x: Array, y: Array) -> Array:
    """Sum x * y over the last axis: one product, since `sum` takes XLA's CPU code 7 to 18 times as long."""
    return jnp.einsum("...d,...d->...", x, y, precision=jax.lax.Precision.HIGHEST)


def rows_product(x: Array, weights: Array, dimensions: Any = None, **_: Any) -> Array:
    """Multiply x [..., D] and weights [D, F], as `jax.lax.dot_general` of `nnx.Linear` does: [..., F].

    The gradient of the weights is one product of two matrices of all tokens, both as they lie in memory.
    JAX's own sums over two axes, for which XLA's CPU compiler transposes an operand: three times as slow.
    """
    return _product(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], weights.shape[1])


@jax.custom_vjp
def _product(x: Array, weights: Array) -> Array:
    return x @ weights


def _product_backward(saved: Saved, gradient: Array) -> tuple[Array, Array]:
    x, weights = saved
    to_x = jax.lax.dot_general(gradient, weights, LAST_WITH_LAST)
    return to_x, jax.lax.dot_general(x, gradient, FIRST_WITH_FIRST)


_product.defvjp(lambda x, weights: (_product(x, weights), (x, weights)), _product_backward)


class RMSNorm(nnx.RMSNorm):
    """Flax's over the last axis, with the same parameter and values."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        assert mask is None and self.scale is not None
        x, scale = self.promote_dtype((x, self.scale[...]), dtype=self.dtype)
        return _normalised(self.epsilon, x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalised(epsilon: float, x: Array, scale: Array) -> Array:
    return _norm_forward(epsilon, x, scale)[0]


def _norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, Saved]:
    exact = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + epsilon)
    return (exact * (inverse * scale.astype(jnp.float32))).astype(x.dtype), (x, scale, inverse)


def _norm_backward(epsilon: float, saved: Saved, gradient: Array) -> tuple[Array, Array]:
    x, scale, inverse = saved
    unit = x.astype(jnp.float32) * inverse
    change = gradient.astype(jnp.float32)
    to_unit = change * scale.astype(jnp.float32)
    along = inner_product(to_unit, unit)[..., None] / x.shape[-1]
    to_x = inverse * (to_unit - unit * along)
    to_scale = jnp.sum(change * unit, axis=range(x.ndim - 1))
    return to_x.astype(x.dtype), to_scale.astype(scale.dtype)


_normalised.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def gated(gate: Array, up: Array) -> Array:
    """silu(gate) * up, all of one shape and dtype."""
    return jax.nn.silu(gate) * up


def _gated_backward(saved: Saved, gradient: Array) -> tuple[Array, Array]:
    gate, up = saved
    share = jax.nn.sigmoid(gate)
    return gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)
