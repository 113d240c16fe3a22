"""Adapters beside a frozen base: what they compute, how they are drawn, what they become as one weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import WIDER, row_logits, single_device, tiny

from calibadv_jax.config import LoraConfig
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.adapters import Adapters, merge_params, split
from calibadv_jax.policy.weights import flatten

CONFIG = WIDER | {"vocab_size": 48}
ADAPTERS = Adapters(4, 6.0, ("down", "k", "o"), "float32")


@pytest.fixture(scope="module")
def policy():
    return tiny(CONFIG, ADAPTERS)


@pytest.fixture(scope="module")
def drawn(policy):
    return jax.jit(policy.init)(jax.random.key(0))


def logits(policy, params):
    return row_logits(policy, params, np.arange(12)[None])


@pytest.mark.medium
def test_new_adapters_change_nothing(policy, drawn):
    plain = jax.jit(tiny(CONFIG).init)(jax.random.key(0))
    base, adapters = split(drawn)
    jax.tree.map(np.testing.assert_array_equal, base, plain)
    np.testing.assert_array_equal(logits(policy, drawn), logits(policy, base))
    modules = ("attn.k", "attn.o", "mlp.down")
    names = {f"layers.{module}.{name}" for module in modules for name in ("lora_a", "lora_b")}
    assert flatten(adapters).keys() == names
    for path, leaf in flatten(jax.device_get(adapters)).items():
        if path.endswith("lora_b"):
            assert not leaf.any()
        else:  # evenly within 1 / sqrt(in), as PEFT draws them
            bound = 1 / np.sqrt(leaf.shape[1])
            assert leaf.std() == pytest.approx(bound / np.sqrt(3), rel=0.15) and np.abs(leaf).max() <= bound


@pytest.mark.medium
def test_trained_parameters_are_drawn_alone_with_the_same_values(policy):
    mesh = single_device()
    whole = init_params(policy, mesh, seed=5)
    assert flatten(whole).keys() == flatten(policy.abstract_params).keys()
    trained = init_params(policy, mesh, seed=5, only_trained=True)
    jax.tree.map(np.testing.assert_array_equal, trained, split(whole)[1])


@pytest.mark.medium
def test_merged_weights_compute_what_adapters_do(policy, drawn):
    """As after some updates: no adapter is 0."""
    (base, adapters), rng = policy.split(drawn), np.random.default_rng(0)
    params = merge_params(base, jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), adapters))
    merged = policy.fold_adapters(params, jnp.float32)
    assert jax.tree.structure(merged) == jax.tree.structure(policy.abstract_base)
    actual, expected = logits(policy, merged), logits(policy, params)
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    assert np.abs(expected - logits(policy, base)).max() > 0.1


def test_frozen_base_has_its_own_precision():
    config = LoraConfig(rank=2, targets=["v"])
    policy = tiny(CONFIG, Adapters.from_config(config))
    dtypes = {path: leaf.dtype for path, leaf in flatten(policy.abstract_params).items()}
    trained = {path for path, dtype in dtypes.items() if dtype == jnp.float32}
    assert trained == {f"layers.attn.v.lora_{x}" for x in "ab"} == set(flatten(policy.abstract_trained))
    assert {dtype for path, dtype in dtypes.items() if path not in trained} == {jnp.dtype(jnp.bfloat16)}
    assert Adapters.from_config(LoraConfig()) is None
