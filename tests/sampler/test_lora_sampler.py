"""The embedded sampler with adapters: it computes with the learner's base, and writes what that expects."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_jax_sampler import make_sampler
from test_jax_swap import HF_CONFIG

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.adapters import Adapters, joined
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import flatten

pytestmark = pytest.mark.medium


def test_it_applies_the_adapters_to_the_base_of_the_learner():
    adapters = Adapters(2, 4.0, ("gate", "o", "v"), "float32")
    policy = Policy(architecture_from_hf(HF_CONFIG), Numerics(), adapters)
    base, new = policy.split(jax.jit(policy.init)(jax.random.key(0)))
    base["embed"]["embedding"] = base["embed"]["embedding"] * 20.0  # far from uniform
    moved = jax.tree.map(lambda leaf: leaf + 0.3, new)
    sampler = make_sampler(policy, joined(base, new), max_length=32, slots=2)
    context = [0, 1, 2, 3, 4, 5]

    async def work():
        await sampler.load(8, joined(base, moved))
        return await sampler.generate(context, SamplingParams(5, seed=1), "s")

    completion = asyncio.run(work())
    row = jnp.asarray([[*context, *completion.token_ids]], jnp.int32)
    targets = jnp.concatenate([row[:, 1:], row[:, :1]], axis=1)
    for params, is_right in ((joined(base, moved), True), (base, False)):
        decoder = policy.merge(params)
        hidden = decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
        expected = token_logprobs(decoder, hidden, targets, 1.0, 1024)[0][0][len(context) - 1 : -1]
        assert np.allclose(completion.logprobs, expected, atol=1e-4) == is_right
    held = flatten(sampler._engine._params)
    assert all(held[path] is leaf for path, leaf in flatten(base).items())  # no copy
    assert not any(held[path] is leaf for path, leaf in flatten(moved).items())  # the learner donates them
