"""Where the state lives on a mesh, and that the temperature reaches every log-probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny_policy import NARROW

from calibadv_jax.config import MeshConfig, OptimizerConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy

CONFIG = NARROW | {"num_key_value_heads": 2, "tie_word_embeddings": True}
SPECS = {  # of the leaves that are split, by the end of their path
    "mlp/gate/kernel": P(None, "fsdp", "tensor"),
    "mlp/up/kernel": P(None, "fsdp", "tensor"),
    "mlp/down/kernel": P(None, "tensor", "fsdp"),
    "attn/q/kernel": P(None, "fsdp", "tensor"),
    "attn/o/kernel": P(None, "tensor", "fsdp"),
    "embed/embedding": P("tensor", "fsdp"),
}


@pytest.fixture(scope="module")
def policy():
    return Policy(architecture_from_hf(CONFIG), Numerics())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_and_moments_are_split_over_the_mesh(policy, name):
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    config = OptimizerConfig(name=name)
    learner = Learner(policy, make_optimizer(config, make_schedule(config, 10)), mesh, LearnerOptions(4))
    state = learner.init(init_params(policy, mesh, 0))
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(policy.abstract_params)
    }
    counts = dict.fromkeys(SPECS, 0)
    abstract = jax.tree_util.tree_leaves(learner.abstract_state())
    for (path, leaf), planned in zip(jax.tree_util.tree_leaves_with_path(state), abstract, strict=True):
        assert leaf.sharding == planned.sharding  # a checkpoint comes back to the same places
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        for tail, expected in SPECS.items():
            (size,) = (size for parameter, size in sizes.items() if parameter.endswith(tail))
            if where.endswith(tail) and leaf.size == size:
                assert leaf.sharding.spec == expected, where
                assert leaf.addressable_shards[0].data.size * 8 == leaf.size, where
                counts[tail] += 1
    adam = {tail: 3 for tail in SPECS}  # the parameter and two moments
    matrices = {tail: 2 for tail in SPECS if "kernel" in tail}  # Muon keeps one momentum
    assert counts == (adam if name == "adamw" else adam | matrices)


@pytest.mark.medium
def test_logprobs_and_loss_are_those_of_the_temperature(policy):
    """Against the decoder's logits, in a row that the chunk does not divide."""
    mesh = make_mesh(MeshConfig(fsdp=1), devices=jax.devices()[:1])
    learner = Learner(policy, optax.sgd(0.5), mesh, LearnerOptions(1, temperature=0.5, logprob_chunk=4))
    params = init_params(policy, mesh, 0)
    params["embed"]["embedding"] = params["embed"]["embedding"] * 30  # far from uniform
    tokens = np.random.default_rng(0).integers(0, 16, 7).astype(np.int32)
    nothing = np.zeros(7, np.float32)
    batch = pack([Sample(tokens, np.arange(7) > 2, nothing, nothing)], 7)

    def logits(params):
        decoder = policy.merge(params)
        return decoder.logits(decoder(batch.tokens, batch.positions, batch.segment_ids))[0]

    table = np.asarray(jax.nn.log_softmax(jax.jit(logits)(params) / 0.5))
    assert np.ptp(table) > 1
    expected = table[np.arange(6), tokens[1:]]
    np.testing.assert_allclose(learner.logprobs(params, batch)[0, :6], expected, atol=1e-4)
    entropy = float(-np.mean(np.sum(np.exp(table[2:6]) * table[2:6], axis=-1)))
    before = jax.tree.map(jnp.copy, params)
    state, metrics = learner.update(learner.init(params), [batch], negative_log_likelihood)
    assert metrics["actor/loss"] == pytest.approx(-float(expected[2:].mean()), abs=1e-4)
    assert metrics["sft/entropy"] == pytest.approx(entropy, abs=1e-4)
    moved = jax.tree.map(lambda a, b: a - b, before, state["params"])
    assert float(optax.tree.norm(moved)) == pytest.approx(0.5 * metrics["actor/grad_norm"], rel=1e-3)
    assert int(state["updates"]) == 1
    assert metrics["actor/skipped"] == 0
