"""Padding of packed rows to the block size of a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def pad_tokens(x: Array, length: int) -> Array:
    """Pad [B, T, N, H] with zeros to `length` tokens."""
    padding = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
