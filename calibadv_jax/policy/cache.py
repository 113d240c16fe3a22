"""The KV cache as a layer of the sampler's decoder sees it: where new tokens are written, what they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from calibadv_jax.policy.kernels.blockwise import MASKED
from calibadv_jax.policy.sharding import RULES, axis_size

Stack = tuple[jax.Array, jax.Array]  # keys and values of successive layers [L, S, K, T, H]
Cache = list[Stack]  # all layers in one stack; few layers, which are unrolled, in a stack each
Window = tuple[Sequence[int], jax.Array | int]  # widths that may be read of a cache, and which one is

SCORE_BYTES = 2**28  # of float32 scores at once, on each device, in attention to a KV cache


@dataclass(frozen=True)
class CacheView:
    """The places of new tokens [B, n] in a cache of S slots with T columns each."""

    positions: jax.Array  # int32 [B, n]: a token reads the columns up to its own
    columns: jax.Array  # int32 [B, n], that the tokens are written to; T: nowhere
    slots: jax.Array | None  # int32 [B], of each row; None: row b is slot b
    window: Window  # columns that are read; every written one is below them

    def written(self, stack: Stack, layer: jax.Array, keys: jax.Array, values: jax.Array) -> Stack:
        """The stack with a layer's keys and values [B, n, K, H] of the tokens."""
        rows = jnp.arange(self.columns.shape[0]) if self.slots is None else self.slots
        mesh = jax.sharding.get_abstract_mesh()
        if keys.shape[1] == 1 or mesh.empty or axis_size(mesh, RULES["kv_heads"]) == 1:
            # One head a write: so the cache keeps its layout, and no layer of it is copied for the products.
            heads = jnp.arange(keys.shape[2])
            at = layer, rows[:, None, None], heads, self.columns[:, :, None]
            first, second = (
                held.at[at].set(new.astype(held.dtype), mode="drop")
                for held, new in zip(stack, (keys, values), strict=True)
            )
            return first, second
        # Each head by itself, so that the devices that have it need nothing of the others.
        write = jax.vmap(
            lambda held, new: held.at[layer, rows[:, None], self.columns].set(
                new.astype(held.dtype), mode="drop"
            ),
            in_axes=2,
            out_axes=2,
        )
        return write(stack[0], keys), write(stack[1], values)

    def attended(self, stack: Stack, layer: jax.Array, queries: jax.Array) -> jax.Array:
        """Attention of the tokens' queries [B, n, N, H] to a layer that holds them too: [B, n, N, H]."""

        def mixed(width: int) -> jax.Array:
            # Of the layer within the branch: what a branch is given is copied, all columns of it.
            sizes = 1, *stack[0].shape[1:3], width, stack[0].shape[4]
            near = (jax.lax.dynamic_slice(held, (layer, 0, 0, 0, 0), sizes)[0] for held in stack)
            keys, values = (x if self.slots is None else x[self.slots] for x in near)
            return cached_attention(queries, keys, values, self.positions)

        widths, number = self.window
        branches = [partial(mixed, width) for width in widths]
        return branches[0]() if len(widths) == 1 else jax.lax.switch(number, branches)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens to a KV cache whose column is the position.

    Takes only as many rows at a time as have SCORE_BYTES of scores together, at least one.

    Args:
        q: [B, n, N, H] at `positions` int32 [B, n].
        k, v: [B, K, T, H], the new tokens already written.

    Returns:
        [B, n, N, H].
    """
    batch, num_new, num_heads, _ = q.shape
    at_once = max(1, SCORE_BYTES // (4 * num_new * num_heads * k.shape[2]))
    if batch <= at_once:
        return _cached_rows(q, k, v, positions)

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        return _cached_rows(*(x[None] for x in row))[0]

    return jax.lax.map(one_row, (q, k, v, positions), batch_size=at_once)


def _cached_rows(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    batch, num_new, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    grouped = q.reshape(batch, num_new, num_kv, num_heads // num_kv, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, num_kv, -1, head_dim)  # [B, K, n*G, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (1.0 / math.sqrt(head_dim))
    visible = jnp.arange(k.shape[2]) <= jnp.repeat(positions, num_heads // num_kv, axis=1)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights, v)
    out = out.reshape(batch, num_kv, num_new, num_heads // num_kv, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, num_new, num_heads, head_dim)
