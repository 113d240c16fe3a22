"""Prefill work is cut into tiles of one shape; copies between slots are what prefill would have written."""

import numpy as np
import pytest

from calibadv_jax.sampler.prefixes import Prefixes, common_prefix
from calibadv_jax.sampler.tiles import MOST_TOKENS, TILE_TOKENS, Segment, TileShape

WIDTH = 4


def run(waves, cache, tile):
    """The calls of the waves on a cache whose columns hold (token, its segment's first column).

    Returns the copied columns and the number of tiles.
    """
    copied = tiles = 0
    for wave in waves:
        for group, copies in enumerate(wave.copies):
            for copy in copies:
                source, target = (cache[group * tile.slots + slot] for slot in (copy.source, copy.target))
                target[: copy.columns] = source[: copy.columns]
                copied += copy.columns
        for call in tile.calls(wave.segments):
            assert call.tokens.shape == (tile.tiles_per_call, tile.groups, tile.rows, tile.width)
            assert call.counts[: call.num_used].any((1, 2)).all() and not call.counts[call.num_used :].any()
            for number, group, row in np.argwhere(call.counts > 0):
                place = number, group, row
                slot = cache[group * tile.slots + (row if call.slots is None else call.slots[place])]
                start, count = call.starts[place], call.counts[place]
                assert len(slot) >= start and start + count <= call.columns[number]
                slot[start:] = [(token, start) for token in call.tokens[place][:count].tolist()]
            tiles += call.num_used
    return copied, tiles


def alone(context):
    """The columns of a context that is computed by itself."""
    tokens = context[:-1]
    return [(token, at - at % WIDTH) for at, token in enumerate(tokens)]


@pytest.fixture(params=[2, 6], ids=["few rows", "whole"])
def slots(request):
    """Contexts -> (copied columns, tiles) of filling the cache; with `held` and `cache`, of twelve slots."""
    tile = TileShape(groups=2, slots=6, rows=request.param, width=WIDTH)
    prefixes = Prefixes(tile)

    def fill(contexts):
        return run(prefixes.plan_fill(contexts, fill.held), fill.cache, tile)

    fill.held = [[] for _ in range(12)]
    fill.cache = [[] for _ in range(12)]
    fill.has_row_per_slot = tile.has_row_per_slot
    return fill


def test_prompt_of_a_group_is_computed_once(slots):
    contexts = {slot: [1, 2, 3, 4, 5, 6, 7, 8, 9, 9] for slot in range(12)}
    # Of each group five slots; three segments, one or two in a tile.
    assert slots(contexts) == ((0, 3) if slots.has_row_per_slot else (10 * 9, 2))
    assert slots.cache == [alone(contexts[slot]) for slot in range(12)]


def test_whole_prefilled_segments_are_copied(slots):
    """Decoded tokens, which no prefill wrote, are not, nor is anything where that saves no tile."""
    start = list(range(18))
    slots({0: [*start, 50, 51]})
    slots.held[0].extend([51, 52, 53, 54, 55, 56])  # as the sampler does after decoding
    assert slots({1: [*start, 60, 61]})[0] == 16 and slots.cache[1] == alone([*start, 60, 61])
    assert slots({2: [*start, 50, 51, 52, 53, 54, 55, 56, 57]})[0] == 16
    assert slots({6: [1, 2, 3], 7: [1, 2, 3]}) == (0, 1)


def test_decoded_tokens_are_never_copied(slots):
    prompt = list(range(9))
    slots({0: prompt})
    decoded = [30, 31, 32, 33, 34, 35, 36]
    slots.held[0].extend([prompt[-1], *decoded])  # as the sampler does after decoding
    columns, _ = slots({1: [*prompt, *decoded, 40]})
    assert columns == 8


@pytest.mark.parametrize(
    ("left", "right", "count"), [([1, 2, 3], [1, 2, 4], 2), ([], [1], 0), ([1, 2], [1, 2, 3], 2)]
)
def test_common_prefix(left, right, count):
    assert common_prefix(left, right) == count


@pytest.mark.parametrize("seed", range(20))
def test_random_sessions_hold_their_own_columns(slots, seed):
    """Prompts from a few beginnings, sessions that go on, end, or begin anew in another one's slot."""
    rng, held, cache = np.random.default_rng(seed), slots.held, slots.cache
    starts = [rng.integers(0, 3, 11).tolist() for _ in range(3)]
    contents, copied = {}, 0
    for _ in range(12):
        contexts = {}
        for slot in rng.permutation(12)[: rng.integers(1, 12)].tolist():
            if held[slot] and rng.random() < 0.4:  # goes on: its next turn follows what it decoded
                decoded = rng.integers(0, 3, 2).tolist()
                contents[slot] += [(token, None) for token in decoded]
                cache[slot][len(held[slot]) :] = [(token, None) for token in decoded]
                held[slot].extend(decoded)
                new = rng.integers(0, 3, 6).tolist()
                at = len(held[slot])
                contents[slot] += [(t, at + i - i % WIDTH) for i, t in enumerate(new[:-1])]
                contexts[slot] = [*held[slot], *new]
            else:
                held[slot].clear()
                cut = int(rng.integers(1, 12))
                text = [*starts[rng.integers(3)][:cut], *rng.integers(0, 3, rng.integers(1, 4)).tolist()]
                contexts[slot], contents[slot] = text, alone(text)
        copied += slots(contexts)[0]
        for slot, columns in contents.items():
            assert cache[slot][: len(columns)] == columns
            assert held[slot] == [token for token, _ in columns]
    assert copied


def test_tiles_are_as_many_as_their_work_needs():
    few, whole = TileShape(2, 5, 2, WIDTH), TileShape(2, 2, 2, WIDTH)  # of five slots three tiles a call
    (call,) = few.calls([[Segment(row, 0, [1, 2, 3]) for row in range(5)], [Segment(0, 0, [1])]])
    assert call.num_used == 3 and call.slots[:, 0].ravel().tolist() == [0, 1, 2, 3, 4, 0]
    (call,) = few.calls([[Segment(3, 6, [1, 2])], []])
    assert call.num_used == 1 and call.columns.tolist() == [8, 0, 0]
    assert not list(few.calls([[], []]))
    (call,) = whole.calls([[Segment(1, 0, [5])], []])
    assert call.slots is None and call.tokens[0, 0, :, 0].tolist() == [0, 5]  # gathers none


def test_tiles_are_small_on_a_cpu_only():
    assert TileShape.fitting(2, 40, 32, "cpu").rows == TILE_TOKENS["cpu"] // 32
    assert TileShape.fitting(2, 40, 1024, "cpu").rows == 1
    assert TileShape.fitting(8, 8, 256, "gpu").has_row_per_slot
    assert TileShape.fitting(1, 64, 256, "tpu").rows == MOST_TOKENS // 256
