"""Compute prompts that begin alike once: copy the beginnings that other slots of the cache hold.

The trajectories of a group have one prompt, and all prompts begin with the same instructions. Only columns
that prefill wrote are copied, and only whole segments from the first column on (or a whole prompt), so that
every token has the same place in its segment as if nothing had been copied: its keys and values are the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calibadv_jax.sampler.tiles import Segment, TileShape


@dataclass(frozen=True)
class Copy:
    """A copy of the first columns of a slot to another slot of its group.

    Attributes:
        source: index within the group of the slot that is read.
        target: index within the group of the slot that is written.
        columns: number of columns that both slots have in common.
    """

    source: int
    target: int
    columns: int


@dataclass
class Wave:
    """Work that is done together: first the copies, then prefill of the segments.

    Attributes:
        copies: the copies of each group, in order.
        segments: the segments of each group, in order.
    """

    copies: list[list[Copy]]
    segments: list[list[Segment]]

    @classmethod
    def empty(cls, groups: int) -> Wave:
        """Return a wave without work.

        Args:
            groups: number of groups of slots.

        Returns:
            A wave with an empty list of copies and of segments for each group.
        """
        return cls([[] for _ in range(groups)], [[] for _ in range(groups)])


class _Prefix(NamedTuple):
    """The first tokens of a slot, by a hash that other slots with the same tokens have too."""

    columns: int
    key: int


class _Donor(NamedTuple):
    """A slot from which a prefix can be copied."""

    slot: int
    wave: int  # number of the wave that writes the prefix there; -1: the slot holds it already


class Prefixes:
    """The beginnings that slots of a cache can give to other slots of their group."""

    def __init__(self, tile: TileShape):
        """Begin with an empty cache.

        Args:
            tile: the number of groups and of their slots, and the shape of prefill.
        """
        self.tile = tile
        # Of each slot, the prefixes that prefill wrote there, shortest first.
        self._prefixes: dict[int, list[_Prefix]] = {}

    def plan_fill(self, contexts: dict[int, list[int]], held: list[list[int]]) -> list[Wave]:
        """Plan how contexts come into the cache, by copies where these save tiles of prefill.

        Args:
            contexts: token ids by slot. All but the last token of each are brought into the cache.
            held: token ids that the cache holds, by slot. It is updated to what the waves bring.

        Returns:
            Waves that are to be done one after the other. Where copies save no tile of prefill, this is one
            wave without copies.
        """
        without_copies = Wave.empty(self.tile.groups)
        waves = [Wave.empty(self.tile.groups)]
        donors = self._donors(contexts, held)
        for slot, context in contexts.items():
            group, slot_in_group = divmod(slot, self.tile.slots)
            tokens = context[:-1]
            start = common_prefix(held[slot], tokens)
            held[slot][start:] = tokens[start:]
            without_copies.segments[group] += self.tile.segments(slot_in_group, start, tokens[start:])
            number = 0  # number of the wave that prefills this slot
            if start:
                # The slot goes on with the session that it holds.
                kept = [prefix for prefix in self._prefixes.get(slot, ()) if prefix.columns <= start]
                self._prefixes[slot] = kept
            else:
                self._prefixes[slot] = list(self._prefixes_of(tokens))
                shared = self._longest_shared(slot, tokens, held, donors[group])
                if shared is not None:
                    start, donor = shared
                    number = donor.wave + 1
                    while len(waves) <= number:
                        waves.append(Wave.empty(self.tile.groups))
                    copy = Copy(donor.slot % self.tile.slots, slot_in_group, start)
                    waves[number].copies[group].append(copy)
                for prefix in self._prefixes[slot]:
                    donors[group].setdefault(prefix.key, _Donor(slot, number))
            waves[number].segments[group] += self.tile.segments(slot_in_group, start, tokens[start:])
        num_tiles = sum(self.tile.count(wave.segments) for wave in waves)
        if num_tiles < self.tile.count(without_copies.segments):
            return waves
        return [without_copies]

    def _donors(self, contexts: dict[int, list[int]], held: list[list[int]]) -> list[dict[int, _Donor]]:
        """Return the donors of every group before the first wave, by the key of the prefix that they hold."""
        donors: list[dict[int, _Donor]] = [{} for _ in range(self.tile.groups)]
        for slot, prefixes in self._prefixes.items():
            if slot in contexts and common_prefix(held[slot], contexts[slot]) < len(held[slot]):
                continue  # another context is about to take the slot
            group = slot // self.tile.slots
            for prefix in prefixes:
                if prefix.columns <= len(held[slot]):
                    donors[group].setdefault(prefix.key, _Donor(slot, -1))
        return donors

    def _longest_shared(
        self, slot: int, tokens: list[int], held: list[list[int]], donors: dict[int, _Donor]
    ) -> tuple[int, _Donor] | None:
        """Return the columns of the longest prefix that another slot can give, and that slot."""
        for prefix in reversed(self._prefixes[slot]):
            donor = donors.get(prefix.key)
            if donor is None or donor.slot == slot:
                continue
            # Keys are hashes: two texts may have the same one.
            if held[donor.slot][: prefix.columns] == tokens[: prefix.columns]:
                return prefix.columns, donor
        return None

    def _prefixes_of(self, tokens: Sequence[int]) -> Iterator[_Prefix]:
        """Yield the prefix after every whole segment, and the prefix of all tokens."""
        key = 0
        for start in range(0, len(tokens), self.tile.width):
            segment = tuple(tokens[start : start + self.tile.width])
            key = hash((key, segment))
            yield _Prefix(start + len(segment), key)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the number of equal tokens with which both lists begin.

    Args:
        left: token ids.
        right: token ids.

    Returns:
        A number from 0 to the length of the shorter list.
    """
    length = min(len(left), len(right))
    if left[:length] == right[:length]:  # the usual case, in one comparison
        return length
    for index in range(length):
        if left[index] != right[index]:
            return index
    return length
