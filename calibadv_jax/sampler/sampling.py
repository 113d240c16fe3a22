"""Choosing the next token on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample_tokens(
    logits: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    temperatures: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    filtered: bool,
) -> tuple[jax.Array, jax.Array]:
    """One token a row; randomness depends on the row's seed and position only.

    Args:
        logits: float32 [S, V]. seeds: uint32 [S]. positions: int32 [S].
        temperatures: float32 [S]; 0 takes the most likely token.
        top_p: float32 [S]; 1 = off. top_k: int32 [S]; 0 = off.
        filtered: False promises that top_p and top_k are off in every row, and saves the sort.

    Returns:
        int32 [S] tokens and float32 [S] log-probabilities at the row's temperature, before top-p and
        top-k (greedy rows: at temperature 1), which is what the learner recomputes.
    """
    greedy = temperatures <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperatures)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    kept = _filter(logprobs, top_p, top_k) if filtered else logprobs
    # Inverse transform: one uniform number a row instead of one Gumbel number for every token.
    cumulative = jnp.cumsum(jnp.exp(kept), axis=-1)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
        seeds, positions
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)
    total = cumulative[:, -1:]
    drawn = jnp.sum(cumulative <= uniform[:, None] * total, axis=-1)
    # Rounding may bring the product up to the total: then take the last token with any probability.
    drawn = jnp.minimum(drawn, jnp.sum(cumulative < total, axis=-1))
    tokens = jnp.where(greedy, _first_best(logits), drawn).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def _first_best(logits: jax.Array) -> jax.Array:
    """As argmax, in two plain reductions, which a CPU computes several times as fast."""
    vocab = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == best, jnp.arange(vocab), vocab - 1), axis=-1)


def _filter(logprobs: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Sets tokens outside the nucleus or the k best to -inf; the best token always stays."""
    vocab = logprobs.shape[-1]
    ordered = jnp.sort(logprobs, axis=-1, descending=True)
    before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None]
    inside = ((before < top_p[:, None]) & (jnp.arange(vocab) < limit)).at[:, 0].set(True)
    threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logprobs >= threshold, logprobs, -jnp.inf)
