"""A trajectory is the same to the last bit whoever is sampled with it, and in whichever slot."""

import random

import jax
import numpy as np
import pytest
from sampler_rig import CharTokenizer, make_sampler, sample_sessions
from tiny_policy import WIDER, tiny

from calibadv_jax.config import MeshConfig
from calibadv_jax.sampler.stop_rule import StopRule

pytestmark = pytest.mark.slow  # with the compiler that users have: the quick part has another one

LENGTH = 200  # four widths of the cache
# Layers of the quickstart's size: of very small ones XLA computes all shapes alike.
CONFIG = WIDER | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
NUMBERS = range(30)


@pytest.fixture(scope="module")
def sampler():
    """Forty slots on each of two devices; prefill takes eight rows of a device, up to 32 tokens of each."""
    policy = tiny(CONFIG)
    params, config = jax.jit(policy.init)(jax.random.key(5)), {"decode_chunk": 6, "prefill_chunk": 32}
    stops = StopRule(CharTokenizer(), [])
    return make_sampler(policy, params, MeshConfig(2, 1, 1), LENGTH, stops, slots=80, **config)


def short_prompt(number):
    return np.random.default_rng(number).integers(0, 398, 3 + 5 * (number % 4)).tolist()


def shared_prompt(number):
    """Three sessions have one prompt, and all begin with the same 36 tokens: a segment and more."""
    start = np.random.default_rng(0).integers(0, 398, 36).tolist()
    return [*start, *np.random.default_rng(number // 3).integers(0, 398, 12).tolist()]


def sample(sampler, numbers, prompt=short_prompt):
    return sample_sessions(sampler, numbers, prompt, 398, completion=12, observation=53)


def test_bits_do_not_depend_on_other_rows(sampler):
    together = sample(sampler, list(NUMBERS))
    shuffled = random.Random(3).sample(NUMBERS, len(NUMBERS))
    assert sample(sampler, shuffled) == together
    for number in (0, 3, 19):
        assert sample(sampler, [number])[number] == together[number]


def test_copied_prompts_equal_computed_ones(sampler, monkeypatch):
    engine, copies = sampler._engine, []
    plan = engine._prefixes.plan_fill

    def watched(*arguments):
        waves = plan(*arguments)
        copies.append(sum(copy.columns for wave in waves for group in wave.copies for copy in group))
        return waves

    monkeypatch.setattr(engine._prefixes, "plan_fill", watched)
    engine.forget()
    together = sample(sampler, list(NUMBERS), shared_prompt)
    assert copies[0] > len(NUMBERS) * 32  # most of them hold the beginning, or all of it, from another slot
    for number in (1, 14, 29):
        copies.clear()
        engine.forget()
        assert sample(sampler, [number], shared_prompt)[number] == together[number]
        assert not any(copies)
