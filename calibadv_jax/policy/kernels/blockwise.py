"""Packed causal attention in plain XLA, block by block, by FlashAttention's recurrences (arXiv 2307.08691).

A block of queries visits only blocks of keys from the beginning of its oldest sequence up to itself, and
computes only visible ones, so the cost follows the sequences and not the row.
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

product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(q: Array, k: Array, v: Array, ends: Array, block: int) -> Array:
    """Attend causally within the sequences of packed rows: [B, T, N, H].

    Args:
        q: [B, T, N, H]. k, v: [B, T, K, H].
        ends: int32 [B, T], above its column: the first column that does not see this key. The columns that
            see two keys are nested or apart.
        block: queries and keys of a block. Scores exist for one pair of blocks at once.
    """
    return _forward(q, k, v, ends, block)[0]


def _forward(q: Array, k: Array, v: Array, ends: Array, block: int) -> tuple[Array, Any]:
    queries, keys, values = (_blocks(x, k.shape[2], block) for x in (q, k, v))
    visibility = _Visibility.of(ends, block)

    def attend(index: Array) -> tuple[Array, Array]:
        block_queries = queries[index]

        def visit(key_block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            out, largest, total = carry
            scores = visibility.scores(block_queries, keys[key_block], index, key_block)
            new = jnp.maximum(largest, scores.max(-1))
            weights = jnp.exp(scores - new[..., None])
            decay = jnp.exp(largest - new)
            change = product("bkqt,bkth->bkqh", weights.astype(values.dtype), values[key_block])
            return out * decay[..., None] + change, new, total * decay + weights.sum(-1)

        zeros = jnp.zeros(block_queries.shape, jnp.float32)
        start = (zeros, zeros[..., 0] + MASKED, zeros[..., 0])
        out, largest, total = visibility.each(index, visit, start)
        return (out / total[..., None]).astype(q.dtype), largest + jnp.log(total)

    out, normaliser = jax.lax.map(attend, jnp.arange(queries.shape[0]))
    rows = _rows(out, q.shape)
    return rows, (queries, keys, values, ends, rows, normaliser)


def _backward(block: int, saved: Any, gradient: Array) -> tuple[Array, Array, Array, None]:
    queries, keys, values, ends, out, normaliser = saved
    num_kv = keys.shape[2]
    gradients = _blocks(gradient, num_kv, block)
    visibility = _Visibility.of(ends, block)
    inner = inner_product(gradient.astype(jnp.float32), out.astype(jnp.float32))
    inner = _blocks(inner[..., None], num_kv, block)  # [n, B, K, G*C, 1]

    def attend(carry: tuple[Array, Array], index: Array) -> tuple[Any, Array]:
        block_queries, gradient = queries[index], gradients[index]

        def visit(key_block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            to_queries, to_keys, to_values = carry
            scores = visibility.scores(block_queries, keys[key_block], index, key_block)
            weights = jnp.exp(scores - normaliser[index][..., None])
            change = product("bkqh,bkth->bkqt", gradient, values[key_block]) - inner[index]
            change = (weights * change * _scale(block_queries)).astype(block_queries.dtype)
            weights = weights.astype(block_queries.dtype)
            return (
                to_queries + product("bkqt,bkth->bkqh", change, keys[key_block]),
                to_keys.at[key_block].add(product("bkqh,bkqt->bkht", block_queries, change)),
                to_values.at[key_block].add(product("bkqh,bkqt->bkht", gradient, weights)),
            )

        start = (jnp.zeros(block_queries.shape, jnp.float32), *carry)
        to_queries, *carry = visibility.each(index, visit, start)
        return tuple(carry), to_queries.astype(block_queries.dtype)

    # [n, B, K, H, C]: the small operand of their products is then the one that is transposed.
    zeros = jnp.zeros(keys.shape, jnp.float32).swapaxes(-1, -2)
    (to_keys, to_values), to_queries = jax.lax.scan(attend, (zeros, zeros), jnp.arange(queries.shape[0]))
    of_keys = (*gradient.shape[:2], num_kv, gradient.shape[3])
    to_queries = _rows(to_queries, gradient.shape)
    to_keys, to_values = (_rows(x.swapaxes(-1, -2).astype(keys.dtype), of_keys) for x in (to_keys, to_values))
    return to_queries, to_keys, to_values, None


blockwise_attention.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Visibility:
    """The keys that the queries of a block see."""

    ends: Array  # int32 [n, B, C]
    first: Array  # int32 [n], the first block of keys that a block of queries needs
    reach: Array  # int32 [n], the first column that sees no key of a block

    @classmethod
    def of(cls, ends: Array, block: int) -> _Visibility:
        columns = jnp.arange(ends.shape[1] + -ends.shape[1] % block)
        padded = jnp.pad(ends, ((0, 0), (0, len(columns) - ends.shape[1])))
        padded = jnp.maximum(padded, columns + 1)
        before = jnp.pad(jax.lax.cummax(padded, axis=1)[:, :-1], ((0, 0), (1, 0)))
        start = jax.lax.cummax(jnp.where(before <= columns, columns, 0), axis=1)  # of the outermost sequence
        blocks = padded.reshape(len(padded), -1, block).transpose(1, 0, 2)
        return cls(blocks, start[:, ::block].min(axis=0) // block, blocks.max(axis=(1, 2)))

    def each(self, index: Array, visit: Callable[..., Any], start: Any) -> Any:
        """Call `visit` with every block of keys of which the block of queries `index` sees any."""
        begins = index * self.ends.shape[2]

        def visit_visible(key_block: Array, carry: Any) -> Any:
            return jax.lax.cond(self.reach[key_block] > begins, visit, lambda _, same: same, key_block, carry)

        return jax.lax.fori_loop(self.first[index], index + 1, visit_visible, start)

    def scores(self, queries: Array, keys: Array, index: Array, key_block: Array) -> Array:
        """Return masked scores of queries [B, K, G*C, H] and keys [B, K, C, H]: float32 [B, K, G*C, C]."""
        scores = product("bkqh,bkth->bkqt", queries, keys) * _scale(queries)
        block = self.ends.shape[2]
        columns = jnp.arange(block)
        query, key = index * block + columns[:, None], key_block * block + columns
        visible = (query >= key) & (query < self.ends[key_block][:, None, :])  # [B, C, C]
        visible = jnp.tile(visible, (1, queries.shape[2] // block, 1))[:, None]
        return jnp.where(visible, scores, MASKED)


def _scale(queries: Array) -> float:
    return 1.0 / math.sqrt(queries.shape[-1])


def _blocks(x: Array, num_kv: int, block: int) -> Array:
    """[B, T, N, H] -> [n, B, K, G*C, H]: the queries of a key-value head are one matrix."""
    batch, length, num_heads, head_dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, block, num_kv, num_heads // num_kv, head_dim).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(x.shape[0], batch, num_kv, -1, head_dim)


def _rows(blocks: Array, shape: tuple[int, ...]) -> Array:
    """[n, B, K, G*C, H] -> [B, T, N, H] of `shape`, padding dropped."""
    batch, length, num_heads, head_dim = shape
    num_blocks, _, num_kv = blocks.shape[:3]
    x = blocks.reshape(num_blocks, batch, num_kv, num_heads // num_kv, -1, head_dim)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, num_heads, head_dim)[:, :length]
