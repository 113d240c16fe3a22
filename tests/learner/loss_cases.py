"""Rows of tokens as the learner sees them, for tests of losses: packed and differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.learner.batching import Rows, RowShape, Sample, microbatches, pack, token_weights
from calibadv_jax.learner.objective import policy_gradient

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


def packed(cases, config, rng=None, on_policy=False, order=None, pack_length=ROW, loss=None):
    """Loss, gradient [T] of each case as they came, and metrics, of cases from `sample`.

    `loss` replaces that of the config.
    """
    order = list(range(len(cases))) if order is None else order
    samples, new = [cases[index][0] for index in order], [cases[index][1] for index in order]
    weights = token_weights(samples, config.aggregation, config.length_norm)
    rng = rng or np.random.default_rng(0)
    policy_loss = policy_gradient(config, on_policy)
    factors = None if loss else policy_loss.factors(samples, weights, new, rng)
    loss = loss or policy_loss
    rows = Rows(samples, [RowShape(pack_length, ROWS)], weights)
    (laid,) = rows.batches(factors)
    (batch,) = microbatches(laid, ROWS)
    columns = np.zeros((ROWS, pack_length), np.float32)
    for placement, values in zip(rows.plan.placements, new, strict=True):
        columns[placement.row, placement.start : placement.start + placement.length - 1] = values[1:]

    def objective(logprobs):
        return loss(logprobs, jnp.zeros_like(logprobs), batch, None)

    (value, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(jnp.asarray(columns))
    gradients = rows.unpack([np.asarray(gradient)])
    in_order = [gradients[order.index(index)][1:] for index in range(len(cases))]
    return float(value), in_order, {name: float(number) for name, number in metrics.items()}


def batch_of(advantages, old, sampler=None):
    """One row: a prompt token, then one trained token for each advantage, equally weighted."""
    made, _ = sample(old, old, advantages, [1] * len(old), sampler)
    return pack([made], len(old) + 1)


def columns(values):
    return jnp.asarray([[*values, 0.0]], jnp.float32)
