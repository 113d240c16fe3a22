"""Compute prompts that begin alike once: copy the beginnings that other slots of the cache hold.

The trajectories of a group have one prompt, and all prompts begin with the same instructions. Only columns
that prefill wrote are copied, and only whole segments from the first column on (or a whole prompt), so that
every token lies at the same place of its segment as if nothing had been copied: its keys and values are the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

TILE_TOKENS = {"cpu": 256}  # of one tile on each device, by its platform; a CPU gains nothing from more
MOST_TOKENS = 4096  # elsewhere: many tokens share the weights that a tile reads or gathers


@dataclass(frozen=True)
class Copy:
    """A copy of the first columns of a slot to another one of its group."""

    source: int
    target: int
    columns: int


@dataclass
class Wave:
    """Work done at once, for every group of slots: first the copies, then the segments."""

    copies: list[list[Copy]]
    segments: list[list[Segment]]

    @classmethod
    def empty(cls, groups: int) -> Wave:
        return cls([[] for _ in range(groups)], [[] for _ in range(groups)])


class Prefixes:
    """The beginnings that slots of a cache can give to others."""

    def __init__(self, tile: TileShape):
        self.tile = tile
        self._keys: dict[int, list[tuple[int, int]]] = {}  # slot: (columns, key of their tokens)

    def fill(self, contexts: dict[int, list[int]], held: list[list[int]]) -> list[Wave]:
        """Plan how all but the last token of every slot's context come into the cache, and note it in `held`.

        Waves are done one after the other. Where copies save no tile of prefill, there are none.
        """
        plain, shared = Wave.empty(self.tile.groups), [Wave.empty(self.tile.groups)]
        donors = self._donors(contexts, held)
        for slot, context in contexts.items():
            group, row = divmod(slot, self.tile.slots)
            tokens = context[:-1]
            start = common_prefix(held[slot], tokens)
            held[slot][start:] = tokens[start:]
            plain.segments[group] += self.tile.segments(row, start, tokens[start:])
            number = 0
            if start:
                self._keys[slot] = [entry for entry in self._keys.get(slot, ()) if entry[0] <= start]
            else:
                self._keys[slot] = list(self._keys_of(tokens))
                number, source, start = self._longest(slot, tokens, held, donors[group])
                while len(shared) <= number:
                    shared.append(Wave.empty(self.tile.groups))
                if start:
                    shared[number].copies[group].append(Copy(source % self.tile.slots, row, start))
                for _, key in self._keys[slot]:
                    donors[group].setdefault(key, (slot, number))
            shared[number].segments[group] += self.tile.segments(row, start, tokens[start:])
        tiles = sum(self.tile.count(wave.segments) for wave in shared)
        return shared if tiles < self.tile.count(plain.segments) else [plain]

    def _donors(
        self, contexts: dict[int, list[int]], held: list[list[int]]
    ) -> list[dict[int, tuple[int, int]]]:
        """Return (slot, wave after which it holds them) by the key of its first tokens, for every group."""
        donors: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.tile.groups)]
        for slot, keys in self._keys.items():
            if slot in contexts and common_prefix(held[slot], contexts[slot]) < len(held[slot]):
                continue  # it is about to hold something else
            for columns, key in keys:
                if columns <= len(held[slot]):
                    donors[slot // self.tile.slots].setdefault(key, (slot, -1))
        return donors

    def _longest(
        self, slot: int, tokens: list[int], held: list[list[int]], donors: dict[int, tuple[int, int]]
    ) -> tuple[int, int, int]:
        """Return (wave, source slot, columns) of the longest prefix that another slot holds; or 0 columns."""
        for columns, key in reversed(self._keys[slot]):
            source, wave = donors.get(key, (slot, 0))
            # Keys are hashes: two texts may have the same one.
            if source != slot and held[source][:columns] == tokens[:columns]:
                return wave + 1, source, columns
        return 0, slot, 0

    def _keys_of(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (columns, key) after every whole segment, and of all tokens."""
        key = 0
        for start in range(0, len(tokens), self.tile.width):
            segment = tuple(tokens[start : start + self.tile.width])
            key = hash((key, segment))
            yield start + len(segment), key


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the number of equal tokens with which both begin."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:  # the usual case, in one comparison
        return length
    return next(index for index in range(length) if left[index] != right[index])


@dataclass(frozen=True)
class Segment:
    """Successive tokens of one slot."""

    row: int  # of the group's slots
    start: int  # column of the first token
    tokens: list[int]  # at most as many as a tile is wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Work of one prefill call. Unused rows have a count of 0."""

    tokens: Any  # int32 [tiles, groups, rows, width]
    starts: Any  # int32 [tiles, groups, rows], column of the first token
    counts: Any  # int32 [tiles, groups, rows], number of tokens
    columns: Any  # int32 [tiles], of the longest row of a tile
    used: Any  # int32 [], tiles with any tokens; they come first
    slots: Any  # int32 [tiles, groups, rows], slot within the group; None: row b is slot b


@dataclass(frozen=True)
class TileShape:
    """Shape into which prefill work is cut."""

    groups: int  # of slots
    slots: int  # of each group
    rows: int  # segments of a tile in each group
    width: int  # tokens of a segment

    @classmethod
    def fitting(cls, groups: int, slots: int, width: int, platform: str = "") -> TileShape:
        """Return the shape for a platform as JAX names it."""
        rows = max(1, TILE_TOKENS.get(platform, MOST_TOKENS) // width)
        return cls(groups, slots, min(rows, slots), width)

    @property
    def is_whole(self) -> bool:
        """Whether a tile has a row for every slot."""
        return self.rows == self.slots

    @property
    def at_once(self) -> int:
        """Number of tiles of a call: every slot has a segment."""
        return -(-self.slots // self.rows)

    def segments(self, row: int, start: int, tokens: Sequence[int]) -> list[Segment]:
        """Cut new tokens of a slot, from column `start` on, into segments."""
        cuts = range(0, len(tokens), self.width)
        return [Segment(row, start + cut, list(tokens[cut : cut + self.width])) for cut in cuts]

    def count(self, groups: Sequence[Sequence[Segment]]) -> int:
        """Return the number of tiles that the segments of every group take."""
        return max(len(self._tiles_of(segments)) for segments in groups)

    def calls(self, groups: Sequence[Sequence[Segment]]) -> Iterator[Tiles]:
        """Yield the segments of every group as calls of one shape."""
        cut = [self._tiles_of(segments) for segments in groups]
        for first in range(0, max(map(len, cut)), self.at_once):
            yield self._call([tiles[first : first + self.at_once] for tiles in cut])

    def _tiles_of(self, segments: Sequence[Segment]) -> list[list[tuple[int, Segment]]]:
        """Cut a group's segments into tiles of (row of the tile, segment)."""
        if not self.is_whole:
            cuts = range(0, len(segments), self.rows)
            return [list(enumerate(segments[cut : cut + self.rows])) for cut in cuts]
        tiles: list[list[tuple[int, Segment]]] = []
        counts = [0] * self.slots
        for segment in segments:
            if counts[segment.row] == len(tiles):
                tiles.append([])
            tiles[counts[segment.row]].append((segment.row, segment))
            counts[segment.row] += 1
        return tiles

    def _call(self, groups: Sequence[Sequence[Sequence[tuple[int, Segment]]]]) -> Tiles:
        shape = self.at_once, self.groups, self.rows
        tokens = np.zeros((*shape, self.width), np.int32)
        starts, counts, slots = (np.zeros(shape, np.int32) for _ in range(3))
        for group, tiles in enumerate(groups):
            for number, tile in enumerate(tiles):
                for row, segment in tile:
                    place, length = (number, group, row), len(segment.tokens)
                    tokens[place][:length] = segment.tokens
                    starts[place], counts[place], slots[place] = segment.start, length, segment.row
        used = np.asarray(max(map(len, groups)), np.int32)
        columns = np.where(counts > 0, starts + counts, 0).max((1, 2))
        return Tiles(tokens, starts, counts, columns, used, None if self.is_whole else slots)
