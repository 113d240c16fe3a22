"""The matrix products of the layers, with gradients as XLA's CPU libraries compute them best."""

from __future__ import annotations

from typing import Any

import jax

FIRST_WITH_FIRST = (((0,), (0,)), ((), ()))
LAST_WITH_LAST = (((1,), (1,)), ((), ()))


def rows_product(x: jax.Array, weights: jax.Array, dimensions: Any = None, **_: Any) -> jax.Array:
    """x [..., D], weights [D, F] -> [..., F]; may stand for `jax.lax.dot_general` in `nnx.Linear`.

    The gradient of the weights is one product of two matrices of all tokens, both as they lie in memory.
    Differentiated by JAX itself, it sums over two axes, for which XLA's CPU compiler writes one operand anew,
    transposed, and takes a library that is three times as slow.
    """
    return _product(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], weights.shape[1])


@jax.custom_vjp
def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x @ weights


def _forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weights), (x, weights)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = saved
    to_x = jax.lax.dot_general(gradient, weights, LAST_WITH_LAST)
    return to_x, jax.lax.dot_general(x, gradient, FIRST_WITH_FIRST)


_product.defvjp(_forward, _backward)
