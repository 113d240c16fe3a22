"""A trajectory is the same to the last bit whoever is sampled with it, and in whichever slot."""

import asyncio
import random

import jax
import numpy as np
import pytest
from test_jax_sampler import CharTokenizer
from tiny_policy import WIDER

from calibadv_jax.config import MeshConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stopping import StopRule

LENGTH = 200  # four widths of the cache
# Layers of the quickstart's size: of very small ones XLA computes all shapes alike.
CONFIG = WIDER | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
NUMBERS = range(30)


@pytest.fixture(scope="module")
def policy():
    return Policy(architecture_from_hf(CONFIG), Numerics())


@pytest.fixture(scope="module")
def sampler(policy):
    """Forty slots on each of two devices; prefill takes eight rows of a device, up to 32 tokens of each."""
    mesh = make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
    stops = StopRule(CharTokenizer(), [])
    config = SamplerConfig(slots=80, decode_chunk=6, prefill_chunk=32)
    sampler = JaxSampler(policy, stops, config, mesh, LENGTH)
    asyncio.run(sampler.load(1, jax.jit(policy.init)(jax.random.key(5))))
    return sampler


def short_prompt(number):
    return np.random.default_rng(number).integers(0, 398, 3 + 5 * (number % 4)).tolist()


def shared_prompt(number):
    """Three sessions have one prompt, and all begin with the same 36 tokens: a segment and more."""
    start = np.random.default_rng(0).integers(0, 398, 36).tolist()
    return [*start, *np.random.default_rng(number // 3).integers(0, 398, 12).tolist()]


def sample(sampler, numbers, prompt=short_prompt):
    """Sessions of three turns with observations of unequal lengths: [(tokens, log-probabilities)] of each."""

    async def session(number):
        rng = np.random.default_rng(number)
        context, turns = prompt(number), []
        for turn in range(3):
            sampling = SamplingParams(4 + (number + turn) % 9, 1.0, seed=number)
            done = await sampler.generate(context, sampling, str(number))
            turns.append((done.token_ids, done.logprobs))
            context = [*context, *done.token_ids, *rng.integers(0, 398, 1 + (11 * number) % 53).tolist()]
        sampler.release(str(number))
        return turns

    async def all_of_them():
        return await asyncio.gather(*map(session, numbers))

    return dict(zip(numbers, asyncio.run(all_of_them()), strict=True))


@pytest.mark.medium
def test_alone_together_and_in_another_order(sampler):
    together = sample(sampler, list(NUMBERS))
    shuffled = random.Random(3).sample(NUMBERS, len(NUMBERS))
    assert sample(sampler, shuffled) == together
    for number in (0, 3, 19):
        assert sample(sampler, [number])[number] == together[number]


@pytest.mark.medium
def test_a_prompt_that_is_copied_is_as_one_that_is_computed(sampler, monkeypatch):
    engine, copies = sampler._engine, []
    plan = engine._prefixes.fill

    def watched(*arguments):
        waves = plan(*arguments)
        copies.append(sum(copy.columns for wave in waves for group in wave.copies for copy in group))
        return waves

    monkeypatch.setattr(engine._prefixes, "fill", watched)
    engine.forget()
    together = sample(sampler, list(NUMBERS), shared_prompt)
    assert copies[0] > len(NUMBERS) * 32  # most of them hold the beginning, or all of it, from another slot
    for number in (1, 14, 29):
        copies.clear()
        engine.forget()
        assert sample(sampler, [number], shared_prompt)[number] == together[number]
        assert not any(copies)
