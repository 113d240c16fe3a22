"""Prefill work is cut into tiles of one shape, whatever there is to do."""

import numpy as np
import pytest

from calibadv_jax.sampler.prefixes import MOST_TOKENS, TILE_TOKENS, TileShape

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


def test_whole_tiles_gather_no_slots():
    (call,) = WHOLE.calls(pending(WHOLE, [{1: (0, [5])}, {}]))
    assert call.slots is None and call.tokens[0, 0].tolist() == [[0, 0, 0], [5, 0, 0]]
    assert len(list(WHOLE.calls(pending(WHOLE, [{1: (0, range(7))}, {}])))) == 3


def test_tiles_are_small_on_a_cpu_only():
    assert TileShape.fitting(2, 40, 32, "cpu").rows == TILE_TOKENS["cpu"] // 32
    assert TileShape.fitting(2, 40, 1024, "cpu").rows == 1
    assert TileShape.fitting(8, 8, 256, "gpu").is_whole
    assert TileShape.fitting(1, 64, 256, "tpu").rows == MOST_TOKENS // 256
