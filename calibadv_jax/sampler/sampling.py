"""Choosing the next token on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

LONGEST_SUM = 4096  # largest number of tokens whose probabilities are summed in one part
BLOCK = 512  # number of tokens in each block of a longer sum


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
        logits: float32 [S, V], before the temperature.
        seeds: uint32 [S].
        positions: int32 [S], of the tokens whose successors are chosen.
        temperatures: float32 [S]; 0: greedy.
        top_p: float32 [S], probability of the nucleus; 1: off.
        top_k: int32 [S], number of best tokens; 0: off.
        filtered: False promises that top_p and top_k are off in every row, and saves the sort.

    Returns:
        tokens: int32 [S].
        logprobs: float32 [S], log-probabilities of the tokens at the row's temperature (greedy rows: 1),
            before top-p and top-k, as the learner recomputes them.
    """
    greedy = temperatures <= 0.0
    temperatures = jnp.where(greedy, 1.0, temperatures)[:, None]  # [S, 1]
    logprobs = jax.nn.log_softmax(logits / temperatures, axis=-1)  # [S, V]
    best = _first_best(logits)
    allowed = logprobs
    if filtered:
        mask = _filter_mask(logits, best, temperatures, top_p, top_k)
        allowed = jnp.where(mask, logprobs, -jnp.inf)
    row_keys = jax.vmap(jax.random.key)(seeds)
    keys = jax.vmap(jax.random.fold_in)(row_keys, positions)
    drawn = _draw(jnp.exp(allowed), keys)
    tokens = jnp.where(greedy, best, drawn).astype(jnp.int32)
    chosen_logprobs = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen_logprobs


def _draw(weights: Array, keys: Array) -> Array:
    """Draw an index in proportion to `weights`, float32 [S, V], by inverse transform.

    One uniform number a row instead of one Gumbel number for every token. Above `LONGEST_SUM` tokens a second
    one chooses a block of tokens first: rounding makes one float32 sum over 151,936 tokens wrong by 1e-3 in
    total variation, and the two short sums by less than 1e-4.
    """
    rows, vocab = weights.shape
    uniform = jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)  # [S]
    if vocab <= LONGEST_SUM:
        return _inverse_transform(weights, uniform)
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK)))
    blocks = padded.reshape(rows, -1, BLOCK)  # [S, blocks, BLOCK]
    uniform_of_block = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), ()))(keys)  # [S]
    block = _inverse_transform(jnp.sum(blocks, axis=-1), uniform_of_block)  # [S]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, BLOCK]
    return block * BLOCK + _inverse_transform(inside, uniform)


def _inverse_transform(weights: Array, uniform: Array) -> Array:
    """Return the first index whose cumulative weight exceeds `uniform` times the total; its weight is not 0.

    `weights` are float32 [S, N], `uniform` float32 [S] in [0, 1); the indices are int32 [S]. Rounding may
    give an index without weight a larger cumulative sum than the index before it has.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    index = jnp.arange(weights.shape[-1])
    reached = possible & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = jnp.max(jnp.where(possible, index, 0), axis=-1)
    first = jnp.min(jnp.where(reached, index, weights.shape[-1]), axis=-1)
    return jnp.minimum(first, last)


def _first_best(logits: Array) -> Array:
    """Return the argmax of logits [S, V] by two plain reductions.

    A CPU computes them several times as fast as an argmax.
    """
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
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # [S, V], sum over all better tokens
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None]  # [S, 1]
    in_nucleus = before < top_p[:, None]
    in_top_k = jnp.arange(vocab) < limit
    inside = (in_nucleus & in_top_k).at[:, 0].set(True)
    threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)  # [S, 1]
    is_allowed = logits >= threshold
    is_best = jnp.arange(vocab) == best[:, None]
    return is_allowed | is_best
