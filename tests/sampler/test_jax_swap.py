"""A session that goes on after a swap of the weights reads its whole context with the new ones."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_rig import CharTokenizer, learner_logprobs, make_sampler
from tiny_policy import NARROW, tiny

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.adapters import Adapters, joined
from calibadv_jax.policy.weights import flatten

CONFIG = NARROW | {"vocab_size": len(CharTokenizer.pieces), "hidden_size": 16, "tie_word_embeddings": True}


@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0, ("gate", "o", "v"), "float32")], ids=bool)
def test_swap_leaves_nothing_of_old_weights(adapters):
    policy = tiny(CONFIG, adapters)
    old, new = (jax.jit(policy.init)(jax.random.key(seed)) for seed in (0, 1))
    if adapters:
        base, trained = policy.split(old)
        new = joined(base, jax.tree.map(lambda leaf: leaf + 0.3, trained))
    old["embed"]["embedding"] = new["embed"]["embedding"] = old["embed"]["embedding"] * 20.0  # not uniform
    sampler = make_sampler(policy, old, max_length=32, slots=2)
    context = [0, 1, 2, 3, 4, 5]

    async def work():
        sampling = SamplingParams(4, seed=1)
        first = await sampler.generate(context, sampling, "s")
        await sampler.load(8, new)
        again = [*context, *first.token_ids, 6, 7]  # the same session: its row is still its own
        return first, again, await sampler.generate(again, sampling, "s")

    first, again, second = asyncio.run(work())
    assert first.policy_versions == (7,) and second.policy_versions == (8,)
    row = jnp.asarray([[*again, *second.token_ids]], jnp.int32)
    for params, is_right in ((new, True), (old, False)):
        expected = learner_logprobs(policy, params, row, 1.0)[len(again) - 1 : -1]
        assert np.allclose(second.logprobs, expected, atol=1e-4) == is_right
    held, (base, donated) = flatten(sampler._engine._params), map(flatten, policy.split(new))
    assert all(held[path] is leaf for path, leaf in base.items())  # no copy
    assert not any(held[path] is leaf for path, leaf in donated.items())
