"""Prefill work in tiles of one shape: what a row computes does not depend on how many others come with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

TILE_TOKENS = {"cpu": 256}  # of one tile on each device, by its platform; a CPU gains nothing from more
MOST_TOKENS = 4096  # elsewhere: many tokens share the weights that a tile reads or gathers


@dataclass(frozen=True)
class Segment:
    """Successive tokens of one slot."""

    row: int  # of the group's slots
    start: int  # column of the first token
    tokens: list[int]  # at most as many as a tile is wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Work of one prefill call. Unused rows have no tokens."""

    tokens: Any  # int32 [tiles, groups, rows, width]
    starts: Any  # int32 [tiles, groups, rows], column of the first token
    counts: Any  # int32 [tiles, groups, rows], number of tokens
    columns: Any  # int32 [tiles], of the longest row of a tile
    used: Any  # int32 [], tiles with any tokens; they come first
    slots: Any  # int32 [tiles, groups, rows], slot within the group; None: row b is slot b


@dataclass(frozen=True)
class TileShape:
    """How prefill work is cut.

    Attributes:
        groups, slots: groups of slots, and slots of each.
        rows, width: segments of a tile in each group, and tokens of a segment.
    """

    groups: int
    slots: int
    rows: int
    width: int

    @classmethod
    def fitting(cls, groups: int, slots: int, width: int, platform: str = "") -> TileShape:
        """For devices of a platform as JAX names it; those that are not named in TILE_TOKENS are alike."""
        rows = max(1, TILE_TOKENS.get(platform, MOST_TOKENS) // width)
        return cls(groups, slots, min(rows, slots), width)

    @property
    def is_whole(self) -> bool:
        """A tile has a row for every slot."""
        return self.rows == self.slots

    @property
    def at_once(self) -> int:
        """Tiles of one call: so many that every slot has a segment."""
        return -(-self.slots // self.rows)

    def segments(self, row: int, start: int, tokens: Sequence[int]) -> list[Segment]:
        """New tokens of a slot, from column `start` on."""
        return [
            Segment(row, start + at, list(tokens[at : at + self.width]))
            for at in range(0, len(tokens), self.width)
        ]

    def count(self, groups: Sequence[Sequence[Segment]]) -> int:
        """The number of tiles that the segments of every group take."""
        return max(len(self._tiles_of(segments)) for segments in groups)

    def calls(self, groups: Sequence[Sequence[Segment]]) -> Iterator[Tiles]:
        """The segments of every group, those of a slot in their order, as calls of one shape."""
        cut = [self._tiles_of(segments) for segments in groups]
        for first in range(0, max(map(len, cut)), self.at_once):
            yield self._call([tiles[first : first + self.at_once] for tiles in cut])

    def _tiles_of(self, segments: Sequence[Segment]) -> list[list[tuple[int, Segment]]]:
        """Tiles of one group: (row of the tile, segment)."""
        if not self.is_whole:
            cuts = range(0, len(segments), self.rows)
            return [list(enumerate(segments[at : at + self.rows])) for at in cuts]
        tiles: list[list[tuple[int, Segment]]] = []
        seen = [0] * self.slots
        for segment in segments:
            if seen[segment.row] == len(tiles):
                tiles.append([])
            tiles[seen[segment.row]].append((segment.row, segment))
            seen[segment.row] += 1
        return tiles

    def _call(self, groups: Sequence[Sequence[Sequence[tuple[int, Segment]]]]) -> Tiles:
        shape = self.at_once, self.groups, self.rows
        tokens = np.zeros((*shape, self.width), np.int32)
        starts, counts, slots = (np.zeros(shape, np.int32) for _ in range(3))
        for group, tiles in enumerate(groups):
            for number, tile in enumerate(tiles):
                for row, segment in tile:
                    at = number, group, row
                    tokens[(*at, slice(len(segment.tokens)))] = segment.tokens
                    starts[at], counts[at], slots[at] = segment.start, len(segment.tokens), segment.row
        used = np.asarray(max(map(len, groups)), np.int32)
        columns = np.where(counts > 0, starts + counts, 0).max((1, 2))
        return Tiles(tokens, starts, counts, columns, used, None if self.is_whole else slots)
