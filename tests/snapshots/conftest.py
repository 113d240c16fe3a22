"""A tiny policy and its parameters."""

import gc
from types import SimpleNamespace

import jax
import pytest
import tiny_policy
from mirror_rig import copied, short_pauses  # noqa: F401
from trainer_rig import shared_programs  # noqa: F401

CONFIG = tiny_policy.WIDER | {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "eos_token_id": 1}


def same(first, second):
    """Equal trees: structure, dtypes and every value."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    return all(
        a.dtype == b.dtype and bool((a == b).all())
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.fixture(scope="session")
def tiny():
    """hf_config, policy, params (float32), `other`: a policy of another MLP width, and `same`."""
    policy = tiny_policy.tiny(CONFIG)
    other = tiny_policy.tiny(CONFIG | {"intermediate_size": 32})
    params = jax.jit(policy.init)(jax.random.key(0))
    return SimpleNamespace(config=CONFIG, policy=policy, params=params, other=other, same=same)


@pytest.fixture
def swept():
    """Collects what Orbax did not await after a failed read, so that no other test is warned of it."""
    yield
    gc.collect()
