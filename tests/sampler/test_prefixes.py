"""Prefill work is cut into tiles of one shape; copies between slots are what prefill would have written."""

import numpy as np
import pytest

from calibadv_jax.sampler.prefixes import MOST_TOKENS, TILE_TOKENS, Prefixes, TileShape

WIDTH = 4


def run(waves, cache, tile):
    """The waves done on a cache whose column holds (token, its segment's first column); copies, tiles."""
    copied = 0
    for wave in waves:
        for group, copies in enumerate(wave.copies):
            for copy in copies:
                source, target = (cache[group * tile.slots + at] for at in (copy.source, copy.target))
                target[: copy.columns] = source[: copy.columns]
                copied += copy.columns
        for group, segments in enumerate(wave.segments):
            for copy in segments:
                row = cache[group * tile.slots + copy.row]
                assert len(row) >= copy.start  # what stands before it is there
                row[copy.start :] = [(token, copy.start) for token in copy.tokens]
    return copied, sum(tile.count(wave.segments) for wave in waves)


def alone(context):
    """The columns of a context that is computed by itself."""
    tokens = context[:-1]
    return [(token, at - at % WIDTH) for at, token in enumerate(tokens)]


@pytest.fixture
def slots():
    """Contexts -> (copied columns, tiles) of filling the cache; with `held` and `cache`, of twelve slots."""
    tile = TileShape(groups=2, slots=6, rows=2, width=WIDTH)
    prefixes = Prefixes(tile)

    def fill(contexts):
        return run(prefixes.fill(contexts, fill.held), fill.cache, tile)

    fill.held, fill.cache = [[] for _ in range(12)], [[] for _ in range(12)]
    return fill


def test_prompt_of_a_group_is_computed_once(slots):
    contexts = {slot: [1, 2, 3, 4, 5, 6, 7, 8, 9, 9] for slot in range(12)}
    assert slots(contexts) == (10 * 9, 2)  # in each group five slots; three segments, two in a tile
    assert slots.cache == [alone(contexts[slot]) for slot in range(12)]


def test_whole_prefilled_segments_are_copied(slots):
    """Decoded tokens, which no prefill wrote, are not, nor is anything where that saves no tile."""
    start = list(range(18))
    slots({0: [*start, 50, 51]})
    slots.held[0].extend([51, 52, 53, 54, 55, 56])  # as the sampler does after decoding
    assert slots({1: [*start, 60, 61]})[0] == 16 and slots.cache[1] == alone([*start, 60, 61])
    assert slots({2: [*start, 50, 51, 52, 53, 54, 55, 56, 57]})[0] == 16
    assert slots({6: [1, 2, 3], 7: [1, 2, 3]}) == (0, 1)


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


FEW = TileShape(groups=2, slots=5, rows=2, width=3)  # three tiles a call
WHOLE = TileShape(groups=2, slots=2, rows=2, width=3)


def pending(shape, work):
    """work: for each group {slot: (start, tokens)}."""
    return [
        [piece for row, (start, tokens) in group.items() for piece in shape.segments(row, start, tokens)]
        for group in work
    ]


def written(shape, calls, length=32):
    """What a cache would hold, [groups, slots, length]; -1 where nothing was written."""
    cache = np.full((shape.groups, shape.slots, length), -1)
    for call in calls:
        assert call.tokens.shape == (shape.at_once, shape.groups, shape.rows, shape.width)
        assert not call.counts[call.used :].any()
        for tile, group, row in np.argwhere(call.counts > 0):
            at = tile, group, row
            slot = row if call.slots is None else call.slots[at]
            start, count = call.starts[at], call.counts[at]
            assert start in (0, FIRST) or cache[group, slot, start - 1] >= 0, "columns in their order"
            assert start + count <= call.columns[tile]
            cache[group, slot, start : start + count] = call.tokens[at][:count]
    return cache


FIRST = 4  # column that the longest row begins at


@pytest.mark.parametrize("shape", [FEW, WHOLE], ids=["few", "whole"])
@pytest.mark.parametrize("length", [1, 3, 4, 22])
def test_every_token_is_written_once_in_order(shape, length):
    work = [{0: (FIRST, range(100, 100 + length)), 1: (0, [7])}, {1: (0, [8, 9, 10, 11])}]
    calls = list(shape.calls(pending(shape, work)))
    tiles = written(shape, calls)
    assert tiles[0, 0, FIRST : FIRST + length].tolist() == list(range(100, 100 + length))
    assert tiles[0, 1, 0] == 7 and tiles[1, 1, :4].tolist() == [8, 9, 10, 11]
    assert (tiles >= 0).sum() == length + 5 == sum(call.counts.sum() for call in calls)


def test_no_more_tiles_than_the_work_needs():
    work = [{row: (0, [1, 2, 3]) for row in range(5)}, {0: (0, [1])}]
    (call,) = FEW.calls(pending(FEW, work))
    assert call.used == 3 and call.slots[:, 0].ravel().tolist() == [0, 1, 2, 3, 4, 0]
    (call,) = FEW.calls(pending(FEW, [{3: (6, [1, 2])}, {}]))
    assert call.used == 1 and call.columns.tolist() == [8, 0, 0]
    assert not list(FEW.calls([[], []]))
    (call,) = WHOLE.calls(pending(WHOLE, [{1: (0, [5])}, {}]))
    assert call.slots is None and call.tokens[0, 0].tolist() == [[0, 0, 0], [5, 0, 0]]  # gathers none
    assert len(list(WHOLE.calls(pending(WHOLE, [{1: (0, range(7))}, {}])))) == 3


def test_tiles_are_small_on_a_cpu_only():
    assert TileShape.fitting(2, 40, 32, "cpu").rows == TILE_TOKENS["cpu"] // 32
    assert TileShape.fitting(2, 40, 1024, "cpu").rows == 1
    assert TileShape.fitting(8, 8, 256, "gpu").is_whole
    assert TileShape.fitting(1, 64, 256, "tpu").rows == MOST_TOKENS // 256
