"""Samples, the plan of their places in rows of a few widths, packed rows, and microbatches.

Letters: T tokens of a sample, R rows of a batch, L columns of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from calibadv_jax.config import Aggregation

Arrays = Sequence[np.ndarray]  # one array for each sample, or for each batch

# Widths of rows as shares of the pack length, the most useful first.
WIDTHS = (
    Fraction(1),
    Fraction(1, 2),
    Fraction(3, 4),
    Fraction(1, 4),
    Fraction(3, 8),
)
MIN_SAVING = 0.01  # Share of the cost that another width must save, since it takes a compilation.
# With at most so many samples, a microbatch is a large share of the cost, and more packings are tried.
FEW_SAMPLES = 32
RANDOM_ORDERS = 32  # Random orders in which few samples are packed, in addition to the order by length.
MAX_PLACEMENTS = 3_000  # Placements to compute for one choice of widths, over all packings that are tried.
INTEGER_FIELDS = {"tokens", "positions", "segment_ids", "targets"}  # Fields of a batch that are int32.


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: prompt and response together. The prompt is never trained.

    Attributes:
        tokens: int32 [T].
        mask: bool [T], True where the token is trained.
        advantages: float32 [T].
        logprobs: float32 [T], log-probabilities under the sampler's policy, in nats; 0 where not sampled.
        old_logprobs: float32 [T], those in the denominator of the ratio; None: the sampler's.
        prompt: number of tokens that a question's samples share; None: those before the first trained one.
        teacher_logprobs: float32 [T], log-probabilities under the teacher, in nats; None: there is none.
        teacher_weights: float32 [T], weight of the teacher at each token; 0 where it does not guide, such as
            outside the mask. None: there is no teacher.
        is_demonstration: whether the tokens come from a demonstration.
    """

    tokens: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    logprobs: np.ndarray
    old_logprobs: np.ndarray | None = None
    prompt: int | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_weights: np.ndarray | None = None
    is_demonstration: bool = False

    @property
    def denominator(self) -> np.ndarray:
        """Log-probabilities in the denominator of the ratio, float32 [T]."""
        return self.logprobs if self.old_logprobs is None else self.old_logprobs

    @property
    def prompt_ids(self) -> np.ndarray:
        """Tokens that all samples of its question begin with, int32 [P]."""
        if self.prompt is not None:
            return self.tokens[: self.prompt]
        if not self.mask.any():
            return self.tokens
        first_trained = int(np.argmax(self.mask))
        return self.tokens[:first_trained]


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    """Packed rows. Column t describes the token that *follows* it, so that device code never shifts.

    The mask is in the weights: a column with weight 0 has no influence on the loss. Where samples share
    computed tokens (`PrefixSharedRows`), `tokens`, `positions` and `ends` describe the computed columns, and
    all other fields describe the columns of the loss.

    Attributes:
        tokens: int32 [R, L], the input.
        positions: int32 [R, L], which restart in every segment.
        segment_ids: int32 [R, L], number of the sample that a column belongs to; 0: padding.
        targets: int32 [R, L], the next token of the segment.
        weights: float32 [R, L], weight of the target's term in the loss. Those of a mean sum to 1 over the
            mini-batch.
        advantages: float32 [R, L], of the targets.
        sampler_logprobs: float32 [R, L], of the targets under the sampler's policy.
        old_logprobs: float32 [R, L], of the targets, in the denominator of the ratio.
        factors: float32 [R, L], of the targets, from the loss's `BatchFactor`; None: the loss has none.
        ends: int32 [R, L], the first column that does not see this one; None: the end of its segment.
        sources: int32 [R, L], the computed column that predicts the target; None: the same column.
        teacher_logprobs: float32 [R, L], of the targets under the teacher; None: there is no teacher.
        teacher_weights: float32 [R, L], of the teacher at the targets; None: there is no teacher.
        demonstrated: float32 [R, L], 1 where the target comes from a demonstration, else 0; None: none does.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    targets: Any
    weights: Any
    advantages: Any
    sampler_logprobs: Any
    old_logprobs: Any
    factors: Any = None
    ends: Any = None
    sources: Any = None
    teacher_logprobs: Any = None
    teacher_weights: Any = None
    demonstrated: Any = None


def token_weights(
    samples: Sequence[Sample], aggregation: Aggregation, length_norm: int = 1
) -> list[np.ndarray]:
    """Return the weight of each token's term in the loss.

    Args:
        samples: of the mini-batch.
        aggregation: as `loss.aggregation`.
        length_norm: divisor of sequence_sum_norm, in tokens.

    Returns:
        float32 [T] for each sample, 0 where a token is not trained. Those of a mean sum to 1.
    """
    counts = np.array([sample.mask.sum() for sample in samples], int)  # trained tokens of each sample
    num_trained_samples = int(np.count_nonzero(counts))
    divisors = {
        "token_mean": counts.sum(),
        "sequence_mean": num_trained_samples * counts,
        "sequence_sum": num_trained_samples,
        "sequence_sum_norm": num_trained_samples * length_norm,
    }[aggregation]
    # The weight of each trained token of a sample; 0 without one.
    sample_weights = 1.0 / np.maximum(1, divisors) * (counts > 0)
    pairs = zip(samples, sample_weights.astype(np.float32), strict=True)
    return [sample.mask * weight for sample, weight in pairs]


def content_hash(samples: Sequence[Sample]) -> str:
    """Return a hash of the samples' arrays, by which processes compare what they train on.

    Args:
        samples: in the order of training; `old_logprobs` and `prompt` are not read.

    Returns:
        SHA-256 of tokens, masks, advantages, the sampler's log-probabilities, and the teacher's, 64
        hexadecimal digits.
    """
    content = hashlib.sha256()
    for sample in samples:
        arrays = [sample.tokens, sample.mask, sample.advantages, sample.logprobs]
        if sample.teacher_logprobs is not None and sample.teacher_weights is not None:
            arrays += [sample.teacher_logprobs, sample.teacher_weights]
        for array in arrays:
            content.update(array.tobytes())
    return content.hexdigest()


# --- The plan: places of samples in rows ---


@dataclass(frozen=True)
class Placement:
    """Place of a sample.

    Attributes:
        row: of the batch.
        start: first column.
        length: number of columns.
        segment: number of the sample in its row, from 1.
        batch: number of the batch; each batch has rows of another width.
    """

    row: int
    start: int
    length: int
    segment: int
    batch: int = 0


@dataclass(frozen=True)
class RowShape:
    """Rows of one width.

    Attributes:
        length: L, tokens of a row.
        rows: rows of a microbatch.
        cost: of computing one column, in any unit.
    """

    length: int
    rows: int
    cost: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Placements of all samples, and the rows of each batch.

    Attributes:
        placements: of each sample.
        shapes: of each batch, widest first.
        num_rows: rows of each batch.
    """

    placements: list[Placement]
    shapes: list[RowShape]
    num_rows: list[int]

    @property
    def positions(self) -> list[int]:
        """Computed columns of each batch, empty rows of a microbatch included."""
        counts = []
        for num_rows, shape in zip(self.num_rows, self.shapes, strict=True):
            computed_rows = _round_up(num_rows, shape.rows)
            counts.append(computed_rows * shape.length)
        return counts

    @property
    def cost(self) -> float:
        """Cost of all computed columns."""
        pairs = zip(self.positions, self.shapes, strict=True)
        return sum(num_columns * shape.cost for num_columns, shape in pairs)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def rows_at(length: int, rows: int, pack_length: int) -> int:
    """Return how many rows of `length` a microbatch has.

    Args:
        length: tokens of a row.
        rows: rows of `pack_length` in a microbatch.
        pack_length: tokens of the widest rows; 0: a microbatch has `rows` rows of any width.

    Returns:
        The largest multiple of `rows` that gives a microbatch no more tokens; at least `rows`.
    """
    return rows * max(1, pack_length // length)


def row_shapes(pack_length: int, rows: int, count: int, cost: Callable[[int], float]) -> list[RowShape]:
    """Return the most useful widths of rows, widest first.

    Args:
        pack_length: tokens of the widest rows.
        rows: rows of `pack_length` in a microbatch.
        count: number of widths. Fewer are returned if `pack_length` is tiny.
        cost: returns the cost of one column in any unit, given the row's length in tokens.

    Returns:
        A shape for each width; the first one has `pack_length`.
    """
    lengths = {int(pack_length * share) for share in WIDTHS[:count]}
    lengths.discard(0)
    shapes = []
    for length in sorted(lengths, reverse=True):
        shapes.append(RowShape(length, rows_at(length, rows, pack_length), cost(length)))
    return shapes


def plan(lengths: Sequence[int], shapes: Sequence[RowShape]) -> Plan:
    """Return the cheapest of several first-fit decreasing packings.

    Attention computes more for a token in a wide row than in a narrow one, but a long sample needs a wide
    row. Long samples open rows of the narrowest chosen width that holds them; the space left there, and in
    the empty rows of the last microbatch, is offered to shorter samples.

    Args:
        lengths: tokens of each sample.
        shapes: rows to choose from, widest first.

    Returns:
        Placements in rows of some of the shapes.

    Raises:
        ValueError: if a sample is longer than the widest row.
    """
    longest = max(lengths, default=0)
    widest = shapes[0].length
    if longest > widest:
        raise ValueError(f"sample {lengths.index(longest)} has {longest} tokens, but a row holds {widest}")

    def cost_with_compilation(candidate: Plan) -> float:
        """Return a plan's cost, raised by MIN_SAVING for each of its widths."""
        return candidate.cost * (1.0 + MIN_SAVING * len(candidate.shapes))

    return min(_candidates(lengths, shapes, longest), key=cost_with_compilation)


def _candidates(lengths: Sequence[int], shapes: Sequence[RowShape], longest: int) -> Iterator[Plan]:
    """Yield packings in several orders and widths, with several numbers of extra microbatches."""
    for order in _orders(lengths, len(shapes)):
        for chosen in _choices(shapes, longest):
            for num_extra in _extra_microbatches(lengths, chosen):
                yield _packing(lengths, order, chosen, num_extra)


def _choices(shapes: Sequence[RowShape], longest: int) -> Iterator[tuple[RowShape, ...]]:
    """Yield the choices of shapes, widest first, whose widest one holds the longest sample."""
    for count in range(1, len(shapes) + 1):
        for chosen in combinations(shapes, count):
            if chosen[0].length >= longest:
                yield chosen


def _extra_microbatches(lengths: Sequence[int], shapes: Sequence[RowShape]) -> list[int]:
    """Return the numbers of extra microbatches of the widest rows to try, up to enough for all samples."""
    if len(shapes) == 1:
        return [0]
    microbatch_tokens = shapes[0].rows * shapes[0].length
    most = sum(lengths) // microbatch_tokens
    num_affordable = max(1, MAX_PLACEMENTS // max(1, len(lengths)))
    num_tries = min(most + 1, num_affordable)
    return sorted({round(number) for number in np.linspace(0, most, num_tries)})


def _orders(lengths: Sequence[int], num_shapes: int) -> Iterator[list[int]]:
    """Yield the samples by falling length, then by lengths multiplied at random by up to 2."""
    yield np.argsort(-np.asarray(lengths, int), kind="stable").tolist()
    rng = np.random.default_rng(0)
    if 1 < len(lengths) <= FEW_SAMPLES and num_shapes > 1:
        for _ in range(RANDOM_ORDERS):
            raised = np.asarray(lengths) * rng.uniform(1.0, 2.0, len(lengths))
            yield np.argsort(-raised, kind="stable").tolist()


def _packing(lengths: Sequence[int], order: list[int], shapes: Sequence[RowShape], num_extra: int) -> Plan:
    """Place samples first fit.

    Args:
        lengths: tokens of each sample.
        order: in which samples are placed.
        shapes: widths to use, widest first; a width that would hold no sample is left out.
        num_extra: microbatches of the widest rows in addition to those that long samples need.
    """
    placements: dict[int, Placement] = {}
    used: list[RowShape] = []
    num_rows: list[int] = []
    next_lengths = [shape.length for shape in shapes[1:]] + [0]
    for shape, next_length in zip(shapes, next_lengths, strict=True):
        unplaced = [index for index in order if index not in placements]
        too_long_for_next = [index for index in unplaced if lengths[index] > next_length]
        num_extra_rows = 0 if used else num_extra * shape.rows
        # A plan has at least one batch, even without samples.
        is_only_batch = next_length == 0 and not used
        is_needed = bool(too_long_for_next) or num_extra_rows > 0 or is_only_batch
        if not is_needed:
            continue
        batch = len(used)
        rows = _OpenRows(shape.length, len(unplaced) + num_extra_rows)
        for index in too_long_for_next:
            placements[index] = rows.place_in_any(lengths[index], batch)
        rows.count = _round_up(rows.count, shape.rows) + num_extra_rows
        for index in unplaced:
            if index in placements:
                continue
            placement = rows.place(lengths[index], batch)
            if placement is not None:
                placements[index] = placement
        used.append(shape)
        num_rows.append(int(np.count_nonzero(rows.segments)))
    return Plan([placements[index] for index in range(len(lengths))], used, num_rows)


class _OpenRows:
    """Rows of one width that are filled from the left.

    Attributes:
        length: columns of a row.
        free: int [rows], unused columns of each row.
        segments: int [rows], samples in each row.
        count: rows that may be used.

    Args:
        length: columns of a row.
        most: largest number of rows.
    """

    def __init__(self, length: int, most: int):
        self.length = length
        self.free = np.full(most, length)
        self.segments = np.zeros(most, np.int64)
        self.count = 0

    def place(self, length: int, batch: int) -> Placement | None:
        """Place a sample in the first usable row that has room.

        Args:
            length: columns of the sample.
            batch: number of these rows' batch.

        Returns:
            The place; None if no usable row has room.
        """
        fits = self.free[: self.count] >= length
        if not fits.any():
            return None
        return self._place_in(int(np.argmax(fits)), length, batch)

    def place_in_any(self, length: int, batch: int) -> Placement:
        """Place a sample in the first usable row that has room, or in a new row.

        Args:
            length: columns of the sample, at most those of a row.
            batch: number of these rows' batch.

        Returns:
            The place.
        """
        placement = self.place(length, batch)
        if placement is not None:
            return placement
        self.count += 1
        return self._place_in(self.count - 1, length, batch)

    def _place_in(self, row: int, length: int, batch: int) -> Placement:
        start = self.length - int(self.free[row])
        self.free[row] -= length
        self.segments[row] += 1
        return Placement(row, start, length, int(self.segments[row]), batch)


# --- Packed rows ---


@dataclass(frozen=True)
class SampleColumns:
    """The columns of the loss that belong to one sample.

    Attributes:
        index: number of the sample.
        placement: its place, or that of its prefix tree.
        columns: of its row.
        tokens: its tokens that are the targets of these columns.
    """

    index: int
    placement: Placement
    columns: slice
    tokens: slice | np.ndarray

    @property
    def place(self) -> tuple[int, slice]:
        """Row and columns, to index an array [R, L] of the batch."""
        return self.placement.row, self.columns


class Rows:
    """Samples laid end to end in packed rows.

    Args:
        samples: to pack.
        shapes: rows to choose from, widest first.
        weights: float32 [T] for each sample; None: 0, for a pass that computes no loss.

    Attributes:
        samples: the samples.
        weights: the weights.
        plan: places of the samples.
        tokens: number of tokens of all samples.
        computed: number of columns with a token.
        positions: number of computed columns, empty rows of a microbatch included.

    Raises:
        ValueError: if a sample is longer than the widest row.
    """

    def __init__(self, samples: Sequence[Sample], shapes: Sequence[RowShape], weights: Arrays | None = None):
        if weights is None:
            weights = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
        self.samples = samples
        self.weights = weights
        self.tokens = sum(len(sample.tokens) for sample in samples)
        self.computed = self.tokens
        self.plan = self._make_plan(shapes)
        self.positions = sum(self.plan.positions)

    def batches(self, factors: Arrays | None = None) -> list[Batch]:
        """Return the packed rows.

        Args:
            factors: float32 [T] for each sample, from the loss's `BatchFactor`; None: it has none.

        Returns:
            Rows [R, L], a batch for each width L that is used.
        """
        batches = []
        for num_rows, shape in zip(self.plan.num_rows, self.plan.shapes, strict=True):
            batches.append(_empty_batch((num_rows, shape.length)))
        self._fill_inputs(batches)
        if factors is not None:
            for batch in batches:
                batch.factors = np.zeros_like(batch.weights)
        if any(sample.teacher_weights is not None for sample in self.samples):
            for batch in batches:
                batch.teacher_logprobs = np.zeros_like(batch.weights)
                batch.teacher_weights = np.zeros_like(batch.weights)
        if any(sample.is_demonstration for sample in self.samples):
            for batch in batches:
                batch.demonstrated = np.zeros_like(batch.weights)
        for part in self._sample_columns():
            batch = batches[part.placement.batch]
            sample = self.samples[part.index]
            batch.targets[part.place] = sample.tokens[part.tokens]
            batch.advantages[part.place] = sample.advantages[part.tokens]
            batch.sampler_logprobs[part.place] = sample.logprobs[part.tokens]
            batch.old_logprobs[part.place] = sample.denominator[part.tokens]
            batch.weights[part.place] = self.weights[part.index][part.tokens]
            if factors is not None:
                batch.factors[part.place] = factors[part.index][part.tokens]
            if sample.teacher_logprobs is not None and sample.teacher_weights is not None:
                batch.teacher_logprobs[part.place] = sample.teacher_logprobs[part.tokens]
                batch.teacher_weights[part.place] = sample.teacher_weights[part.tokens]
            if sample.is_demonstration:
                batch.demonstrated[part.place] = 1.0
        return batches

    def unpack(self, values: Arrays) -> list[np.ndarray]:
        """Return values of packed rows by sample.

        Args:
            values: [R, L] for each batch.

        Returns:
            [T] for each sample: entry t belongs to token t. It is 0 for tokens without a column of the loss,
            such as the first one.
        """
        results = []
        for sample in self.samples:
            results.append(np.zeros(len(sample.tokens), values[0].dtype))
        for part in self._sample_columns():
            batch_values = values[part.placement.batch]
            results[part.index][part.tokens] = batch_values[part.place]
        return results

    def _make_plan(self, shapes: Sequence[RowShape]) -> Plan:
        return plan([len(sample.tokens) for sample in self.samples], shapes)

    def _fill_inputs(self, batches: Sequence[Batch]) -> None:
        """Write what the decoder reads: tokens, positions and segments."""
        for sample, placement in zip(self.samples, self.plan.placements, strict=True):
            batch = batches[placement.batch]
            columns = slice(placement.start, placement.start + placement.length)
            batch.tokens[placement.row, columns] = sample.tokens
            batch.positions[placement.row, columns] = np.arange(placement.length)
            batch.segment_ids[placement.row, columns] = placement.segment

    def _sample_columns(self) -> Iterator[SampleColumns]:
        """Yield the columns of the loss of each sample."""
        for index, placement in enumerate(self.plan.placements):
            last = placement.start + placement.length - 1  # predicts nothing
            yield SampleColumns(index, placement, slice(placement.start, last), slice(1, None))


def pack(
    samples: Sequence[Sample],
    pack_length: int,
    aggregation: Aggregation = "token_mean",
    weights: Arrays | None = None,
) -> Batch:
    """Pack samples into rows of one width.

    Args:
        samples: to pack.
        pack_length: L, tokens of a row.
        aggregation: gives the weights of the tokens.
        weights: float32 [T] for each sample, in place of those of `aggregation`.

    Returns:
        Rows [R, L].

    Raises:
        ValueError: if a sample is longer than a row.
    """
    weights = weights or token_weights(samples, aggregation)
    rows = Rows(samples, [RowShape(pack_length, 1)], weights)
    (batch,) = rows.batches()
    return batch


def microbatches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Cut a batch [R, L] into microbatches [rows, L].

    Args:
        batch: the rows; none is allowed.
        rows: of a microbatch.

    Yields:
        At least one microbatch. The last one is filled up with empty rows.
    """

    def cut(array: np.ndarray, start: int) -> np.ndarray:
        """Return the rows of a microbatch of an array [R, L], filled up with rows of 0."""
        part = array[start : start + rows]
        return np.pad(part, ((0, rows - len(part)), (0, 0)))

    for start in range(0, max(1, len(batch.tokens)), rows):
        yield jax.tree.map(lambda array, start=start: cut(array, start), batch)


def abstract_batch(shape: tuple[int, ...], sharding: NamedSharding, shares_prefixes: bool) -> Batch:
    """Return the ShapeDtypeStructs of a batch, for compiling ahead of time.

    Args:
        shape: (R, L).
        sharding: of every array.
        shares_prefixes: whether the batch is one of `PrefixSharedRows`.

    Returns:
        A batch of ShapeDtypeStructs, int32 or float32 [R, L], without `factors`.
    """
    batch = _empty_batch((0, 0))
    if shares_prefixes:
        batch.ends = batch.tokens
        batch.sources = batch.tokens

    def struct(array: np.ndarray) -> jax.ShapeDtypeStruct:
        """Return the ShapeDtypeStruct of one array."""
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

    return jax.tree.map(struct, batch)


def _empty_batch(shape: tuple[int, int]) -> Batch:
    """Return a batch of zeros without optional fields."""
    arrays = {}
    for field in fields(Batch):
        is_optional = field.default is not MISSING
        if not is_optional:
            dtype = np.int32 if field.name in INTEGER_FIELDS else np.float32
            arrays[field.name] = np.zeros(shape, dtype)
    return Batch(**arrays)
