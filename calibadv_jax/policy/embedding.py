"""The look-up of token embeddings, in a table whose width and vocabulary the mesh may split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calibadv_jax.policy.sharding import VocabLayout, vocab_layout


def look_up(table: Array, tokens: Array, dtype: Any) -> Array:
    """Return the embeddings of tokens; gradients of the table are summed in float32.

    Args:
        table: [V, D].
        tokens: int32 [B, T], ids from 0 to V - 1. Other ids have an embedding of 0.
        dtype: of the result.

    Returns:
        [B, T, D] in `dtype`.
    """
    vocab, width = table.shape
    layout = vocab_layout(tokens.shape[0], width, vocab)
    return _look_up(layout, dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(layout: VocabLayout, dtype: Any, table: Array, tokens: Array) -> Array:
    def look_up_shard(table: Array, tokens: Array) -> Array:
        """Return the embeddings [B, T, D] of one device's rows."""
        # All rows of the devices that hold the other columns: [B, T].
        all_tokens = layout.gather_width(tokens, 0)
        index = all_tokens - layout.first_token(table.shape[0])
        # Tokens of other shards of the vocabulary get zeros, and their embeddings by the sum.
        columns = table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        columns = layout.sum_over_vocab(columns.astype(dtype))  # all rows, this device's columns
        if layout.width is None:
            return columns
        # Exchange: this device's rows, all columns.
        return jax.lax.all_to_all(columns, layout.width, split_axis=0, concat_axis=2, tiled=True)

    inputs = (layout.spec("vocab", "width"), layout.spec("rows", None))
    outputs = layout.spec("rows", None, None)
    return layout.on_devices(look_up_shard, inputs, outputs)(table, tokens)


def _look_up_forward(layout: VocabLayout, dtype: Any, table: Array, tokens: Array) -> tuple[Array, Any]:
    return _look_up(layout, dtype, table, tokens), (table, tokens)


def _look_up_backward(layout: VocabLayout, dtype: Any, saved: Any, gradient: Array) -> tuple[Array, None]:
    def add_up_shard(table: Array, tokens: Array, gradient: Array) -> Array:
        """Return the gradient of one device's shard of the table, summed over the tokens of all rows."""
        all_tokens = layout.gather_width(tokens, 0)
        if layout.width is not None:
            # Exchange: from this device's rows and all columns to all rows and this device's columns.
            gradient = jax.lax.all_to_all(gradient, layout.width, split_axis=2, concat_axis=0, tiled=True)
        index = all_tokens - layout.first_token(table.shape[0])
        total = jnp.zeros(table.shape, jnp.float32)
        total = total.at[index].add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
        return layout.sum_over_replicas(total).astype(table.dtype)

    table, tokens = saved
    table_spec = layout.spec("vocab", "width")
    inputs = (table_spec, layout.spec("rows", None), layout.spec("rows", None, None))
    table_gradient = layout.on_devices(add_up_shard, inputs, table_spec)(table, tokens, gradient)
    return table_gradient, None


_look_up.defvjp(_look_up_forward, _look_up_backward)
