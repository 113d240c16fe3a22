"""A session that goes on after a swap of the weights reads its whole context with the new ones."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
from test_jax_sampler import CharTokenizer, make_sampler

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.transformer import Numerics, Policy

HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": len(CharTokenizer.pieces),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def test_nothing_of_the_old_weights_is_left():
    policy = Policy(architecture_from_hf(HF_CONFIG), Numerics())
    old, new = (jax.jit(policy.init)(jax.random.key(seed)) for seed in (0, 1))
    for params in (old, new):
        params["embed"]["embedding"] = params["embed"]["embedding"] * 20.0  # far from uniform
    sampler = make_sampler(policy, old, max_length=32, slots=2)
    context = [0, 1, 2, 3, 4, 5]

    async def turn(context):
        return await sampler.generate(context, SamplingParams(4, seed=1), "s")

    async def work():
        first = await turn(context)
        await sampler.load(8, new)
        again = [*context, *first.token_ids, 6, 7]  # the same session: its row is still its own
        return first, again, await turn(again)

    first, again, second = asyncio.run(work())
    assert first.policy_versions == (7,) and second.policy_versions == (8,)

    row = jnp.asarray([[*again, *second.token_ids]], jnp.int32)
    for params, is_right in ((new, True), (old, False)):
        decoder = policy.merge(params)
        hidden = decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
        targets = jnp.concatenate([row[:, 1:], row[:, :1]], axis=1)
        expected = token_logprobs(decoder, hidden, targets, 1.0, 1024)[0][0][len(again) - 1 : -1]
        assert np.allclose(second.logprobs, expected, atol=1e-4) == is_right
