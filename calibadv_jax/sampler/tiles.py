"""Cut the new tokens of slots into tiles of one shape, so that prefill is one program.

`sampler/engine.py` has a picture of slots, groups and tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# Tokens of one tile on each device, by platform. A CPU gains nothing from larger tiles.
TILE_TOKENS = {"cpu": 256}
# Tokens of one tile on other platforms: many tokens share the weights that a tile reads or gathers.
MOST_TOKENS = 4096


@dataclass(frozen=True)
class Segment:
    """Successive new tokens of one slot, at most as many as a tile is wide.

    Attributes:
        slot: index of the slot within its group.
        start: column of the cache that the first token takes.
        tokens: token ids.
    """

    slot: int
    start: int
    tokens: list[int]


Tile = dict[int, Segment]  # the segments of one group in a tile, by row of the tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The work of one prefill call. Rows without tokens have a count of 0.

    Attributes:
        tokens: int32 [tiles, groups, rows, width], token ids.
        starts: int32 [tiles, groups, rows], column of the first token.
        counts: int32 [tiles, groups, rows], number of tokens.
        columns: int32 [tiles], number of columns of the longest row of each tile.
        num_used: int32 [], number of tiles with any tokens; they come first.
        slots: int32 [tiles, groups, rows], slot within the group; None: row b is slot b.
    """

    tokens: Any
    starts: Any
    counts: Any
    columns: Any
    num_used: Any
    slots: Any


@dataclass(frozen=True)
class TileShape:
    """The shape into which prefill work is cut.

    Attributes:
        groups: number of groups of slots.
        slots: number of slots in each group.
        rows: number of segments that a tile has in each group.
        width: largest number of tokens in a segment.
    """

    groups: int
    slots: int
    rows: int
    width: int

    @classmethod
    def fitting(cls, groups: int, slots: int, width: int, platform: str = "") -> TileShape:
        """Return the shape of tiles that suits a platform.

        Args:
            groups: number of groups of slots.
            slots: number of slots in each group.
            width: largest number of tokens in a segment.
            platform: the name that JAX gives the platform, such as "cpu"; "": any accelerator.

        Returns:
            A shape with at least one row, and at most a row for every slot.
        """
        tile_tokens = TILE_TOKENS.get(platform, MOST_TOKENS)
        rows = max(1, tile_tokens // width)
        return cls(groups, slots, min(rows, slots), width)

    @property
    def has_row_per_slot(self) -> bool:
        """Whether a tile has a row for every slot, so that row b is slot b."""
        return self.rows == self.slots

    @property
    def tiles_per_call(self) -> int:
        """Number of tiles of a call, enough for one segment of every slot."""
        return -(-self.slots // self.rows)

    def segments(self, slot: int, start: int, tokens: Sequence[int]) -> list[Segment]:
        """Cut new tokens of a slot into segments.

        Args:
            slot: index of the slot within its group.
            start: column of the cache that the first token takes.
            tokens: the new token ids; may be empty.

        Returns:
            Segments of `width` tokens, in order; the last one may be shorter.
        """
        segments = []
        for cut in range(0, len(tokens), self.width):
            segments.append(Segment(slot, start + cut, list(tokens[cut : cut + self.width])))
        return segments

    def count(self, groups: Sequence[Sequence[Segment]]) -> int:
        """Return the number of tiles that prefill takes.

        Args:
            groups: the segments of each group.

        Returns:
            The number of tiles of the group that needs most.
        """
        return max(len(self._tiles_of(segments)) for segments in groups)

    def calls(self, groups: Sequence[Sequence[Segment]]) -> Iterator[Tiles]:
        """Arrange segments as calls of one shape.

        Args:
            groups: the segments of each group; segments of one slot are in order.

        Yields:
            The work of each prefill call; nothing if there are no segments.
        """
        tiles_by_group = [self._tiles_of(segments) for segments in groups]
        num_tiles = max(len(tiles) for tiles in tiles_by_group)
        for first in range(0, num_tiles, self.tiles_per_call):
            last = first + self.tiles_per_call
            yield self._call([tiles[first:last] for tiles in tiles_by_group])

    def _tiles_of(self, segments: Sequence[Segment]) -> list[Tile]:
        """Cut the segments of one group into tiles."""
        if not self.has_row_per_slot:
            cuts = range(0, len(segments), self.rows)
            return [dict(enumerate(segments[cut : cut + self.rows])) for cut in cuts]
        tiles: list[Tile] = []
        # Number of segments of each slot so far, which is the number of the tile for its next segment.
        counts = [0] * self.slots
        for segment in segments:
            number = counts[segment.slot]
            if number == len(tiles):
                tiles.append({})
            tiles[number][segment.slot] = segment
            counts[segment.slot] += 1
        return tiles

    def _call(self, groups: Sequence[Sequence[Tile]]) -> Tiles:
        """Write the tiles of every group, at most `tiles_per_call`, into arrays."""
        shape = (self.tiles_per_call, self.groups, self.rows)
        tokens = np.zeros((*shape, self.width), np.int32)
        starts = np.zeros(shape, np.int32)
        counts = np.zeros(shape, np.int32)
        slots = np.zeros(shape, np.int32)
        for group, tiles in enumerate(groups):
            for number, tile in enumerate(tiles):
                for row, segment in tile.items():
                    length = len(segment.tokens)
                    tokens[number, group, row, :length] = segment.tokens
                    starts[number, group, row] = segment.start
                    counts[number, group, row] = length
                    slots[number, group, row] = segment.slot
        ends = np.where(counts > 0, starts + counts, 0)  # [tiles, groups, rows]
        num_used = max(len(tiles) for tiles in groups)
        return Tiles(
            tokens=tokens,
            starts=starts,
            counts=counts,
            columns=ends.max((1, 2)),
            num_used=np.asarray(num_used, np.int32),
            slots=None if self.has_row_per_slot else slots,
        )
