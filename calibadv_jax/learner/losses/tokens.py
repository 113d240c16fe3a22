"""What a loss sees of the tokens, and sums over the sequences that share a packed row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Packed rows [R, L], float32 where nothing else is said. Sequences lie one after the other in a row."""

    logprobs: jax.Array  # of the current policy: the gradient flows through them
    old_logprobs: jax.Array  # the ratio's denominator
    log_ratio: jax.Array  # logprobs - old_logprobs, held within 20 on both sides
    advantages: jax.Array
    trained: jax.Array  # bool; the other columns must have no influence
    segment_ids: jax.Array  # int32, the sequence's number in its row; 0 = padding
    factors: jax.Array | None  # what the loss's look at the whole mini-batch gave each token

    @property
    def ratio(self) -> jax.Array:
        return jnp.exp(self.log_ratio)

    @property
    def given(self) -> jax.Array:
        """`factors`, of a loss that has a look.

        Raises:
            ValueError: the batch was laid without them.
        """
        if self.factors is None:
            raise ValueError("this loss needs batch.factors, which learner.step lays beside the samples")
        return self.factors


@jax.jit
def segment_sums(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum over each token's sequence, the same number at every token of it: [R, L]."""
    return _over_segments(jnp.add, values, segment_ids)


@jax.jit
def segment_maxima(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The largest value of each token's sequence, at every token of it; of values >= 0: [R, L]."""
    return _over_segments(jnp.maximum, values, segment_ids)


def _over_segments(join: Callable[..., jax.Array], values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """A scan and not a scatter: it joins in the same order on every device, and rows stay on theirs.

    Args:
        join: for which 0 changes nothing.
    """
    edges = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = jnp.ones((len(segment_ids), 1), bool)
    starts, ends = jnp.concatenate([edge, edges], axis=1), jnp.concatenate([edges, edge], axis=1)

    def added(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        begins = right[1]
        return jnp.where(begins, right[0], join(left[0], right[0])), left[1] | begins

    running, _ = jax.lax.associative_scan(added, (values, starts), axis=1)
    totals = jnp.where(ends, running, jnp.zeros_like(running))
    back, _ = jax.lax.associative_scan(added, (totals, ends), axis=1, reverse=True)
    return back


def segment_means(values: jax.Array, tokens: Tokens) -> jax.Array:
    """The mean over the trained tokens of each token's sequence; 0 where it has none."""
    count = segment_sums(tokens.trained.astype(jnp.float32), tokens.segment_ids)
    total = segment_sums(jnp.where(tokens.trained, values, 0.0), tokens.segment_ids)
    return total / jnp.maximum(count, 1.0)
