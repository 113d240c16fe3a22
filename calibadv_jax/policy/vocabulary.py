"""Layout of the two weights as large as the vocabulary, and the look-up of tokens.

The compiler would gather such a weight wherever a product or a look-up reads it. Here devices exchange looked
up columns, never the table, and `logprobs` gathers the head once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from calibadv_jax.policy.sharding import RULES, axis_size


@dataclass(frozen=True)
class Layout:
    """Mesh axes over which the rows of a batch, the width D and the vocabulary V are split; empty: none.

    Methods are called by each device with its own parts.
    """

    rows: tuple[str, ...] = ()
    width: str | None = None
    vocab: str | None = None

    def on_devices(self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
        """Apply `function` to each device's parts, or to the whole arrays if nothing is split."""
        if not (self.rows or self.vocab):
            return function
        return jax.shard_map(function, in_specs=inputs, out_specs=outputs, check_vma=False)

    def spec(self, *axes: str | None) -> P:
        """Return the specification of an array whose axes are "rows", "width", "vocab" or None."""
        names = {"rows": self.rows or None, "width": self.width, "vocab": self.vocab, None: None}
        return P(*(names[axis] for axis in axes))

    def first(self, size: int) -> jax.Array | int:
        """Return the first of the `size` entries of the vocabulary that this device holds."""
        return 0 if self.vocab is None else jax.lax.axis_index(self.vocab) * size

    def over_vocab(self, x: jax.Array) -> jax.Array:
        """Sum over all parts of the vocabulary."""
        return x if self.vocab is None else jax.lax.psum(x, self.vocab)

    def gathered(self, weights: jax.Array, axis: int) -> jax.Array:
        """Gather the whole width of the weights, which is their `axis`."""
        if self.width is None:
            return weights
        return jax.lax.all_gather(weights, self.width, axis=axis, tiled=True)

    def scattered(self, gradient: jax.Array, axis: int) -> jax.Array:
        """Sum all devices' gradients of the whole width, and return this device's part."""
        if self.width is not None:
            gradient = jax.lax.psum_scatter(gradient, self.width, scatter_dimension=axis, tiled=True)
        return self.over_replicas(gradient)

    def largest_of_rows(self, x: jax.Array) -> jax.Array:
        """Return the largest value over the devices."""
        return jax.lax.pmax(x, self.rows) if self.rows else x

    def over_replicas(self, gradient: jax.Array) -> jax.Array:
        """Sum over the rows' axes that do not split the width."""
        others = tuple(name for name in self.rows if name != self.width)
        return jax.lax.psum(gradient, others) if others else gradient


def layout_of(num_rows: int, width: int, vocab: int) -> Layout:
    """Return the layout by the table of `sharding` on the current mesh; undivided if rows do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    batch, embed, heads = RULES["batch"], RULES["embed"], RULES["vocab"]
    assert isinstance(batch, tuple) and isinstance(embed, str) and isinstance(heads, str)
    if mesh.empty or num_rows % axis_size(mesh, batch):
        return Layout()

    def fitted(size: int, name: str) -> str | None:
        return name if axis_size(mesh, name) > 1 and size % axis_size(mesh, name) == 0 else None

    rows = tuple(name for name in batch if axis_size(mesh, name) > 1)
    return Layout(rows, fitted(width, embed), fitted(vocab, heads))


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Return rows of `table` [V, D] at `tokens` int32 [B, T]: [B, T, D] of `dtype`; gradients in float32."""
    return _look_up(layout_of(tokens.shape[0], table.shape[1], table.shape[0]), dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(layout: Layout, dtype: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = _of_all_columns(layout, tokens)
        index = tokens - layout.first(table.shape[0])
        rows = table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        rows = layout.over_vocab(rows.astype(dtype))
        if layout.width is None:
            return rows
        return jax.lax.all_to_all(rows, layout.width, split_axis=0, concat_axis=2, tiled=True)

    inputs = layout.spec("vocab", "width"), layout.spec("rows", None)
    return layout.on_devices(local, inputs, layout.spec("rows", None, None))(table, tokens)


def _forward(
    layout: Layout, dtype: Any, table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(layout, dtype, table, tokens), (table, tokens)


def _backward(
    layout: Layout, dtype: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    def local(table: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        tokens = _of_all_columns(layout, tokens)
        if layout.width is not None:
            gradient = jax.lax.all_to_all(gradient, layout.width, split_axis=2, concat_axis=0, tiled=True)
        index = tokens - layout.first(table.shape[0])
        total = jnp.zeros(table.shape, jnp.float32)
        total = total.at[index].add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
        return layout.over_replicas(total).astype(table.dtype)

    table, tokens = saved
    weights = layout.spec("vocab", "width")
    inputs = weights, layout.spec("rows", None), layout.spec("rows", None, None)
    return layout.on_devices(local, inputs, weights)(table, tokens, gradient), None


_look_up.defvjp(_forward, _backward)


def _of_all_columns(layout: Layout, tokens: jax.Array) -> jax.Array:
    """Gather the tokens of all devices that hold columns of the same rows of the table."""
    return tokens if layout.width is None else jax.lax.all_gather(tokens, layout.width, tiled=True)
