"""Packed causal attention in plain XLA, block by block, by FlashAttention-2's recurrences (arXiv 2307.08691).

A block of queries visits only blocks of keys from the beginning of its oldest sequence up to itself, and
computes only visible ones, so the cost follows the lengths of the sequences and not the length of the row.

Letters: B rows, T tokens of a row, N query heads, K key-value heads, G = N / K, H head dimension,
n blocks of a row, C tokens of a block. In einsums, q are the G * C queries of a block that read one key-value
head, and t are the C keys of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calibadv_jax.policy.kernels.custom_gradients import MASKED, inner_product
from calibadv_jax.policy.recomputation import name_attention

einsum_float32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(q: Array, k: Array, v: Array, ends: Array, block: int) -> Array:
    """Attend causally within the sequences of packed rows.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        ends: int32 [B, T], above its column: the first column that does not see this key. For any two keys,
            the columns that see them are nested or disjoint.
        block: C, queries and keys of a block. Scores exist for one pair of blocks at a time.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    return _forward(q, k, v, ends, block)[0]


def _forward(q: Array, k: Array, v: Array, ends: Array, block: int) -> tuple[Array, Any]:
    num_kv = k.shape[2]
    queries = _to_blocks(q, num_kv, block)  # [n, B, K, G*C, H]
    keys = _to_blocks(k, num_kv, block)  # [n, B, K, C, H]
    values = _to_blocks(v, num_kv, block)
    visibility = _Visibility.of(ends, block)

    def attend(query_block: Array) -> tuple[Array, Array]:
        """Return the outputs [B, K, G*C, H] of a block of queries, and the log-sum-exps of its scores."""
        block_queries = queries[query_block]

        def visit(key_block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            """Add a block of keys to the output, the largest score and the sum of the softmax so far."""
            out, largest, total = carry
            scores = visibility.scores(block_queries, keys[key_block], query_block, key_block)
            new_largest = jnp.maximum(largest, scores.max(-1))
            weights = jnp.exp(scores - new_largest[..., None])  # [B, K, G*C, C]
            # The sums so far are relative to the old maximum.
            decay = jnp.exp(largest - new_largest)
            change = einsum_float32("BKqt,BKtH->BKqH", weights.astype(values.dtype), values[key_block])
            new_out = out * decay[..., None] + change
            new_total = total * decay + weights.sum(-1)
            return new_out, new_largest, new_total

        zeros = jnp.zeros(block_queries.shape, jnp.float32)
        start = (zeros, zeros[..., 0] + MASKED, zeros[..., 0])
        out, largest, total = visibility.visit_keys(query_block, visit, start)
        block_out = (out / total[..., None]).astype(q.dtype)
        log_sum_exp = largest + jnp.log(total)
        return block_out, log_sum_exp

    out, normaliser = jax.lax.map(attend, jnp.arange(queries.shape[0]))
    rows, normaliser = name_attention(_to_rows(out, q.shape), normaliser)
    return rows, (queries, keys, values, ends, rows, normaliser)


def _backward(block: int, saved: Any, gradient: Array) -> tuple[Array, Array, Array, None]:
    queries, keys, values, ends, out, normaliser = saved
    num_kv = keys.shape[2]
    out_gradients = _to_blocks(gradient, num_kv, block)  # [n, B, K, G*C, H]
    visibility = _Visibility.of(ends, block)
    inner = inner_product(gradient.astype(jnp.float32), out.astype(jnp.float32))  # [B, T, N]
    inner = _to_blocks(inner[..., None], num_kv, block)  # [n, B, K, G*C, 1]

    def attend(carry: tuple[Array, Array], query_block: Array) -> tuple[Any, Array]:
        """Add one block of queries to the gradients of keys and values; return the queries' own gradient."""
        block_queries = queries[query_block]
        block_out_gradient = out_gradients[query_block]

        def visit(key_block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            """Add a block of keys to the gradients of queries, keys and values."""
            q_gradient, k_gradient, v_gradient = carry
            scores = visibility.scores(block_queries, keys[key_block], query_block, key_block)
            weights = jnp.exp(scores - normaliser[query_block][..., None])  # [B, K, G*C, C]
            weights_gradient = einsum_float32("BKqH,BKtH->BKqt", block_out_gradient, values[key_block])
            change = weights_gradient - inner[query_block]
            scores_gradient = (weights * change * _scale(block_queries)).astype(block_queries.dtype)
            weights = weights.astype(block_queries.dtype)
            q_change = einsum_float32("BKqt,BKtH->BKqH", scores_gradient, keys[key_block])
            new_q_gradient = q_gradient + q_change
            k_change = einsum_float32("BKqH,BKqt->BKHt", block_queries, scores_gradient)
            new_k_gradient = k_gradient.at[key_block].add(k_change)
            v_change = einsum_float32("BKqH,BKqt->BKHt", block_out_gradient, weights)
            new_v_gradient = v_gradient.at[key_block].add(v_change)
            return new_q_gradient, new_k_gradient, new_v_gradient

        start = (jnp.zeros(block_queries.shape, jnp.float32), *carry)
        q_gradient, k_gradient, v_gradient = visibility.visit_keys(query_block, visit, start)
        return (k_gradient, v_gradient), q_gradient.astype(block_queries.dtype)

    # [n, B, K, H, C]: this way the small operand of the products is the one that is transposed.
    zeros = jnp.zeros(keys.shape, jnp.float32).swapaxes(-1, -2)
    query_blocks = jnp.arange(queries.shape[0])
    (k_blocks, v_blocks), q_blocks = jax.lax.scan(attend, (zeros, zeros), query_blocks)
    batch, length, _, head_dim = gradient.shape
    kv_shape = (batch, length, num_kv, head_dim)
    q_gradient = _to_rows(q_blocks, gradient.shape)
    k_gradient = _to_rows(k_blocks.swapaxes(-1, -2).astype(keys.dtype), kv_shape)
    v_gradient = _to_rows(v_blocks.swapaxes(-1, -2).astype(keys.dtype), kv_shape)
    return q_gradient, k_gradient, v_gradient, None


blockwise_attention.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Visibility:
    """Which keys the queries of a block see.

    Attributes:
        ends: int32 [n, B, C], the first column that does not see a key.
        first_key_block: int32 [n], the first block of keys that a block of queries needs.
        block_ends: int32 [n], the first column that sees no key of a block of keys.
    """

    ends: Array
    first_key_block: Array
    block_ends: Array

    @classmethod
    def of(cls, ends: Array, block: int) -> _Visibility:
        """Return the visibility of keys in blocks.

        Args:
            ends: int32 [B, T], as in `blockwise_attention`. An entry that is not above its column counts as
                the column plus 1.
            block: C, tokens of a block. The last block is filled up with columns that see only themselves.

        Returns:
            The visibility, with n = ceil(T / C) blocks.
        """
        batch, length = ends.shape
        padding = -length % block
        columns = jnp.arange(length + padding)
        padded = jnp.pad(ends, ((0, 0), (0, padding)))
        # Every column sees itself. The padding sees nothing else.
        padded = jnp.maximum(padded, columns + 1)
        # [B, T]: the first column that sees no key before this column.
        largest_end = jax.lax.cummax(padded, axis=1)
        ends_before = jnp.pad(largest_end[:, :-1], ((0, 0), (1, 0)))
        # [B, T]: the first column of the outermost sequence that a column belongs to.
        sequence_start = jax.lax.cummax(jnp.where(ends_before <= columns, columns, 0), axis=1)
        ends_in_blocks = padded.reshape(batch, -1, block).transpose(1, 0, 2)  # [n, B, C]
        first_key_block = sequence_start[:, ::block].min(axis=0) // block
        return cls(ends_in_blocks, first_key_block, ends_in_blocks.max(axis=(1, 2)))

    def visit_keys(self, query_block: Array, visit: Callable[..., Any], start: Any) -> Any:
        """Fold `visit` over the blocks of keys of which a block of queries sees any.

        Args:
            query_block: int32 [], index of the block of queries.
            visit: returns the new carry, given the index of a block of keys and the carry.
            start: the first carry.

        Returns:
            The last carry.
        """
        first_query = query_block * self.ends.shape[2]

        def visit_if_visible(key_block: Array, carry: Any) -> Any:
            """Return the new carry, or the old one if no query sees the block of keys."""
            is_visible = self.block_ends[key_block] > first_query
            return jax.lax.cond(is_visible, visit, lambda _, unchanged: unchanged, key_block, carry)

        return jax.lax.fori_loop(self.first_key_block[query_block], query_block + 1, visit_if_visible, start)

    def scores(self, queries: Array, keys: Array, query_block: Array, key_block: Array) -> Array:
        """Return scaled scores, with MASKED where a query does not see a key.

        Args:
            queries: [B, K, G*C, H] of the block `query_block`.
            keys: [B, K, C, H] of the block `key_block`.
            query_block: int32 [], index of the block of queries.
            key_block: int32 [], index of the block of keys.

        Returns:
            float32 [B, K, G*C, C].
        """
        scores = einsum_float32("BKqH,BKtH->BKqt", queries, keys) * _scale(queries)
        block = self.ends.shape[2]
        columns = jnp.arange(block)
        query_columns = query_block * block + columns[:, None]  # [C, 1]
        key_columns = key_block * block + columns  # [C]
        is_visible = (query_columns >= key_columns) & (query_columns < self.ends[key_block][:, None, :])
        queries_per_kv = queries.shape[2] // block
        is_visible = jnp.tile(is_visible, (1, queries_per_kv, 1))[:, None]  # [B, C, C] -> [B, 1, G*C, C]
        return jnp.where(is_visible, scores, MASKED)


def _scale(queries: Array) -> float:
    return 1.0 / math.sqrt(queries.shape[-1])


def _to_blocks(x: Array, num_kv: int, block: int) -> Array:
    """Cut [B, T, N, H] into [n, B, K, G*C, H]: the queries of a key-value head are one matrix."""
    batch, length, num_heads, head_dim = x.shape
    padding = -length % block
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, block, num_kv, num_heads // num_kv, head_dim)  # [B, n, C, K, G, H]
    x = x.transpose(1, 0, 3, 4, 2, 5)  # [n, B, K, G, C, H]
    return x.reshape(x.shape[0], batch, num_kv, -1, head_dim)


def _to_rows(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Join [n, B, K, G*C, H] to [B, T, N, H] of this shape, without the padding."""
    batch, length, num_heads, head_dim = shape
    num_blocks, _, num_kv = blocks.shape[:3]
    x = blocks.reshape(num_blocks, batch, num_kv, num_heads // num_kv, -1, head_dim)  # [n, B, K, G, C, H]
    x = x.transpose(1, 0, 4, 2, 3, 5)  # [B, n, C, K, G, H]
    return x.reshape(batch, -1, num_heads, head_dim)[:, :length]
