"""Where samples lie in packed rows, of one width or of several.

Attention computes more for a token in a wide row than in a narrow one, but a long sample needs a wide row. So
the rows have one of a few widths, each compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

import numpy as np

WIDTHS = (Fraction(1), Fraction(1, 2), Fraction(3, 4), Fraction(1, 4), Fraction(3, 8))  # most useful first
WORTH = 0.01  # share of the cost that another width must save: it takes a compilation
FEW = 32  # samples: a microbatch is a large share of them, so that more ways to lay them are tried
ORDERS = 32  # for FEW samples, besides that by length
PLACED = 3_000  # samples that are laid for one choice of widths, over all ways that are tried


@dataclass(frozen=True)
class Placement:
    """Where a sample lies in the rows."""

    row: int
    start: int
    length: int
    segment: int  # its number in the row, from 1
    batch: int = 0  # of several, each with rows of another width


@dataclass(frozen=True)
class RowShape:
    """Rows of one width."""

    length: int  # tokens
    rows: int  # of a microbatch
    cost: float = 1.0  # of computing one position


@dataclass(frozen=True)
class Plan:
    """Placements of all samples, and the rows of each batch."""

    placements: list[Placement]
    shapes: list[RowShape]
    num_rows: list[int]  # of each shape

    @property
    def positions(self) -> list[int]:
        """Positions that are computed in each shape, those of empty rows of a microbatch included."""
        return [
            -(-rows // shape.rows) * shape.rows * shape.length
            for rows, shape in zip(self.num_rows, self.shapes, strict=True)
        ]

    @property
    def cost(self) -> float:
        return sum(n * shape.cost for n, shape in zip(self.positions, self.shapes, strict=True))


def rows_at(length: int, rows: int, row_length: int) -> int:
    """Rows of `length` in a microbatch: of as many tokens as `rows` of `row_length` have, or fewer."""
    return rows * max(1, row_length // length)


def row_widths(row_length: int, count: int) -> list[int]:
    """`row_length` and the `count` - 1 most useful narrower widths, widest first."""
    return sorted({int(row_length * share) for share in WIDTHS[:count]} - {0}, reverse=True)


def row_shapes(row_length: int, rows: int, count: int, cost: Callable[[int], float]) -> list[RowShape]:
    """The rows of `count` widths that a learner computes, for `plan`.

    Args:
        row_length: of the widest rows.
        rows: of a microbatch of those.
        cost: of a position in a row of so many tokens.
    """
    return [
        RowShape(width, rows_at(width, rows, row_length), cost(width))
        for width in row_widths(row_length, count)
    ]


def place(lengths: Sequence[int], row_length: int) -> tuple[list[Placement], int]:
    """First-fit decreasing bin packing. Returns a placement for each sample, and the number of rows.

    Raises:
        ValueError: a sample is longer than a row.
    """
    packing = plan(lengths, [RowShape(row_length, 1)])
    return packing.placements, sum(packing.num_rows)


def plan(lengths: Sequence[int], shapes: Sequence[RowShape]) -> Plan:
    """The cheapest way found to lay samples into rows of some of these widths, by first-fit decreasing.

    Long samples open rows of the narrowest of the chosen widths that holds them; the space left there, and
    in the empty rows of the last microbatch, is offered to the shorter ones. Several numbers of microbatches
    of the widest rows are tried, and other orders of few samples: what remains may fit into narrower ones.

    Args:
        shapes: widest first.

    Raises:
        ValueError: a sample is longer than a row.
    """
    longest = max(lengths, default=0)
    if longest > shapes[0].length:
        index = int(np.argmax(lengths))
        raise ValueError(f"sample {index} has {longest} tokens, but a row holds {shapes[0].length}")
    choices = [
        list(chosen)
        for count in range(1, len(shapes) + 1)
        for chosen in combinations(shapes, count)
        if chosen[0].length >= longest
    ]
    plans = (
        _laid(lengths, order, chosen, more)
        for order in _orders(lengths, len(shapes))
        for chosen in choices
        for more in _offers(lengths, chosen)
    )
    return min(plans, key=lambda candidate: candidate.cost * (1.0 + WORTH * len(candidate.shapes)))


def _offers(lengths: Sequence[int], shapes: Sequence[RowShape]) -> list[int]:
    """Numbers of microbatches of the widest rows to try, from none to as many as hold everything."""
    most = sum(lengths) // (shapes[0].rows * shapes[0].length) if len(shapes) > 1 else 0
    tried = min(most + 1, max(1, PLACED // max(1, len(lengths))))
    return sorted({round(offer) for offer in np.linspace(0, most, tried)})


def _orders(lengths: Sequence[int], num_shapes: int) -> Iterator[list[int]]:
    """Samples by falling length, then by lengths that chance has raised by up to their double."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    yield order
    rng = np.random.default_rng(0)
    for _ in range(ORDERS if 1 < len(lengths) <= FEW and num_shapes > 1 else 0):
        raised = np.asarray(lengths) * rng.uniform(1.0, 2.0, len(lengths))
        yield np.argsort(-raised, kind="stable").tolist()


def _laid(lengths: Sequence[int], order: list[int], shapes: Sequence[RowShape], more: int) -> Plan:
    """Samples in `order` into rows of all `shapes` that have use for them.

    `more` microbatches of the widest rows are offered to all samples, besides those that long ones open.
    """
    placements: dict[int, Placement] = {}
    used: list[RowShape] = []
    num_rows: list[int] = []
    narrower = [shape.length for shape in shapes[1:]] + [0]
    for shape, limit in zip(shapes, narrower, strict=True):
        left = [index for index in order if index not in placements]
        needed = [index for index in left if lengths[index] > limit]
        offered = 0 if used else more * shape.rows
        if not needed and not offered and (limit or used):
            continue
        rows = _Rows(shape.length, len(left) + offered)
        placed = {index: rows.put(lengths[index], opens=True) for index in needed}
        rows.count = -(-rows.count // shape.rows) * shape.rows + offered
        placed |= {index: rows.put(lengths[index], opens=False) for index in left if index not in placed}
        batch = len(used)
        placements |= {index: replace(at, batch=batch) for index, at in placed.items() if at is not None}
        used.append(shape)
        num_rows.append(rows.filled)
    return Plan([placements[index] for index in range(len(lengths))], used, num_rows)


class _Rows:
    """Rows that are filled from the left."""

    def __init__(self, length: int, most: int):
        self.length = length
        self.free = np.full(most, length)
        self.segments = np.zeros(most, np.int64)
        self.count = 0  # rows that may be used

    @property
    def filled(self) -> int:
        """Rows that hold something; they come first."""
        return int(np.count_nonzero(self.segments))

    def put(self, length: int, opens: bool) -> Placement | None:
        """Places a sample in the first row that has room, if need be in a new one; None: nowhere."""
        fits = self.free[: self.count] >= length
        row = int(np.argmax(fits)) if fits.any() else self.count
        if row == self.count:
            if not opens:
                return None
            self.count += 1
        start = self.length - int(self.free[row])
        self.free[row] -= length
        self.segments[row] += 1
        return Placement(row, start, length, int(self.segments[row]))
