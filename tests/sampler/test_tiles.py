"""Prefill work is cut into tiles of one shape; every token is written once, and in order."""

import numpy as np
import pytest

from calibadv_jax.sampler.tiles import TileShape

FEW_ROWS = TileShape(groups=2, slots=5, rows=2, width=3)  # three tiles a call
ROW_PER_SLOT = TileShape(groups=2, slots=2, rows=2, width=3)
FIRST = 4  # column of the cache at which the longest row begins
EMPTY = -1


def calls_of(shape, work):
    """The calls for the work of each group: {slot: (first column, tokens)}."""
    groups = []
    for group in work:
        segments = []
        for slot, (start, tokens) in group.items():
            segments += shape.segments(slot, start, tokens)
        groups.append(segments)
    return list(shape.calls(groups))


def filled_cache(shape, calls, length=32):
    """The cache after the calls, [groups, slots, length]."""
    cache = np.full((shape.groups, shape.slots, length), EMPTY)
    for call in calls:
        assert call.tokens.shape == (shape.tiles_per_call, shape.groups, shape.rows, shape.width)
        assert not call.counts[call.num_used :].any()
        for tile, group, row in np.argwhere(call.counts > 0):
            place = tile, group, row
            slot = row if call.slots is None else call.slots[place]
            start, count = call.starts[place], call.counts[place]
            is_first = start in (0, FIRST)
            assert is_first or cache[group, slot, start - 1] != EMPTY, "columns are written in order"
            assert (cache[group, slot, start : start + count] == EMPTY).all(), "no column is written twice"
            assert start + count <= call.columns[tile]
            cache[group, slot, start : start + count] = call.tokens[place][:count]
    return cache


@pytest.mark.parametrize("shape", [FEW_ROWS, ROW_PER_SLOT], ids=["few rows", "row per slot"])
@pytest.mark.parametrize("length", [1, 3, 4, 22])
def test_every_token_is_written_once_and_in_order(shape, length):
    longest = list(range(100, 100 + length))
    work = [{0: (FIRST, longest), 1: (0, [7])}, {1: (0, [8, 9, 10, 11])}]
    calls = calls_of(shape, work)
    cache = filled_cache(shape, calls)
    assert cache[0, 0, FIRST : FIRST + length].tolist() == longest
    assert cache[0, 1, 0] == 7
    assert cache[1, 1, :4].tolist() == [8, 9, 10, 11]
    num_tokens = length + 5
    assert (cache != EMPTY).sum() == num_tokens
    assert sum(call.counts.sum() for call in calls) == num_tokens


def test_row_per_slot_needs_no_slot_numbers():
    [call] = calls_of(ROW_PER_SLOT, [{1: (0, [5])}, {}])
    assert call.slots is None
    assert call.tokens[0, 0].tolist() == [[0, 0, 0], [5, 0, 0]]


def test_row_per_slot_takes_a_call_for_every_segment_of_a_slot():
    assert len(calls_of(ROW_PER_SLOT, [{1: (0, range(7))}, {}])) == 3
