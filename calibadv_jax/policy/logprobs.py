"""Log-probabilities of tokens without ever holding logits of [B, T, V]."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.policy.kernels.elementwise import inner_product
from calibadv_jax.policy.transformer import Decoder
from calibadv_jax.policy.vocabulary import Layout, layout_of

Saved = tuple[Any, ...]


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
    one chunk is the whole row. The head's weights are gathered once in each direction, whatever the chunk.

    Args:
        hidden: [B, T, D], the state that predicts the target of the same column.
        targets: int32 [B, T].
        temperature: divides the logits, as the sampler did.
        entropy_gradient: False: nothing is differentiated through the entropies, which saves its cost.

    Returns:
        float32 [B, T] log-probabilities and float32 [B, T] entropies (nats).
    """
    weights, vocab_first = decoder.head()
    width, vocab = weights.shape[::-1] if vocab_first else weights.shape
    layout = layout_of(hidden.shape[0], width, vocab)
    head = _Head(layout, vocab_first, decoder.numerics.compute_dtype, temperature, chunk, entropy_gradient)
    return _logprobs(head, hidden, weights, targets)


@dataclass(frozen=True)
class _Head:
    """What is known at compilation. Methods are called by each device with its own parts."""

    layout: Layout
    vocab_first: bool  # the weights are [V, D], else [D, V]
    dtype: Any
    temperature: float
    chunk: int
    entropy_gradient: bool

    @property
    def weights_spec(self) -> Any:
        axes = ("vocab", "width") if self.vocab_first else ("width", "vocab")
        return self.layout.spec(*axes)

    @property
    def width_axis(self) -> int:
        return 1 if self.vocab_first else 0

    def whole(self, weights: jax.Array) -> jax.Array:
        """The weights in the compute dtype and of the whole width."""
        return self.layout.gathered(weights.astype(self.dtype), self.width_axis)

    def logits(self, states: jax.Array, weights: jax.Array) -> jax.Array:
        """[B, C, D] -> float32 [B, C, V]; see `Decoder.logits`."""
        product = "btd,vd->btv" if self.vocab_first else "btd,dv->btv"
        found = jnp.einsum(product, states.astype(self.dtype), weights, preferred_element_type=jnp.float32)
        return found / self.temperature

    def values(self, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """float32 [B, C, V] -> log-probabilities, entropies and log-sum-exps, float32 [B, C]."""
        layout = self.layout
        largest = logits.max(-1)
        if layout.vocab is not None:
            largest = jax.lax.pmax(largest, layout.vocab)
        exponentials = jnp.exp(logits - largest[..., None])
        total = layout.over_vocab(exponentials.sum(-1))
        expected = layout.over_vocab(inner_product(exponentials, logits)) / total
        index = targets - layout.first(logits.shape[-1])
        mine = (index >= 0) & (index < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(mine, index, 0)[..., None], axis=-1)[..., 0]
        chosen = layout.over_vocab(jnp.where(mine, chosen, 0.0))
        normaliser = largest + jnp.log(total)
        return chosen - normaliser, normaliser - expected, normaliser

    def change(self, logits: jax.Array, targets: jax.Array, known: tuple[jax.Array, ...]) -> jax.Array:
        """Gradient of the logits before the temperature, [B, C, V] of the compute dtype.

        Args:
            known: float32 [B, C]: log-sum-exps, entropies, and the gradients of both outputs.
        """
        normaliser, entropies, to_logprobs, to_entropies = (x[..., None] for x in known)
        probabilities = jnp.exp(logits - normaliser)
        index = targets - self.layout.first(logits.shape[-1])
        is_target = jnp.arange(logits.shape[-1]) == index[..., None]
        change = jnp.where(is_target, to_logprobs, 0.0) - probabilities * to_logprobs
        if self.entropy_gradient:
            change += probabilities * (normaliser - entropies - logits) * to_entropies
        return (change / self.temperature).astype(self.dtype)

    def to_inputs(
        self, change: jax.Array, states: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Gradients of the states [B, C, D], and float32 of the whole width of the weights.

        All tokens are one axis: see `products.rows_product`.
        """
        changes = change.reshape(-1, change.shape[-1])
        rows = states.astype(self.dtype).reshape(-1, states.shape[-1])
        products = ("tv,vd->td", "tv,td->vd") if self.vocab_first else ("tv,dv->td", "td,tv->dv")
        to_states = jnp.einsum(products[0], changes, weights, preferred_element_type=jnp.float32)
        pair = (changes, rows) if self.vocab_first else (rows, changes)
        to_weights = jnp.einsum(products[1], *pair, preferred_element_type=jnp.float32)
        return self.layout.over_vocab(to_states).reshape(states.shape).astype(states.dtype), to_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    head: _Head, hidden: jax.Array, weights: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(head, hidden, weights, targets)[0]


def _forward(
    head: _Head, hidden: jax.Array, weights: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    keeps = hidden.shape[1] <= head.chunk

    def local(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> Saved:
        weights = head.whole(weights)

        def one(inputs: Saved) -> Saved:
            return head.values(head.logits(inputs[0], weights), inputs[1])

        if keeps:
            logits = head.logits(hidden, weights)
            return *head.values(logits, targets), logits
        columns = jax.lax.map(one, (_chunks(hidden, head.chunk), _chunks(targets, head.chunk)))
        return tuple(_columns(x, hidden.shape[1]) for x in columns)

    rows = head.layout.spec("rows", None)
    inputs = head.layout.spec("rows", None, None), head.weights_spec, rows
    outputs = (rows, rows, rows, head.layout.spec("rows", None, "vocab"))[: 4 if keeps else 3]
    logprobs, *rest = head.layout.on_devices(local, inputs, outputs)(hidden, weights, targets)
    return (logprobs, rest[0]), (hidden, weights, targets, *rest)


def _backward(
    head: _Head, saved: Saved, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    def local(
        hidden: jax.Array, weights: jax.Array, targets: jax.Array, known: Saved, kept: Saved
    ) -> tuple[jax.Array, jax.Array]:
        whole = head.whole(weights)

        def one(total: jax.Array, inputs: Saved) -> tuple[jax.Array, jax.Array]:
            states, wanted, *known = inputs
            change = head.change(head.logits(states, whole), wanted, tuple(known))
            to_states, to_weights = head.to_inputs(change, states, whole)
            return total + to_weights, to_states

        if kept:
            to_hidden, total = head.to_inputs(head.change(kept[0], targets, known), hidden, whole)
        else:
            chunks = tuple(_chunks(x, head.chunk) for x in (hidden, targets, *known))
            total, columns = jax.lax.scan(one, jnp.zeros(whole.shape, jnp.float32), chunks)
            to_hidden = _columns(columns, hidden.shape[1])
        return to_hidden, head.layout.scattered(total, head.width_axis).astype(weights.dtype)

    hidden, weights, targets, entropies, normaliser, *kept = saved
    rows, states = head.layout.spec("rows", None), head.layout.spec("rows", None, None)
    logits = tuple(head.layout.spec("rows", None, "vocab") for _ in kept)
    inputs = states, head.weights_spec, rows, (rows,) * 4, logits
    known = normaliser, entropies, *gradients
    run = head.layout.on_devices(local, inputs, (states, head.weights_spec))
    to_hidden, to_weights = run(hidden, weights, targets, known, tuple(kept))
    return to_hidden, to_weights, None


_logprobs.defvjp(_forward, _backward)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [n, B, C, ...], zeros after the end."""
    num_chunks = math.ceil(x.shape[1] / chunk)
    padding = [(0, 0), (0, num_chunks * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, padding).reshape(x.shape[0], num_chunks, chunk, *x.shape[2:]), 1, 0)


def _columns(chunks: jax.Array, length: int) -> jax.Array:
    """[n, B, C, ...] -> [B, T, ...], what follows T dropped."""
    rows = jnp.moveaxis(chunks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]
