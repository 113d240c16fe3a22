"""Rotary position embeddings: their frequencies, with Llama 3's or YaRN's scaling, and their application.

Letters in shapes: B rows, T tokens of a row, N heads, H head dimension.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from calibadv_jax.policy.architecture import Architecture, RopeScaling, YarnScaling

Rope = tuple[Array, Array]  # cosines and sines of each token's angles, float32 [B, T, H/2]


def inverse_frequencies(architecture: Architecture) -> Array:
    """Return the rotary frequencies, scaled if the architecture has `rope_scaling`.

    Args:
        architecture: `head_dim`, `rope_theta` and `rope_scaling` are read.

    Returns:
        float32 [H/2], in radians a token.
    """
    exponents = jnp.arange(0, architecture.head_dim, 2, dtype=jnp.float32) / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(frequencies, scaling, architecture)
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Array, scaling: RopeScaling) -> Array:
    """Divide the frequencies of long wavelengths by `factor`, keep short ones, and blend those between."""
    wavelengths = 2 * math.pi / frequencies  # in tokens
    longest_blended = scaling.original_length / scaling.low_freq_factor
    shortest_blended = scaling.original_length / scaling.high_freq_factor
    num_periods = scaling.original_length / wavelengths
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = (num_periods - scaling.low_freq_factor) / band
    blended = (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
    stretched = jnp.where(wavelengths > longest_blended, frequencies / scaling.factor, frequencies)
    is_between = (wavelengths <= longest_blended) & (wavelengths >= shortest_blended)
    return jnp.where(is_between, blended, stretched)


def _yarn_frequencies(frequencies: Array, scaling: YarnScaling, architecture: Architecture) -> Array:
    """Divide the frequencies behind a ramp over the dimensions by `factor`, and keep those before it.

    YaRN, arXiv 2309.00071. The ramp goes from the dimension that turns `beta_fast` times within
    `original_length` to the one that turns `beta_slow` times.
    """
    head_dim = architecture.head_dim

    def dimension_of(num_turns: float) -> float:
        """Return the dimension whose frequency turns so many times within the original length."""
        wavelength = scaling.original_length / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(architecture.rope_theta))

    start = dimension_of(scaling.beta_fast)
    end = dimension_of(scaling.beta_slow)
    if scaling.truncate:
        start = math.floor(start)
        end = math.ceil(end)
    start = max(start, 0)
    end = min(end, head_dim - 1)
    if start == end:
        end += 0.001  # as in transformers: the ramp is a step
    dimensions = jnp.arange(head_dim // 2, dtype=jnp.float32)
    divided_share = jnp.clip((dimensions - start) / (end - start), 0, 1)  # [H/2]
    return divided_share * frequencies / scaling.factor + (1 - divided_share) * frequencies


def rotary_embeddings(architecture: Architecture, positions: Array) -> Rope:
    """Return the cosines and sines of the angles at positions; YaRN multiplies both by a factor.

    Args:
        architecture: `head_dim`, `rope_theta` and `rope_scaling` are read.
        positions: int32 [B, T].

    Returns:
        Cosines and sines, float32 [B, T, H/2].
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(architecture)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    scaling = architecture.rope_scaling
    if isinstance(scaling, YarnScaling):
        return cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary embeddings in HuggingFace's convention, which pairs the two halves of a head.

    Args:
        x: queries or keys [B, T, N, H].
        cos: cosines of the angles, float32 [B, T, H/2].
        sin: sines of the angles, float32 [B, T, H/2].

    Returns:
        [B, T, N, H] in the dtype of x; computed in float32.
    """
    first_half, second_half = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [B, T, N, H/2] each
    cos = cos[:, :, None]  # [B, T, 1, H/2]
    sin = sin[:, :, None]
    rotated_first = first_half * cos - second_half * sin
    rotated_second = second_half * cos + first_half * sin
    return jnp.concatenate([rotated_first, rotated_second], -1).astype(x.dtype)
