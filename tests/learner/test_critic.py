"""The critic's loss against published values and gradients; its values where a policy has probabilities."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny_policy import NARROW

from calibadv_jax.config import LearnerConfig, MeshConfig
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner.batching import Rows, Sample, token_weights
from calibadv_jax.learner.critic import (
    CriticLearner,
    ValueLoss,
    critic_of,
    critic_params,
    learn_values,
    value_sample,
)
from calibadv_jax.learner.learner import init_params
from calibadv_jax.learner.packing import RowShape
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy

CONFIG = NARROW | {"num_key_value_heads": 2, "tie_word_embeddings": False}


def value_case(case):
    """Our loss and gradient [row][token] of a published case."""
    given = case["inputs"]
    samples = []
    for mask, old, returns in zip(given["mask"], given["old_values"], given["returns"], strict=True):
        columns = [np.concatenate([[0], one]).astype(np.float32) for one in (mask, returns, old)]
        tokens = np.zeros(len(columns[0]), np.int32)
        samples.append(Sample(tokens, columns[0] > 0, columns[1], columns[2] * 0, columns[2]))
    rows = Rows(samples, [RowShape(40, 8)], token_weights(samples, "token_mean"))
    (batch,) = rows.batches()
    values = np.zeros(batch.tokens.shape, np.float32)
    for at, row in zip(rows.plan.placements, given["values"], strict=True):
        values[at.row, at.start : at.start + at.length - 1] = row
    loss = ValueLoss(case["settings"]["clip_value"])
    (found, metrics), gradient = jax.value_and_grad(lambda x: loss(x, x, batch, None), has_aux=True)(values)
    return float(found), float(metrics["critic/clipfrac"]), rows.taken([np.asarray(gradient)])


def test_published_values_and_gradients(shared):
    cases = json.loads((shared / "golden" / "losses.json").read_text(encoding="utf-8"))
    chosen = [c for c in cases if c["loss"] == "value" and c["settings"]["aggregation"] == "token-mean"]
    assert len(chosen) == 4 - 1 + 1
    for case in chosen:
        loss, clipped, gradients = value_case(case)
        expected = case["expected"]
        np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5, atol=1e-6)
        assert clipped == pytest.approx(expected["clip_fraction"], abs=1e-6)
        for found, wanted in zip(gradients, expected["gradient"], strict=True):
            np.testing.assert_allclose(found[1:], wanted, rtol=1e-4, atol=1e-6)
