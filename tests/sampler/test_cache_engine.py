"""Windows over the KV cache, groups of slots on a mesh, layers in a loop: all sample the same tokens."""

import asyncio

import jax
import numpy as np
import pytest
from compiled_rig import collectives
from sampler_rig import ALONE, CharTokenizer, make_sampler, sample_sessions
from tiny_policy import SHAPE, mesh_of, tiny

from calibadv_jax.config import MeshConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy import attention
from calibadv_jax.policy.transformer import MAX_UNROLLED_LAYERS
from calibadv_jax.sampler import engine, tiles

LENGTH = 64
SLOTS = 16
CONFIG = SHAPE | {
    "vocab_size": len(CharTokenizer.pieces),
    "num_hidden_layers": MAX_UNROLLED_LAYERS + 1,  # in one stack
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def policy():
    return tiny(CONFIG)


@pytest.fixture(scope="module")
def params(policy):
    return jax.jit(policy.init)(jax.random.key(5))


def sample(policy, params, mesh):
    """Twenty sessions over sixteen slots: most prefills take a few rows of some groups."""
    sampler = make_sampler(policy, params, mesh, LENGTH, slots=SLOTS, decode_chunk=4)
    return sampler, sample_sessions(sampler, range(20), prompt, 14, completion=6, observation=13)


def prompt(number):
    return np.random.default_rng(number).integers(0, 14, 3 + number % 7).tolist()


@pytest.fixture(scope="module")
def expected(policy, params):
    return sample(policy, params, ALONE)[1]


def check(completions, expected):
    for number, session in expected.items():
        for (tokens, logprobs), (ours, our_logprobs) in zip(completions[number], session, strict=True):
            assert tokens == ours
            np.testing.assert_allclose(logprobs, our_logprobs, atol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [MeshConfig(2, 4, 1), MeshConfig(1, 4, 2), MeshConfig(1, 2, 4)], ids=str)
def test_rows_stay_on_their_devices(policy, params, expected, mesh):
    sampler, completions = sample(policy, params, mesh)
    check(completions, expected)
    # Two key-value heads: over tensor=4 the slots are split.
    groups, heads = (8, 2) if mesh.tensor != 2 else (4, 1)
    for keys, _ in sampler._engine._cache:
        shapes = {shard.data.shape for shard in keys.addressable_shards}
        assert shapes == {(1, CONFIG["num_hidden_layers"], SLOTS // groups, heads, LENGTH, 8)}


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [MeshConfig(1, 4, 2), MeshConfig(2, 2, 2)], ids=str)
def test_prefill_moves_weights_and_own_sums(mesh):
    """And what a look-up finds."""
    width, chunk = 96, 8  # as no other size of the program
    sizes = {"hidden_size": width, "intermediate_size": 176, "vocab_size": 320, "head_dim": 24}
    # Products as on TPUs and GPUs.
    wide = tiny(CONFIG | sizes, kernel="splash")
    sampler = make_sampler(wide, None, mesh, LENGTH, slots=SLOTS, prefill_chunk=chunk)
    text = sampler._engine.lower()["prefill"].compile().as_text()
    rows = SLOTS // (mesh.data * mesh.fsdp)
    own, part = f"f32[1,{rows},{chunk},{width}]", f"f32[{rows},{chunk},{width // mesh.fsdp}]"
    looked_up = f"f32[{SLOTS // mesh.data},{chunk},{width // mesh.fsdp}]"

    def moved(kind):
        return [shape for _, shape in collectives(text, kind)]

    gathered = [shape for shape in moved("all-gather") if shape.startswith("f32")]
    assert gathered and all(shape.count(",") == 1 for shape in gathered), gathered  # weights
    assert sorted(moved("all-reduce")) == sorted([looked_up, own, own])
    assert moved("all-to-all") == [part] * mesh.fsdp and not moved("collective-permute")


@pytest.mark.medium
def test_devices_with_all_parameters_wait_for_no_other(policy, params, expected):
    sampler, completions = sample(policy, params, MeshConfig(2, 1, 1))
    check(completions, expected)
    lowered = sampler._engine.lower()
    for name in ("decode", "copy"):
        text = lowered[name].compile().as_text()
        assert "num_partitions=2" in text
        assert "all-reduce" not in text and "all-gather" not in text


@pytest.mark.medium
def test_windows_show_the_whole_context(policy, params, expected, monkeypatch):
    """Where each is a program of its own."""
    monkeypatch.setattr(engine, "BRANCHING", set())
    monkeypatch.setattr(engine, "MIN_WINDOW", 8)
    programs, widths_of = set(), engine.CacheEngine._widths

    def noted(self, columns):
        programs.add(widths_of(self, columns))
        return widths_of(self, columns)

    monkeypatch.setattr(engine.CacheEngine, "_widths", noted)
    check(sample(policy, params, ALONE)[1], expected)
    assert programs == {(8,), (16,), (32,), (64,)}


@pytest.mark.medium
def test_program_reads_the_longest_row_only(policy, params, expected, monkeypatch):
    monkeypatch.setattr(engine, "STEP", 16)
    sampler, completions = sample(policy, params, ALONE)
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
def test_tiles_and_scores_of_a_few_rows_on_a_mesh(policy, params, expected, monkeypatch):
    monkeypatch.setitem(tiles.TILE_TOKENS, "cpu", 24)  # three rows of eight tokens
    monkeypatch.setattr(attention, "SCORE_BYTES", 1)  # one row at a time
    sampler, completions = sample(policy, params, MeshConfig(1, 2, 2))
    assert sampler._engine._tile.rows == 3 and not sampler._engine._tile.has_row_per_slot
    check(completions, expected)


@pytest.mark.medium
def test_scores_of_a_few_rows_at_a_time_change_nothing(policy, params, expected, monkeypatch):
    heads, chunk, bytes_of_score = 4, 8, 4
    three_rows = 3 * heads * chunk * bytes_of_score * LENGTH
    monkeypatch.setattr(attention, "SCORE_BYTES", three_rows)
    check(sample(policy, params, ALONE)[1], expected)


@pytest.mark.medium
def test_tiles_of_a_few_rows_with_whole_scores_on_a_mesh(policy, params, expected, monkeypatch):
    monkeypatch.setitem(tiles.TILE_TOKENS, "cpu", 24)  # three rows of eight tokens
    check(sample(policy, params, MeshConfig(1, 2, 2))[1], expected)


@pytest.mark.parametrize(
    ("length", "halvings", "even_widths"),
    [
        (16384, [1024, 2048, 4096, 8192, 16384], [*range(2048, 16384, 2048), 16384]),
        (5000, [1250, 2500, 5000], [*range(640, 5000, 640), 5000]),
        (320, [320], [64, 128, 192, 256, 320]),
        (100, [100], [64, 100]),
        (40, [40], [40]),
    ],
)
def test_widths_of_windows(length, halvings, even_widths):
    assert engine._halvings(length) == halvings and engine.even_widths(length) == even_widths


def test_successive_slots_are_of_different_devices(policy):
    config = SamplerConfig(slots=6, prefill_chunk=8, decode_chunk=4)
    devices = mesh_of(2, data=2, fsdp=1)
    assert engine.CacheEngine(policy, devices, config, LENGTH).in_turn == [0, 3, 1, 4, 2, 5]
