"""Log-probabilities of tokens without logits of [B, T, V].

`_forward` computes the log-probabilities and entropies a chunk of tokens at a time, `_backward` computes the
logits of a chunk again. Both run on every device with its own parts of rows and vocabulary (`VocabLayout`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calibadv_jax.policy.kernels.custom_gradients import inner_product
from calibadv_jax.policy.sharding import VocabLayout, vocab_layout
from calibadv_jax.policy.transformer import Decoder

PARTS = 8  # chunks of a row, at least: where few tokens are used, little of the last chunk is in vain

Arrays = tuple[Any, ...]
Pair = tuple[Array, Array]


def token_logprobs(
    decoder: Decoder,
    hidden: Array,
    targets: Array,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = True,
    used: Array | None = None,
) -> Pair:
    """Return the log-probability of each target and the entropy of its distribution (nats), float32 [B, T].

    Computes at most `chunk` used tokens a row at a time. If one chunk is the whole row, all tokens are
    computed at once, and the logits are kept. The head's weights are gathered once in each direction.

    Args:
        hidden: [B, T, D], the state that predicts the target of the same column.
        targets: int32 [B, T].
        temperature: divides the logits, as the sampler did.
        entropy_gradient: False: nothing is differentiated through the entropies, which saves its cost.
        used: bool [B, T], the tokens whose values and gradients are used; None: all. Others may be zero.
    """
    weights, vocab_first = decoder.head()
    width, vocab = weights.shape[::-1] if vocab_first else weights.shape
    layout = vocab_layout(hidden.shape[0], width, vocab)
    dtype = decoder.numerics.compute_dtype
    head = _OutputHead(layout, vocab_first, dtype, temperature, chunk, entropy_gradient)
    used = jnp.ones(targets.shape, bool) if used is None else used
    return _logprobs(head, hidden, weights, targets, used)


@dataclass(frozen=True)
class _OutputHead:
    """The output head as far as it is known at compilation."""

    layout: VocabLayout
    vocab_first: bool  # the weights are [V, D], else [D, V]
    dtype: Any
    temperature: float
    chunk: int
    entropy_gradient: bool

    @property
    def weights_spec(self) -> Any:
        return self.layout.spec("vocab", "width") if self.vocab_first else self.layout.spec("width", "vocab")

    def gathered(self, weights: Array) -> Array:
        """Return the weights in the compute dtype, with the whole width."""
        return self.layout.gathered(weights.astype(self.dtype), int(self.vocab_first))

    def logits(self, states: Array, weights: Array) -> Array:
        """Return the logits of states [B, C, D], float32 [B, C, V]; see `Decoder.logits`."""
        product = "btd,vd->btv" if self.vocab_first else "btd,dv->btv"
        logits = jnp.einsum(product, states.astype(self.dtype), weights, preferred_element_type=jnp.float32)
        return logits / self.temperature

    def values(self, logits: Array, targets: Array) -> Arrays:
        """Return log-probabilities, entropies and log-sum-exps, float32 [B, C]."""
        layout = self.layout
        largest = logits.max(-1)
        if layout.vocab is not None:
            largest = jax.lax.pmax(largest, layout.vocab)
        exponentials = jnp.exp(logits - largest[..., None])
        total = layout.over_vocab(exponentials.sum(-1))
        expected = layout.over_vocab(inner_product(exponentials, logits)) / total
        index = targets - layout.first(logits.shape[-1])
        is_here = (index >= 0) & (index < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(is_here, index, 0)[..., None], axis=-1)[..., 0]
        chosen = layout.over_vocab(jnp.where(is_here, chosen, 0.0))
        normaliser = largest + jnp.log(total)
        return chosen - normaliser, normaliser - expected, normaliser

    def logits_gradient(self, logits: Array, targets: Array, saved: Iterable[Array]) -> Array:
        """Return the gradient [B, C, V] of logits before the temperature, given saved values [B, C]."""
        # Log-sum-exps, entropies, and the gradients of both outputs.
        normaliser, entropies, to_logprobs, to_entropies = (x[..., None] for x in saved)
        probabilities = jnp.exp(logits - normaliser)
        index = targets - self.layout.first(logits.shape[-1])
        is_target = jnp.arange(logits.shape[-1]) == index[..., None]
        change = jnp.where(is_target, to_logprobs, 0.0) - probabilities * to_logprobs
        if self.entropy_gradient:
            change += probabilities * (normaliser - entropies - logits) * to_entropies
        return (change / self.temperature).astype(self.dtype)

    def input_gradients(self, change: Array, states: Array, weights: Array) -> Pair:
        """Return the gradients of states [B, C, D] and of the weights' whole width, in float32."""
        changes = change.reshape(-1, change.shape[-1])
        rows = states.astype(self.dtype).reshape(-1, states.shape[-1])
        products = ("tv,vd->td", "tv,td->vd") if self.vocab_first else ("tv,dv->td", "td,tv->dv")
        to_states = jnp.einsum(products[0], changes, weights, preferred_element_type=jnp.float32)
        pair = (changes, rows) if self.vocab_first else (rows, changes)
        to_weights = jnp.einsum(products[1], *pair, preferred_element_type=jnp.float32)
        return self.layout.over_vocab(to_states).reshape(states.shape).astype(states.dtype), to_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(head: _OutputHead, hidden: Array, weights: Array, targets: Array, used: Array) -> Pair:
    return _forward(head, hidden, weights, targets, used)[0]


def _forward(
    head: _OutputHead, hidden: Array, weights: Array, targets: Array, used: Array
) -> tuple[Pair, Arrays]:
    keeps_logits = hidden.shape[1] <= head.chunk

    def local(hidden: Array, weights: Array, targets: Array, used: Array) -> Arrays:
        weights = head.gathered(weights)
        if keeps_logits:
            logits = head.logits(hidden, weights)
            return *head.values(logits, targets), logits
        chunks = _Chunks.of(used, head)

        def compute(number: Array, results: Arrays) -> Arrays:
            states, chunk_targets = chunks.read(number, (hidden, targets))
            return chunks.write(number, results, head.values(head.logits(states, weights), chunk_targets))

        return jax.lax.fori_loop(0, chunks.count, compute, (jnp.zeros(targets.shape, jnp.float32),) * 3)

    rows = head.layout.spec("rows", None)
    inputs = head.layout.spec("rows", None, None), head.weights_spec, rows, rows
    outputs = (rows, rows, rows, head.layout.spec("rows", None, "vocab"))[: 4 if keeps_logits else 3]
    logprobs, *more = head.layout.on_devices(local, inputs, outputs)(hidden, weights, targets, used)
    return (logprobs, more[0]), (hidden, weights, targets, used, *more)


def _backward(head: _OutputHead, saved: Arrays, gradients: Pair) -> tuple[Array, Array, None, None]:
    def local(hidden: Array, weights: Array, of_rows: Arrays, logits: Arrays) -> Pair:
        whole = head.gathered(weights)
        targets, used, *values = of_rows
        if logits:
            change = head.logits_gradient(logits[0], targets, values)
            to_hidden, total = head.input_gradients(change, hidden, whole)
        else:
            chunks = _Chunks.of(used, head)

            def compute(number: Array, carry: Arrays) -> Arrays:
                to_hidden, total = carry
                states, chunk_targets, *chunk_values = chunks.read(number, (hidden, targets, *values))
                change = head.logits_gradient(head.logits(states, whole), chunk_targets, chunk_values)
                to_states, to_weights = head.input_gradients(change, states, whole)
                return *chunks.write(number, (to_hidden,), (to_states,)), total + to_weights

            start = jnp.zeros(hidden.shape, hidden.dtype), jnp.zeros(whole.shape, jnp.float32)
            to_hidden, total = jax.lax.fori_loop(0, chunks.count, compute, start)
        return to_hidden, head.layout.scattered(total, int(head.vocab_first)).astype(weights.dtype)

    hidden, weights, targets, used, entropies, normaliser, *logits = saved
    spec, weights_spec = head.layout.spec, head.weights_spec
    of_rows = targets, used, normaliser, entropies, *gradients
    rows, states = (spec("rows", None),) * len(of_rows), spec("rows", None, None)
    inputs = states, weights_spec, rows, (spec("rows", None, "vocab"),) * len(logits)
    run = head.layout.on_devices(local, inputs, (states, weights_spec))
    return *run(hidden, weights, of_rows, tuple(logits)), None, None


_logprobs.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Chunks:
    """The used tokens of a device's rows, `size` at a time, from whatever rows."""

    columns: Array  # int32 [n * size]: their places in rows laid end to end; past the end: no token
    size: int
    count: Array  # of chunks with a token

    @classmethod
    def of(cls, used: Array, head: _OutputHead) -> _Chunks:
        rows, length = used.shape  # bool [B, T]
        size, total = rows * min(head.chunk, math.ceil(length / PARTS)), used.size
        whole = math.ceil(total / size) * size
        columns = jnp.nonzero(used.reshape(-1), size=whole, fill_value=total)[0]
        count, axes = -(-used.sum() // size), head.layout.rows
        # As many on every device: the devices that share a row's vocabulary must not wait for each other.
        return cls(columns, size, jax.lax.pmax(count, axes) if axes else count)

    def read(self, number: Array, arrays: Arrays) -> Arrays:
        """Read the chunk [1, size, ...] of each array [B, T, ...]; zeros where there is no token."""
        columns = self._columns(number)
        rows = (x.reshape(-1, *x.shape[2:]) for x in arrays)
        return tuple(x.at[columns].get(mode="fill", fill_value=0)[None] for x in rows)

    def write(self, number: Array, arrays: Arrays, values: Arrays) -> Arrays:
        """Write values [1, size, ...] of a chunk into arrays [B, T, ...]."""
        columns = self._columns(number)
        return tuple(
            x.reshape(-1, *x.shape[2:]).at[columns].set(value[0], mode="drop").reshape(x.shape)
            for x, value in zip(arrays, values, strict=True)
        )

    def _columns(self, number: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(self.columns, number * self.size, self.size)
