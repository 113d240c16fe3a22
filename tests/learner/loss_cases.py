"""Rows of tokens as the learner sees them, for tests of losses: packed, looked at, and differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.learner.batching import Sample, lay, taken, token_weights
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.learner.packing import place
from calibadv_jax.learner.step import look

ROW, ROWS = 40, 8  # one shape for all cases: compiled once


def sample(new, old, advantages, mask, sampler=None):
    """A prompt token and then a row of a case."""

    def after(values, dtype=np.float32):
        return np.concatenate([np.zeros(1, dtype), np.asarray(values, dtype)])

    made = Sample(
        np.arange(len(new) + 1, dtype=np.int32),
        after(mask, bool),
        after(advantages),
        after(old if sampler is None else sampler),
        after(old),
    )
    return made, after(new)


def packed(rows, config, rng=None, on_policy=False, order=None, row_length=ROW):
    """Loss, gradient [T] of each row in the order in which they came, and metrics, of rows from `sample`."""
    order = list(range(len(rows))) if order is None else order
    samples, new = [rows[index][0] for index in order], [rows[index][1] for index in order]
    weights = token_weights(samples, config.aggregation, config.length_norm)
    rng = rng or np.random.default_rng(0)
    factors = look(samples, weights, new, on_policy, config, rng)
    placements, count = place([len(one.tokens) for one in samples], row_length)
    assert count <= ROWS
    (batch,) = lay(samples, weights, placements, [(ROWS, row_length)], factors)
    columns = np.zeros((ROWS, row_length), np.float32)
    for at, values in zip(placements, new, strict=True):
        columns[at.row, at.start : at.start + at.length - 1] = values[1:]
    loss = policy_gradient(config, on_policy)

    def objective(logprobs):
        return loss(logprobs, jnp.zeros_like(logprobs), batch, None)

    (value, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(columns))
    gradients = taken([np.asarray(gradient)], placements)
    back = [gradients[order.index(index)][1:] for index in range(len(rows))]
    return float(value), back, {name: float(number) for name, number in metrics.items()}
