"""Padding of packed rows to the block size of a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of a number that is not below a length.

    Args:
        length: Number of tokens.
        multiple: Number above 0, such as the tokens of a kernel's block.

    Returns:
        The length itself if it is a multiple already.
    """
    return -(-length // multiple) * multiple


def pad_tokens(x: Array, length: int) -> Array:
    """Pad queries, keys or values with zeros at their end.

    Args:
        x: [B, T, N, H].
        length: Number of tokens of the result, at least T.

    Returns:
        [B, length, N, H] in the dtype of `x`.
    """
    padding = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
