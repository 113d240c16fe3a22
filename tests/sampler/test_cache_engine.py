"""Windows over the KV cache, groups of slots on a mesh, layers in a loop: all sample the same tokens."""

import asyncio

import jax
import numpy as np
import pytest
from compiled_rig import collectives
from test_jax_sampler import CharTokenizer
from tiny_policy import SHAPE

from calibadv_jax.config import MeshConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy import transformer
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import UNROLLED_LAYERS, Numerics, Policy
from calibadv_jax.sampler import engine, prefixes
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stopping import StopRule

LENGTH = 64
SLOTS = 16
CONFIG = SHAPE | {
    "vocab_size": len(CharTokenizer.pieces),
    "num_hidden_layers": UNROLLED_LAYERS + 1,  # in one stack
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def policy():
    return Policy(architecture_from_hf(CONFIG), Numerics())


@pytest.fixture(scope="module")
def params(policy):
    return jax.jit(policy.init)(jax.random.key(5))


def sample(policy, params, mesh):
    """Twenty sessions of three turns over sixteen slots: most prefills take a few rows of some groups."""
    devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor]
    config = SamplerConfig(slots=SLOTS, decode_chunk=4, prefill_chunk=8)
    stops = StopRule(CharTokenizer(), CharTokenizer.eos_token_id)
    sampler = JaxSampler(policy, stops, config, make_mesh(mesh, devices), LENGTH)
    asyncio.run(sampler.load(1, params))

    async def session(number):
        rng = np.random.default_rng(number)
        context, turns = rng.integers(0, 14, 3 + number % 7).tolist(), []
        for turn in range(3):
            sampling = SamplingParams(1 + (number + turn) % 6, 1.0, seed=number)
            done = await sampler.generate(context, sampling, str(number))
            turns.append((done.token_ids, done.logprobs))
            context = [*context, *done.token_ids, *rng.integers(0, 14, 2 + number % 11).tolist()]
        sampler.release(str(number))
        return turns

    async def every_session():
        return await asyncio.gather(*map(session, range(20)))

    return sampler, asyncio.run(every_session())


@pytest.fixture(scope="module")
def expected(policy, params):
    return sample(policy, params, MeshConfig(1, 1, 1))[1]


def check(completions, expected):
    for session, expected_session in zip(completions, expected, strict=True):
        for (tokens, logprobs), (ours, our_logprobs) in zip(session, expected_session, strict=True):
            assert tokens == ours
            np.testing.assert_allclose(logprobs, our_logprobs, atol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [MeshConfig(2, 4, 1), MeshConfig(1, 4, 2), MeshConfig(1, 2, 4)], ids=str)
def test_rows_are_split_over_the_devices_and_stay_there(policy, params, expected, mesh):
    sampler, completions = sample(policy, params, mesh)
    check(completions, expected)
    # Two key-value heads: over tensor=4 the slots are split.
    groups, heads = (8, 2) if mesh.tensor != 2 else (4, 1)
    for keys, _ in sampler._engine._cache:
        shapes = {shard.data.shape for shard in keys.addressable_shards}
        assert shapes == {(1, CONFIG["num_hidden_layers"], SLOTS // groups, heads, LENGTH, 8)}


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [MeshConfig(1, 4, 2), MeshConfig(2, 2, 2)], ids=str)
def test_prefill_moves_weights_and_sums_of_a_devices_own_rows(mesh):
    """And what a look-up finds."""
    width, chunk = 96, 8  # as no other size of the program
    sizes = {"hidden_size": width, "intermediate_size": 176, "vocab_size": 320, "head_dim": 24}
    # Products as on TPUs and GPUs.
    wide = Policy(architecture_from_hf(CONFIG | sizes), Numerics(kernel="splash"))
    stops = StopRule(CharTokenizer(), CharTokenizer.eos_token_id)
    config = SamplerConfig(slots=SLOTS, prefill_chunk=chunk)
    text = JaxSampler(wide, stops, config, make_mesh(mesh), LENGTH).lower()["prefill"].compile().as_text()
    groups = mesh.data * mesh.fsdp
    own, looked_up = (
        f"f32[1,{SLOTS // groups},{chunk},{width}]",
        f"f32[{SLOTS // mesh.data},{chunk},{width // mesh.fsdp}]",
    )
    moved = {
        kind: [shape for _, shape in collectives(text, kind)]
        for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    }
    gathered = [shape for shape in moved["all-gather"] if shape.startswith("f32")]
    assert gathered and all(shape.count(",") == 1 for shape in gathered), gathered  # weights
    assert sorted(moved["all-reduce"]) == sorted([looked_up, own, own])
    part = f"f32[{SLOTS // groups},{chunk},{width // mesh.fsdp}]"
    assert moved["all-to-all"] == [part] * mesh.fsdp and not moved["collective-permute"]


@pytest.mark.medium
def test_devices_with_all_parameters_wait_for_no_other(policy, params, expected):
    sampler, completions = sample(policy, params, MeshConfig(2, 1, 1))
    check(completions, expected)
    lowered = sampler.lower()
    for name in ("decode", "copy"):
        text = lowered[name].compile().as_text()
        assert "num_partitions=2" in text
        assert "all-reduce" not in text and "all-gather" not in text


@pytest.mark.medium
def test_a_window_shows_all_that_is_there(policy, params, expected, monkeypatch):
    """Where each is a program of its own."""
    monkeypatch.setattr(engine, "BRANCHING", set())
    monkeypatch.setattr(engine, "MIN_WINDOW", 8)
    asked = []
    window = engine.CacheEngine._window
    monkeypatch.setattr(
        engine.CacheEngine, "_window", lambda self, columns: asked.append(window(self, columns)) or asked[-1]
    )
    check(sample(policy, params, MeshConfig(1, 1, 1))[1], expected)
    assert {8, 16, 32, 64} == set(asked)


@pytest.mark.medium
def test_one_program_reads_no_more_than_the_longest_row_needs(policy, params, expected, monkeypatch):
    monkeypatch.setattr(engine, "STEP", 16)
    sampler, completions = sample(policy, params, MeshConfig(1, 1, 1))
    check(completions, expected)
    sampler._engine._cache = jax.tree.map(
        lambda leaf: leaf.at[..., 32:, :].set(np.nan), sampler._engine._cache
    )
    sampler._engine.forget()
    for length, is_read in ((31, False), (32, True)):  # the last and a new token are added
        done = asyncio.run(sampler.generate([1] * length, SamplingParams(2, 1.0, seed=1), "one"))
        sampler.release("one")
        assert np.isnan(done.logprobs).any() == is_read


@pytest.mark.medium
def test_tiles_of_a_few_rows_on_a_mesh(policy, params, expected, monkeypatch):
    monkeypatch.setitem(prefixes.TILE_TOKENS, "cpu", 24)  # three rows of eight tokens
    sampler, completions = sample(policy, params, MeshConfig(1, 2, 2))
    assert sampler._engine._tile.rows == 3 and not sampler._engine._tile.is_whole
    check(completions, expected)


@pytest.mark.medium
def test_scores_of_some_rows_at_a_time_are_the_same(policy, params, expected, monkeypatch):
    monkeypatch.setattr(transformer, "SCORE_BYTES", 3 * 4 * 8 * 4 * LENGTH)  # three rows of a prefill
    check(sample(policy, params, MeshConfig(1, 1, 1))[1], expected)


def test_windows_are_halvings():
    assert engine._halvings(16384) == [1024, 2048, 4096, 8192, 16384]
    assert engine._halvings(5000) == [1250, 2500, 5000]
    assert engine._halvings(320) == [320]


def test_widths_are_even_steps():
    assert engine.even_widths(320) == [64, 128, 192, 256, 320]
    assert engine.even_widths(100) == [64, 100]
    assert engine.even_widths(40) == [40]
    assert engine.even_widths(16384) == [*range(2048, 16384, 2048), 16384]


def test_successive_slots_are_of_different_devices(policy):
    devices = make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
    assert engine.CacheEngine(policy, devices, 6, LENGTH, 8, 4).in_turn == [0, 3, 1, 4, 2, 5]
