"""Parts of a layer with hand-written gradients, which are faster on a CPU.

Differentiated by JAX itself, RMS norm and gate keep each intermediate array of all tokens. On a CPU, where
nothing is fused across the two passes, writing and reading these costs more than computing them again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

Saved = tuple[Any, ...]  # what a forward pass keeps for its backward pass

# Score of a key that a query does not see. It is finite, so that a row without any visible key gives no NaN.
MASKED = -1e30
# Dimension numbers of `jax.lax.dot_general` for two matrices: which axes are summed.
SUM_FIRST_AXES = (((0,), (0,)), ((), ()))
SUM_LAST_WITH_FIRST = (((1,), (0,)), ((), ()))
SUM_LAST_AXES = (((1,), (1,)), ((), ()))


def inner_product(x: Array, y: Array) -> Array:
    """Sum x * y over the last axis.

    It is written as a product, since XLA's code for a CPU takes 7 to 18 times as long for `sum`.

    Args:
        x: [..., D].
        y: [..., D], of the same shape and dtype.

    Returns:
        [...] in the arguments' dtype.
    """
    return jnp.einsum("...d,...d->...", x, y, precision=jax.lax.Precision.HIGHEST)


# --- Product of activations and weights ---


def rows_product(x: Array, weights: Array, dimensions: Any = None, **_: Any) -> Array:
    """Multiply activations and weights: [..., D], [D, F] -> [..., F].

    A replacement of `jax.lax.dot_general` in `nnx.Linear`. The gradient of the weights is one product of two
    matrices of all tokens, both in their layout in memory. JAX's own gradient sums over two axes, for which
    XLA's CPU compiler transposes an operand: it takes three times as long.

    Args:
        x: [..., D].
        weights: [D, F], in the dtype of `x`.
        dimensions: ignored; the last axis of x and the first one of the weights are summed.

    Returns:
        [..., F] in the dtype of `x`. Further keyword arguments of `jax.lax.dot_general` are ignored.
    """
    tokens = x.reshape(-1, x.shape[-1])  # [T, D]
    product = _product(tokens, weights)  # [T, F]
    return product.reshape(*x.shape[:-1], weights.shape[1])


def _product_in(dtype: DTypeLike, x: Array, y: Array, dimensions: Any) -> Array:
    """Return the product of two matrices, which is summed in float32 and then rounded to `dtype`.

    Asked for a bfloat16 result, XLA's CPU compiler converts both operands to float32 first. Asked for a
    float32 result, it uses the CPU's bfloat16 instructions (AMX), which are several times as fast.
    """
    product = jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
    return product.astype(dtype)


@jax.custom_vjp
def _product(x: Array, weights: Array) -> Array:
    return _product_in(x.dtype, x, weights, SUM_LAST_WITH_FIRST)  # TD,DF->TF


def _product_forward(x: Array, weights: Array) -> tuple[Array, Saved]:
    return _product(x, weights), (x, weights)


def _product_backward(saved: Saved, gradient: Array) -> tuple[Array, Array]:
    x, weights = saved  # [T, D], [D, F]
    x_gradient = _product_in(x.dtype, gradient, weights, SUM_LAST_AXES)  # TF,DF->TD
    weights_gradient = _product_in(weights.dtype, x, gradient, SUM_FIRST_AXES)  # TD,TF->DF
    return x_gradient, weights_gradient


_product.defvjp(_product_forward, _product_backward)


# --- RMS norm ---


class RMSNorm(nnx.RMSNorm):
    """Flax's RMS norm over the last axis, with the same parameter and values."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Return x / sqrt(mean(x²) + epsilon) * scale.

        Args:
            x: [..., D].
            mask: not supported; None.

        Returns:
            [..., D] in the compute dtype; the mean is computed in float32.

        Raises:
            AssertionError: if there is a mask.
        """
        assert mask is None
        assert self.scale is not None
        x, scale = self.promote_dtype((x, self.scale[...]), dtype=self.dtype)
        return _normalise(self.epsilon, x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(epsilon: float, x: Array, scale: Array) -> Array:
    return _norm_forward(epsilon, x, scale)[0]


def _norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, Saved]:
    x_float32 = x.astype(jnp.float32)  # [..., D]
    mean_square = jnp.mean(x_float32 * x_float32, -1, keepdims=True)  # [..., 1]
    inverse_rms = jax.lax.rsqrt(mean_square + epsilon)
    normalised = x_float32 * (inverse_rms * scale.astype(jnp.float32))
    return normalised.astype(x.dtype), (x, scale, inverse_rms)


def _norm_backward(epsilon: float, saved: Saved, gradient: Array) -> tuple[Array, Array]:
    x, scale, inverse_rms = saved
    unit = x.astype(jnp.float32) * inverse_rms  # [..., D], of root mean square 1
    out_gradient = gradient.astype(jnp.float32)
    unit_gradient = out_gradient * scale.astype(jnp.float32)
    # A change of x along itself does not change the unit vector.
    along_unit = inner_product(unit_gradient, unit)[..., None] / x.shape[-1]
    x_gradient = inverse_rms * (unit_gradient - unit * along_unit)
    scale_gradient = jnp.sum(out_gradient * unit, axis=range(x.ndim - 1))  # [D]
    return x_gradient.astype(x.dtype), scale_gradient.astype(scale.dtype)


_normalise.defvjp(_norm_forward, _norm_backward)


# --- The gate of SwiGLU ---


@jax.custom_vjp
def gated(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up.

    Args:
        gate: [..., F].
        up: [..., F], of the same shape and dtype.

    Returns:
        [..., F] in the arguments' dtype.
    """
    return jax.nn.silu(gate) * up


def _gated_forward(gate: Array, up: Array) -> tuple[Array, Saved]:
    return gated(gate, up), (gate, up)


def _gated_backward(saved: Saved, gradient: Array) -> tuple[Array, Array]:
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    # silu(g) = g σ(g), so silu'(g) = σ(g) (1 + g (1 - σ(g))).
    gate_gradient = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    up_gradient = gradient * gate * sigmoid
    return gate_gradient, up_gradient


gated.defvjp(_gated_forward, _gated_backward)
