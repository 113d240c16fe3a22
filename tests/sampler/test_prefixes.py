"""What is copied between slots of the cache is what prefill would have written there, at the same places."""

import numpy as np
import pytest

from calibadv_jax.sampler.prefixes import Prefixes, TileShape, common_prefix

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


def test_prompts_that_begin_alike_share_whole_segments(slots):
    start = list(range(18))
    slots({0: [*start, 50, 51]})
    assert slots({1: [*start, 60, 61]})[0] == 16 and slots.cache[1] == alone([*start, 60, 61])


def test_nothing_is_copied_where_it_saves_no_tile(slots):
    assert slots({0: [1, 2, 3], 1: [1, 2, 3]}) == (0, 1)


def test_decoded_tokens_are_never_copied(slots):
    prompt = list(range(9))
    slots({0: prompt})
    decoded = [*prompt, 30, 31, 32, 33, 34, 35, 36]
    slots.held[0].extend(decoded[8:])  # as the sampler does after decoding
    assert slots({1: [*decoded, 40]})[0] == 8


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


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
