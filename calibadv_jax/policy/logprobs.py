"""Log-probabilities of tokens without ever holding logits of [B, T, V]."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.policy.kernels.elementwise import inner_product
from calibadv_jax.policy.transformer import Decoder
from calibadv_jax.policy.vocabulary import Layout, layout_of

PARTS = 8  # of a row, at least: where few tokens are wanted, little of the last chunk is computed in vain

Saved = tuple[Any, ...]


def token_logprobs(
    decoder: Decoder,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = True,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy of the distribution at every position, or at those wanted.

    Works through at most `chunk` wanted tokens a row at a time; the backward pass recomputes their logits.
    Where one chunk is the whole row, all tokens are computed at once, and the logits are kept. The head's
    weights are gathered once in each direction, whatever the chunk.

    Args:
        hidden: [B, T, D], the state that predicts the target of the same column.
        targets: int32 [B, T].
        temperature: divides the logits, as the sampler did.
        entropy_gradient: False: nothing is differentiated through the entropies, which saves its cost.
        wanted: bool [B, T], the tokens whose values and gradients are used; None: all. Those of the others
            may be zero.

    Returns:
        float32 [B, T] log-probabilities and float32 [B, T] entropies (nats).
    """
    weights, vocab_first = decoder.head()
    width, vocab = weights.shape[::-1] if vocab_first else weights.shape
    layout = layout_of(hidden.shape[0], width, vocab)
    head = _Head(layout, vocab_first, decoder.numerics.compute_dtype, temperature, chunk, entropy_gradient)
    wanted = jnp.ones(targets.shape, bool) if wanted is None else wanted
    return _logprobs(head, hidden, weights, targets, wanted)


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

        All tokens are one axis: see `cpu_products.rows_product`.
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
    head: _Head, hidden: jax.Array, weights: jax.Array, targets: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(head, hidden, weights, targets, wanted)[0]


def _forward(
    head: _Head, hidden: jax.Array, weights: jax.Array, targets: jax.Array, wanted: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    keeps = hidden.shape[1] <= head.chunk

    def local(hidden: jax.Array, weights: jax.Array, targets: jax.Array, wanted: jax.Array) -> Saved:
        weights = head.whole(weights)
        if keeps:
            logits = head.logits(hidden, weights)
            return *head.values(logits, targets), logits
        chunks = _Chunks.of(wanted, head)

        def one(number: jax.Array, found: Saved) -> Saved:
            states, to_find = chunks.taken(number, (hidden, targets))
            return chunks.put(number, found, head.values(head.logits(states, weights), to_find))

        nothing = jnp.zeros(targets.shape, jnp.float32)
        return chunks.each(one, (nothing,) * 3)

    rows = head.layout.spec("rows", None)
    inputs = head.layout.spec("rows", None, None), head.weights_spec, rows, rows
    outputs = (rows, rows, rows, head.layout.spec("rows", None, "vocab"))[: 4 if keeps else 3]
    logprobs, *rest = head.layout.on_devices(local, inputs, outputs)(hidden, weights, targets, wanted)
    return (logprobs, rest[0]), (hidden, weights, targets, wanted, *rest)


def _backward(
    head: _Head, saved: Saved, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    def local(
        hidden: jax.Array, weights: jax.Array, of_rows: Saved, kept: Saved
    ) -> tuple[jax.Array, jax.Array]:
        whole = head.whole(weights)
        targets, wanted, *known = of_rows
        if kept:
            to_hidden, total = head.to_inputs(head.change(kept[0], targets, tuple(known)), hidden, whole)
        else:
            chunks = _Chunks.of(wanted, head)

            def one(number: jax.Array, carry: Saved) -> Saved:
                to_hidden, total = carry
                states, to_find, *values = chunks.taken(number, (hidden, targets, *known))
                change = head.change(head.logits(states, whole), to_find, tuple(values))
                to_states, to_weights = head.to_inputs(change, states, whole)
                return *chunks.put(number, (to_hidden,), (to_states,)), total + to_weights

            start = jnp.zeros(hidden.shape, hidden.dtype), jnp.zeros(whole.shape, jnp.float32)
            to_hidden, total = chunks.each(one, start)
        return to_hidden, head.layout.scattered(total, head.width_axis).astype(weights.dtype)

    hidden, weights, targets, wanted, entropies, normaliser, *kept = saved
    rows, states = head.layout.spec("rows", None), head.layout.spec("rows", None, None)
    logits = tuple(head.layout.spec("rows", None, "vocab") for _ in kept)
    of_rows = targets, wanted, normaliser, entropies, *gradients
    inputs = states, head.weights_spec, (rows,) * len(of_rows), logits
    run = head.layout.on_devices(local, inputs, (states, head.weights_spec))
    to_hidden, to_weights = run(hidden, weights, of_rows, tuple(kept))
    return to_hidden, to_weights, None, None


_logprobs.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Chunks:
    """The wanted tokens of a device's rows, `size` at a time, whatever rows they stand in."""

    columns: jax.Array  # int32 [n * size]: where they stand in rows laid end to end; past the end: none
    size: int
    count: jax.Array  # chunks that hold any

    @classmethod
    def of(cls, wanted: jax.Array, head: _Head) -> _Chunks:
        """Of wanted bool [B, T]."""
        rows, length = wanted.shape
        size, total = rows * min(head.chunk, math.ceil(length / PARTS)), wanted.size
        whole = math.ceil(total / size) * size
        columns = jnp.nonzero(wanted.reshape(-1), size=whole, fill_value=total)[0]
        # As many on every device: the devices that share a row's vocabulary must not wait for each other.
        return cls(columns, size, head.layout.largest_of_rows(-(-wanted.sum() // size)))

    def each(self, one: Callable[[jax.Array, Saved], Saved], start: Saved) -> Saved:
        return jax.lax.fori_loop(0, self.count, one, start)

    def taken(self, number: jax.Array, arrays: Saved) -> Saved:
        """[B, T, ...] -> [1, size, ...] of each array, zeros where there is no token."""
        here = self._columns(number)
        rows = (x.reshape(-1, *x.shape[2:]) for x in arrays)
        return tuple(x.at[here].get(mode="fill", fill_value=0)[None] for x in rows)

    def put(self, number: jax.Array, arrays: Saved, values: Saved) -> Saved:
        """Values [1, size, ...] written into arrays [B, T, ...]."""
        here = self._columns(number)
        return tuple(
            x.reshape(-1, *x.shape[2:]).at[here].set(of[0], mode="drop").reshape(x.shape)
            for x, of in zip(arrays, values, strict=True)
        )

    def _columns(self, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.columns, number * self.size, self.size)
