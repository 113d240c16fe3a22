"""Choosing the next token on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

LONGEST_SUM = 4096  # tokens whose probabilities are summed in one part
BLOCK = 512  # tokens of a block of longer sums


def sample_tokens(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperatures: Array,
    top_p: Array,
    top_k: Array,
    filtered: bool,
) -> tuple[Array, Array]:
    """Choose one token a row; randomness depends on the row's seed and position only.

    Args:
        logits: float32 [S, V]. seeds: uint32 [S]. positions: int32 [S].
        temperatures: float32 [S]; 0: greedy. top_p: float32 [S]; 1 = off. top_k: int32 [S]; 0 = off.
        filtered: False promises that top_p and top_k are off in every row, and saves the sort.

    Returns tokens int32 [S] and log-probabilities float32 [S] at the row's temperature (greedy rows: 1),
    before top-p and top-k, as the learner recomputes them.
    """
    greedy = temperatures <= 0.0
    temperatures = jnp.where(greedy, 1.0, temperatures)[:, None]
    logprobs = jax.nn.log_softmax(logits / temperatures, axis=-1)
    best = _first_best(logits)
    allowed = logprobs
    if filtered:
        allowed = jnp.where(_filter_mask(logits, best, temperatures, top_p, top_k), logprobs, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), positions)
    tokens = jnp.where(greedy, best, _draw(jnp.exp(allowed), keys)).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def _draw(weights: Array, keys: Array) -> Array:
    """Draw an index in proportion to `weights`, float32 [S, V], by inverse transform.

    One uniform number a row instead of one Gumbel number for every token. Above `LONGEST_SUM` tokens a second
    one chooses a block of tokens first: rounding makes one float32 sum over 151,936 tokens wrong by 1e-3 in
    total variation, and the two short sums by less than 1e-4.
    """
    rows, vocab = weights.shape
    uniform = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)
    if vocab <= LONGEST_SUM:
        return _inverse_transform(weights, uniform)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    other = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), ()))(keys)
    block = _inverse_transform(jnp.sum(blocks, axis=-1), other)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _inverse_transform(inside, uniform)


def _inverse_transform(weights: Array, uniform: Array) -> Array:
    """Return the first index whose cumulative weight exceeds `uniform` times the total; its weight is not 0.

    Rounding may give an index without weight a larger cumulative sum than the index before it has.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    index = jnp.arange(weights.shape[-1])
    reached = possible & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = jnp.max(jnp.where(possible, index, 0), axis=-1)
    return jnp.minimum(jnp.min(jnp.where(reached, index, weights.shape[-1]), axis=-1), last)


def _first_best(logits: Array) -> Array:
    """Return the argmax by two plain reductions, which a CPU computes several times as fast."""
    vocab = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == best, jnp.arange(vocab), vocab - 1), axis=-1)


def _filter_mask(logits: Array, best: Array, temperatures: Array, top_p: Array, top_k: Array) -> Array:
    """Return which tokens are in the nucleus and among the k best, bool [S, V]; the best token always is.

    A compiler may compute a value twice, in two programs that round differently. So logits, not
    log-probabilities, are sorted and compared with the threshold: they are an input, and no arithmetic
    stands between the two.
    """
    vocab = logits.shape[-1]
    logits = jax.lax.optimization_barrier(logits)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jnp.exp(jax.nn.log_softmax(ordered / temperatures, axis=-1))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None]
    inside = ((before < top_p[:, None]) & (jnp.arange(vocab) < limit)).at[:, 0].set(True)
    threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return (logits >= threshold) | (jnp.arange(vocab) == best[:, None])
