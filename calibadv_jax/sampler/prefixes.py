"""Prompts that begin alike are computed once: what other slots of the cache hold already is copied.

The trajectories of a group have one prompt, and all prompts begin with the same instructions. Only what
prefill wrote from the first column on is copied, and only whole segments (or a whole prompt), so that every
token lies at the same place of its segment as if nothing had been copied: its keys and values are the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from calibadv_jax.sampler.tiles import Segment, TileShape


@dataclass(frozen=True)
class Copy:
    """The first columns of a slot, for another one of its group; slots are counted within the group."""

    source: int
    target: int
    columns: int


@dataclass
class Wave:
    """What can be done at once, for every group of slots: first the copies, then the segments."""

    copies: list[list[Copy]]
    segments: list[list[Segment]]


@dataclass
class Prefixes:
    """What every slot of a cache can give to others.

    Args:
        tile: its `groups` of `slots` each, and the segments of prefill.
    """

    tile: TileShape
    _keys: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # slot: (columns, key of the tokens)

    def fill(self, contexts: dict[int, list[int]], held: list[list[int]]) -> list[Wave]:
        """How all but the last token of every slot's context come into the cache; `held` says so afterwards.

        One wave follows the other. Where copies save no tile of prefill, there are none.
        """
        shared = [self._empty_wave()]
        plain = self._empty_wave()
        donors = self._donors(contexts, held)
        for slot, context in contexts.items():
            group, row = divmod(slot, self.tile.slots)
            wanted, before = context[:-1], held[slot]
            kept = common_prefix(before, wanted)
            before[kept:] = wanted[kept:]
            plain.segments[group] += self.tile.segments(row, kept, wanted[kept:])
            number = 0
            if kept:
                self._keys[slot] = [one for one in self._keys.get(slot, ()) if one[0] <= kept]
            else:
                self._keys[slot] = list(self._keys_of(wanted))
                number, source, kept = self._longest(slot, wanted, held, donors[group])
                while len(shared) <= number:
                    shared.append(self._empty_wave())
                if kept:
                    shared[number].copies[group].append(Copy(source % self.tile.slots, row, kept))
                for _, key in self._keys[slot]:
                    donors[group].setdefault(key, (slot, number))
            shared[number].segments[group] += self.tile.segments(row, kept, wanted[kept:])
        tiles = sum(self.tile.count(wave.segments) for wave in shared)
        return shared if tiles < self.tile.count(plain.segments) else [plain]

    def _empty_wave(self) -> Wave:
        groups = range(self.tile.groups)
        return Wave([[] for _ in groups], [[] for _ in groups])

    def _donors(
        self, contexts: dict[int, list[int]], held: Sequence[Sequence[int]]
    ) -> list[dict[int, tuple[int, int]]]:
        """Of every group: (slot, the wave after which it has them) by the key of its first tokens."""
        donors: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.tile.groups)]
        for slot, keys in self._keys.items():
            if slot in contexts and common_prefix(held[slot], contexts[slot]) < len(held[slot]):
                continue  # it is about to hold something else
            for columns, key in keys:
                if columns <= len(held[slot]):
                    donors[slot // self.tile.slots].setdefault(key, (slot, -1))
        return donors

    def _longest(
        self,
        slot: int,
        wanted: Sequence[int],
        held: Sequence[Sequence[int]],
        donors: dict[int, tuple[int, int]],
    ) -> tuple[int, int, int]:
        """(wave, slot to copy from, columns) of the longest beginning that another slot has; or 0 columns."""
        for columns, key in reversed(self._keys[slot]):
            source, wave = donors.get(key, (slot, 0))
            # Keys are hashes: two texts may have the same one.
            if source != slot and list(held[source][:columns]) == list(wanted[:columns]):
                return wave + 1, source, columns
        return 0, slot, 0

    def _keys_of(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(columns, key) after every whole segment, and of all tokens."""
        key = 0
        for start in range(0, len(tokens), self.tile.width):
            segment = tuple(tokens[start : start + self.tile.width])
            key = hash((key, segment))
            yield start + len(segment), key


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal tokens with which both begin."""
    shared = min(len(left), len(right))
    if list(left[:shared]) == list(right[:shared]):
        return shared
    return next(index for index in range(shared) if left[index] != right[index])
