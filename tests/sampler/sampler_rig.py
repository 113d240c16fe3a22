"""Embedded samplers of tests, their tokenizer, and sessions of several turns."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.config import MeshConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stop_rule import StopRule

CHARACTERS = "abcdefghij<>/ "
EOS = len(CHARACTERS)
ALONE = MeshConfig(1, 1, 1)


class CharTokenizer:
    """One token a character, and two that carry a tag's end together with another character."""

    eos_token_id = EOS
    pieces = [*CHARACTERS, "<eos>", ">a", ">\n", "x", "y"]

    def get_vocab(self):
        return {piece: number for number, piece in enumerate(self.pieces)}

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        return "".join(self.pieces[i] for i in ids)


STOPS = StopRule(CharTokenizer(), EOS)


def make_sampler(policy, params, mesh=ALONE, max_length=96, stops=STOPS, **config):
    """A sampler with version 7 of the weights, or without weights."""
    devices = make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor])
    config = SamplerConfig(**{"slots": 4, "decode_chunk": 5, "prefill_chunk": 8} | config)
    sampler = JaxSampler(policy, stops, config, devices, max_length)
    if params is not None:
        asyncio.run(sampler.load(7, params))
    return sampler


def learner_logprobs(policy, params, row, temperature):
    """Log-probabilities [T] of the successors of a row's tokens, as the learner computes them."""
    decoder = policy.merge(params)
    hidden = decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
    targets = jnp.concatenate([row[:, 1:], row[:, :1]], axis=1)
    return token_logprobs(decoder, hidden, targets, temperature, 1024)[0][0]


def sample_sessions(sampler, numbers, prompt, vocabulary, completion, observation):
    """Sessions of three turns with observations of unequal lengths: [(tokens, log-probabilities)] of each."""

    async def session(number):
        rng, context, turns = np.random.default_rng(number), prompt(number), []
        for turn in range(3):
            sampling = SamplingParams(1 + (number + turn) % completion, 1.0, seed=number)
            done = await sampler.generate(context, sampling, str(number))
            turns.append((done.token_ids, done.logprobs))
            observed = rng.integers(0, vocabulary, 1 + (11 * number) % observation)
            context = [*context, *done.token_ids, *observed.tolist()]
        sampler.release(str(number))
        return turns

    async def every_session():
        return await asyncio.gather(*map(session, numbers))

    return dict(zip(numbers, asyncio.run(every_session()), strict=True))
