"""Log-probabilities of tokens without an array of logits of [B, T, V].

`_forward` computes the log-probabilities and entropies one chunk of tokens at a time, and `_backward`
computes the logits of each chunk again. Both run on every device with its own shards of rows and vocabulary
(`VocabLayout`).

Letters: B rows, T tokens of a row, D width of the hidden states, V vocabulary (of one device, inside the
functions that run there), C tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from calibadv_jax.policy.kernels.custom_gradients import inner_product
from calibadv_jax.policy.sharding import VocabLayout, vocab_layout
from calibadv_jax.policy.transformer import Decoder

# A row is cut into at least so many chunks. Where few of its tokens are used, the unused part of the last
# chunk then costs little.
MIN_CHUNKS = 8

Arrays = tuple[Any, ...]


def token_logprobs(
    decoder: Decoder,
    hidden: Array,
    targets: Array,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = True,
    used: Array | None = None,
) -> tuple[Array, Array]:
    """Return the log-probability of each target, and the entropy of the distribution that it is drawn from.

    If one chunk holds a whole row, all tokens are computed at once and the logits are kept for the backward
    pass. The weights of the output head are gathered once in each direction.

    Args:
        decoder: owner of the output head.
        hidden: hidden states [B, T, D]; each predicts the target of its column.
        targets: int32 [B, T].
        temperature: divides the logits, as in the sampler.
        chunk: most used tokens of a row whose logits exist at once.
        entropy_gradient: False: nothing is differentiated through the entropies, which saves its cost.
        used: bool [B, T], tokens whose values and gradients are used; the values of other tokens may be 0.
            None: all tokens.

    Returns:
        Log-probabilities and entropies in nats, float32 [B, T].
    """
    weights, is_vocab_first = decoder.head()
    if is_vocab_first:
        vocab, width = weights.shape
    else:
        width, vocab = weights.shape
    head = _OutputHead(
        layout=vocab_layout(hidden.shape[0], width, vocab),
        is_vocab_first=is_vocab_first,
        dtype=decoder.numerics.compute_dtype,
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
    )
    if used is None:
        used = jnp.ones(targets.shape, bool)
    return _logprobs(head, hidden, weights, targets, used)


@dataclass(frozen=True)
class _OutputHead:
    """What is known of the output head when a program is compiled.

    Attributes:
        layout: mesh axes of rows, width and vocabulary.
        is_vocab_first: whether the weights are [V, D]; else they are [D, V].
        dtype: of the operands of products.
        temperature: divides the logits.
        chunk: most used tokens of a row whose logits exist at once.
        entropy_gradient: whether gradients flow through the entropies.
    """

    layout: VocabLayout
    is_vocab_first: bool
    dtype: Any
    temperature: float
    chunk: int
    entropy_gradient: bool

    @property
    def weights_spec(self) -> Any:
        """PartitionSpec of the weights."""
        if self.is_vocab_first:
            return self.layout.spec("vocab", "width")
        return self.layout.spec("width", "vocab")

    @property
    def width_axis(self) -> int:
        """The axis of the weights that is the width D."""
        return 1 if self.is_vocab_first else 0

    def gather_weights(self, weights: Array) -> Array:
        """Gather the whole width of this device's shard of the weights.

        Args:
            weights: [V, D] or [D, V], by `is_vocab_first`, with this device's shards of V and D.

        Returns:
            The weights in the compute dtype, with all of D.
        """
        return self.layout.gather_width(weights.astype(self.dtype), self.width_axis)

    def logits(self, states: Array, weights: Array) -> Array:
        """Return the logits of hidden states, divided by the temperature.

        The products are those of `Decoder.logits`.

        Args:
            states: hidden states [B, C, D].
            weights: with the whole width, from `gather_weights`.

        Returns:
            float32 [B, C, V].
        """
        equation = "BCD,VD->BCV" if self.is_vocab_first else "BCD,DV->BCV"
        states = states.astype(self.dtype)
        logits = jnp.einsum(equation, states, weights, preferred_element_type=jnp.float32)
        return logits / self.temperature

    def logprobs(self, logits: Array, targets: Array) -> tuple[Array, Array, Array]:
        """Return the log-probabilities of targets, the entropies, and the log-sum-exps of the logits.

        Args:
            logits: float32 [B, C, V], of this device's shard of the vocabulary.
            targets: int32 [B, C].

        Returns:
            Three arrays float32 [B, C].
        """
        layout = self.layout
        largest = logits.max(-1)
        if layout.vocab is not None:
            largest = jax.lax.pmax(largest, layout.vocab)
        exponentials = jnp.exp(logits - largest[..., None])
        total = layout.sum_over_vocab(exponentials.sum(-1))
        expected_logit = layout.sum_over_vocab(inner_product(exponentials, logits)) / total
        shard_size = logits.shape[-1]
        index = targets - layout.first_token(shard_size)
        is_here = (index >= 0) & (index < shard_size)
        safe_index = jnp.where(is_here, index, 0)
        target_logit = jnp.take_along_axis(logits, safe_index[..., None], axis=-1)[..., 0]
        target_logit = layout.sum_over_vocab(jnp.where(is_here, target_logit, 0.0))
        normaliser = largest + jnp.log(total)
        return target_logit - normaliser, normaliser - expected_logit, normaliser

    def logits_gradient(
        self,
        logits: Array,
        targets: Array,
        normaliser: Array,
        entropies: Array,
        logprobs_gradient: Array,
        entropies_gradient: Array,
    ) -> Array:
        """Return the gradient of the logits before they are divided by the temperature.

        With p the probabilities, z the logits and H the entropy: d logprob / dz = onehot(target) - p, and
        dH / dz = p (logsumexp(z) - H - z).

        Args:
            logits: float32 [B, C, V].
            targets: int32 [B, C].
            normaliser: log-sum-exps of the logits, float32 [B, C].
            entropies: float32 [B, C].
            logprobs_gradient: gradient of the log-probabilities, float32 [B, C].
            entropies_gradient: gradient of the entropies, float32 [B, C].

        Returns:
            [B, C, V] in the compute dtype.
        """
        normaliser = normaliser[..., None]  # [B, C, 1]
        entropies = entropies[..., None]
        logprobs_gradient = logprobs_gradient[..., None]
        entropies_gradient = entropies_gradient[..., None]
        probabilities = jnp.exp(logits - normaliser)
        shard_size = logits.shape[-1]
        index = targets - self.layout.first_token(shard_size)
        is_target = jnp.arange(shard_size) == index[..., None]  # [B, C, V]
        gradient = jnp.where(is_target, logprobs_gradient, 0.0) - probabilities * logprobs_gradient
        if self.entropy_gradient:
            gradient += probabilities * (normaliser - entropies - logits) * entropies_gradient
        return (gradient / self.temperature).astype(self.dtype)

    def input_gradients(self, gradient: Array, states: Array, weights: Array) -> tuple[Array, Array]:
        """Return the gradients of hidden states and weights.

        Args:
            gradient: of the logits, [B, C, V].
            states: hidden states [B, C, D].
            weights: with the whole width, [V, D] or [D, V].

        Returns:
            The gradient of the states [B, C, D] in their dtype, and that of the weights in float32, not yet
            summed over the devices.
        """
        # In einsums, t are the B * C tokens.
        token_gradients = gradient.reshape(-1, gradient.shape[-1])  # [t, V]
        token_states = states.astype(self.dtype).reshape(-1, states.shape[-1])  # [t, D]
        einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        if self.is_vocab_first:
            states_gradient = einsum("tV,VD->tD", token_gradients, weights)
            weights_gradient = einsum("tV,tD->VD", token_gradients, token_states)
        else:
            states_gradient = einsum("tV,DV->tD", token_gradients, weights)
            weights_gradient = einsum("tD,tV->DV", token_states, token_gradients)
        states_gradient = self.layout.sum_over_vocab(states_gradient).reshape(states.shape)
        return states_gradient.astype(states.dtype), weights_gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    head: _OutputHead,
    hidden: Array,
    weights: Array,
    targets: Array,
    used: Array,
) -> tuple[Array, Array]:
    results, _ = _forward(head, hidden, weights, targets, used)
    return results


def _forward(
    head: _OutputHead,
    hidden: Array,
    weights: Array,
    targets: Array,
    used: Array,
) -> tuple[tuple[Array, Array], Arrays]:
    keeps_logits = hidden.shape[1] <= head.chunk

    def compute_shard(hidden: Array, weights: Array, targets: Array, used: Array) -> Arrays:
        """Return log-probabilities, entropies and log-sum-exps, and the logits if they are kept."""
        weights = head.gather_weights(weights)
        if keeps_logits:
            logits = head.logits(hidden, weights)
            return *head.logprobs(logits, targets), logits
        chunks = _Chunks.of(used, head)

        def compute_chunk(number: Array, results: Arrays) -> Arrays:
            """Write one chunk's log-probabilities, entropies and log-sum-exps."""
            chunk_states, chunk_targets = chunks.read(number, (hidden, targets))
            chunk_logits = head.logits(chunk_states, weights)
            return chunks.write(number, results, head.logprobs(chunk_logits, chunk_targets))

        zeros = jnp.zeros(targets.shape, jnp.float32)
        return jax.lax.fori_loop(0, chunks.count, compute_chunk, (zeros, zeros, zeros))

    spec = head.layout.spec
    rows_spec = spec("rows", None)
    inputs = (spec("rows", None, None), head.weights_spec, rows_spec, rows_spec)
    outputs: Arrays = (rows_spec, rows_spec, rows_spec)
    if keeps_logits:
        outputs += (spec("rows", None, "vocab"),)
    compute = head.layout.on_devices(compute_shard, inputs, outputs)
    logprobs, entropies, normaliser, *kept_logits = compute(hidden, weights, targets, used)
    saved = (hidden, weights, targets, used, entropies, normaliser, tuple(kept_logits))
    return (logprobs, entropies), saved


def _backward(
    head: _OutputHead, saved: Arrays, gradients: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    def compute_shard(hidden: Array, weights: Array, row_arrays: Arrays, kept_logits: Arrays) -> Arrays:
        """Return this device's gradients of hidden states and weights."""
        all_weights = head.gather_weights(weights)
        targets, used, *values = row_arrays
        if kept_logits:
            logits_gradient = head.logits_gradient(kept_logits[0], targets, *values)
            hidden_gradient, weights_gradient = head.input_gradients(logits_gradient, hidden, all_weights)
        else:
            chunks = _Chunks.of(used, head)

            def add_chunk(number: Array, carry: Arrays) -> Arrays:
                """Write one chunk's gradient of hidden states, and add its gradient of the weights."""
                hidden_gradient, weights_gradient = carry
                chunk_states, chunk_targets, *chunk_values = chunks.read(number, (hidden, targets, *values))
                chunk_logits = head.logits(chunk_states, all_weights)
                logits_gradient = head.logits_gradient(chunk_logits, chunk_targets, *chunk_values)
                states_gradient, change = head.input_gradients(logits_gradient, chunk_states, all_weights)
                (hidden_gradient,) = chunks.write(number, (hidden_gradient,), (states_gradient,))
                return hidden_gradient, weights_gradient + change

            hidden_zeros = jnp.zeros(hidden.shape, hidden.dtype)
            weights_zeros = jnp.zeros(all_weights.shape, jnp.float32)
            start = (hidden_zeros, weights_zeros)
            hidden_gradient, weights_gradient = jax.lax.fori_loop(0, chunks.count, add_chunk, start)
        weights_gradient = head.layout.scatter_width(weights_gradient, head.width_axis)
        return hidden_gradient, weights_gradient.astype(weights.dtype)

    hidden, weights, targets, used, entropies, normaliser, kept_logits = saved
    logprobs_gradient, entropies_gradient = gradients
    row_arrays = (targets, used, normaliser, entropies, logprobs_gradient, entropies_gradient)
    spec = head.layout.spec
    states_spec = spec("rows", None, None)
    rows_specs = (spec("rows", None),) * len(row_arrays)
    logits_specs = (spec("rows", None, "vocab"),) * len(kept_logits)
    inputs = (states_spec, head.weights_spec, rows_specs, logits_specs)
    outputs = (states_spec, head.weights_spec)
    compute = head.layout.on_devices(compute_shard, inputs, outputs)
    hidden_gradient, weights_gradient = compute(hidden, weights, row_arrays, kept_logits)
    return hidden_gradient, weights_gradient, None, None


_logprobs.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Chunks:
    """The used tokens of a device's rows, `size` at a time; a chunk may hold tokens of several rows.

    Attributes:
        columns: int32 [n * size], places of the used tokens in the rows laid end to end. A place past the end
            stands for no token.
        size: C, tokens of a chunk.
        count: int32 [], chunks with a token.
    """

    columns: Array
    size: int
    count: Array

    @classmethod
    def of(cls, used: Array, head: _OutputHead) -> _Chunks:
        """Return the chunks of a device's used tokens.

        Args:
            used: bool [B, T].
            head: gives the tokens of a chunk and the mesh axes of the rows.

        Returns:
            The chunks. Devices that share a row's vocabulary have the same `count`.
        """
        num_rows, length = used.shape
        size = num_rows * min(head.chunk, math.ceil(length / MIN_CHUNKS))
        padded_size = math.ceil(used.size / size) * size
        (columns,) = jnp.nonzero(used.reshape(-1), size=padded_size, fill_value=used.size)
        count = -(-used.sum() // size)
        if head.layout.rows:
            # The same count on every device, since devices that share a row's vocabulary exchange sums in
            # every chunk.
            count = jax.lax.pmax(count, head.layout.rows)
        return cls(columns, size, count)

    def read(self, number: Array, arrays: Arrays) -> Arrays:
        """Return one chunk of each array.

        Args:
            number: int32 [], index of the chunk.
            arrays: each [B, T, ...].

        Returns:
            [1, C, ...] for each array; 0 where the chunk has no token.
        """
        columns = self._columns(number)
        chunks = []
        for array in arrays:
            tokens = array.reshape(-1, *array.shape[2:])  # [B*T, ...]
            chunks.append(tokens.at[columns].get(mode="fill", fill_value=0)[None])
        return tuple(chunks)

    def write(self, number: Array, arrays: Arrays, values: Arrays) -> Arrays:
        """Return arrays with the values of one chunk.

        Args:
            number: int32 [], index of the chunk.
            arrays: each [B, T, ...].
            values: [1, C, ...] for each array. Those without a token are dropped.

        Returns:
            The arrays [B, T, ...] with the chunk's tokens replaced.
        """
        columns = self._columns(number)
        updated = []
        for array, value in zip(arrays, values, strict=True):
            tokens = array.reshape(-1, *array.shape[2:])  # [B*T, ...]
            tokens = tokens.at[columns].set(value[0], mode="drop")
            updated.append(tokens.reshape(array.shape))
        return tuple(updated)

    def _columns(self, number: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(self.columns, number * self.size, self.size)
