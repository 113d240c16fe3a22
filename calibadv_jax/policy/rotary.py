"""Rotary position embeddings."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from calibadv_jax.policy.architecture import Architecture, RopeScaling


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
