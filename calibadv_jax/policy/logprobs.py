"""Log-probabilities of tokens without ever holding logits of [B, T, V]."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from calibadv_jax.policy.sharding import constrain
from calibadv_jax.policy.transformer import Decoder


def token_logprobs(
    decoder: Decoder,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy of the distribution at every position.

    Works through `chunk` tokens of each row at a time; the backward pass recomputes their logits, unless
    one chunk is the whole row.

    Args:
        hidden: [B, T, D], the state that predicts the target of the same column.
        targets: int32 [B, T].
        temperature: divides the logits, as the sampler did.
        entropy_gradient: False: nothing is differentiated through the entropies, which saves its cost.

    Returns:
        float32 [B, T] log-probabilities and float32 [B, T] entropies (nats).
    """

    def head(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, wanted = inputs
        logits = constrain(decoder.logits(states) / temperature, "batch", "length", "vocab")
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        is_wanted = jnp.arange(logits.shape[-1]) == wanted[..., None]  # no gather: the vocabulary is sharded
        chosen = jnp.sum(jnp.where(is_wanted, logits, 0.0), axis=-1)
        entropy_of = logits, normaliser
        if not entropy_gradient:
            entropy_of = jax.lax.stop_gradient(entropy_of)
        return chosen - normaliser, _entropy(*entropy_of)

    batch, length, width = hidden.shape
    if length <= chunk:
        return head((hidden, targets))
    num_chunks = math.ceil(length / chunk)
    padded = num_chunks * chunk - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padded), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padded)))
    hidden = jnp.moveaxis(hidden.reshape(batch, num_chunks, chunk, width), 1, 0)
    targets = jnp.moveaxis(targets.reshape(batch, num_chunks, chunk), 1, 0)
    logprobs, entropies = jax.lax.map(jax.checkpoint(head), (hidden, targets))
    flat = [jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in (logprobs, entropies)]
    return flat[0], flat[1]


def _entropy(logits: jax.Array, normaliser: jax.Array) -> jax.Array:
    """float32 [..., V] and their logsumexp [...] -> nats [...]."""
    return normaliser - jnp.sum(jnp.exp(logits - normaliser[..., None]) * logits, axis=-1)
