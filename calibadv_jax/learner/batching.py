"""Samples, their plan in rows of a few widths, packed rows, rows with shared prefixes, microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from calibadv_jax.config import Aggregation

Arrays = Sequence[np.ndarray]  # of each sample, or of each batch

WIDTHS = (Fraction(1), Fraction(1, 2), Fraction(3, 4), Fraction(1, 4), Fraction(3, 8))  # most useful first
MIN_SAVING = 0.01  # share of the cost that another width must save: it takes a compilation
FEW_SAMPLES = 32  # of which a microbatch is a large share: more packings are tried
RANDOM_ORDERS = 32  # of up to FEW_SAMPLES, besides that by length
MAX_PLACEMENTS = 3_000  # for one choice of widths, over all packings


@dataclass(frozen=True)
class Sample:
    """One sequence to train on. Prompt and response together; the prompt is never trained."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], True where the token is trained
    advantages: np.ndarray  # float32 [T]
    logprobs: np.ndarray  # float32 [T], from the sampler; 0 where not sampled
    old_logprobs: np.ndarray | None = None  # float32 [T], the ratio's denominator; None: the sampler's
    prompt: int | None = None  # tokens that a question's samples share; None: those before the first trained

    @property
    def denominator(self) -> np.ndarray:
        """The log-probabilities below the ratio, float32 [T]."""
        return self.logprobs if self.old_logprobs is None else self.old_logprobs

    @property
    def prompt_ids(self) -> np.ndarray:
        """The tokens that all samples of its question begin with, int32 [P]."""
        if self.prompt is not None:
            return self.tokens[: self.prompt]
        return self.tokens[: int(np.argmax(self.mask))] if self.mask.any() else self.tokens


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    """Packed rows. Column t describes the token that *follows* it, so device code never shifts.

    Shapes [R, L]. The mask is owned here: a column with weight 0 has no influence on the loss. Where samples
    share computed tokens (`PrefixSharedRows`), only `tokens`, `positions` and `ends` are of the computed
    columns.
    """

    tokens: Any  # int32, input
    positions: Any  # int32, restart in every segment
    segment_ids: Any  # int32, a sample's columns; 0 = padding
    targets: Any  # int32, the next token of the segment
    weights: Any  # float32, of this token in the loss; those of a mean sum to 1 over the mini-batch
    advantages: Any  # float32
    sampler_logprobs: Any  # float32, of the targets
    old_logprobs: Any  # float32, of the targets; the ratio's denominator
    factors: Any = None  # float32, of the targets, of the loss's `BatchFactor`; None: it has none
    ends: Any = None  # int32, the first column that does not see this one; None: the end of its segment
    sources: Any = None  # int32, the computed column that predicts the target; None: the same one


def token_weights(
    samples: Sequence[Sample], aggregation: Aggregation, length_norm: int = 1
) -> list[np.ndarray]:
    """Return the weight of each token's term, float32 [T] a sample; those of a mean sum to 1."""
    counts = np.array([sample.mask.sum() for sample in samples], int)
    trained = int(np.count_nonzero(counts))
    divisors = {
        "token_mean": counts.sum(),
        "sequence_mean": trained * counts,
        "sequence_sum": trained,
        "sequence_sum_norm": trained * length_norm,
    }[aggregation]
    shares = (1.0 / np.maximum(1, divisors) * (counts > 0)).astype(np.float32)
    return [sample.mask * share for sample, share in zip(samples, shares, strict=True)]


def content_of(samples: Sequence[Sample]) -> str:
    content = hashlib.sha256()
    for sample in samples:
        for array in (sample.tokens, sample.mask, sample.advantages, sample.logprobs):
            content.update(array.tobytes())
    return content.hexdigest()


# --- The plan: places of samples in rows ---


@dataclass(frozen=True)
class Placement:
    row: int
    start: int
    length: int
    segment: int  # its number in the row, from 1
    batch: int = 0  # of several, each with rows of another width


@dataclass(frozen=True)
class RowShape:
    length: int  # tokens of a row
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
        """The computed positions of each shape, empty rows of a microbatch included."""
        pairs = zip(self.num_rows, self.shapes, strict=True)
        return [-(-rows // shape.rows) * shape.rows * shape.length for rows, shape in pairs]

    @property
    def cost(self) -> float:
        return sum(n * shape.cost for n, shape in zip(self.positions, self.shapes, strict=True))


def rows_at(length: int, rows: int, pack_length: int) -> int:
    """Return the rows of `length` in a microbatch with at most the tokens of `rows` of `pack_length`."""
    return rows * max(1, pack_length // length)


def row_shapes(pack_length: int, rows: int, count: int, cost: Callable[[int], float]) -> list[RowShape]:
    """Return the `count` most useful widths, widest first; `rows` are a microbatch's of the widest."""
    widths = sorted({int(pack_length * share) for share in WIDTHS[:count]} - {0}, reverse=True)
    return [RowShape(width, rows_at(width, rows, pack_length), cost(width)) for width in widths]


def plan(lengths: Sequence[int], shapes: Sequence[RowShape]) -> Plan:
    """Return the cheapest of several first-fit decreasing packings into rows of some `shapes`, widest first.

    Attention computes more for a token in a wide row than in a narrow one, but a long sample needs a wide
    row. Long samples open rows of the narrowest chosen width that holds them; the space left there, and in
    the empty rows of the last microbatch, is offered to shorter samples. ValueError if a sample is longer
    than a row.
    """
    longest, widest = max(lengths, default=0), shapes[0].length
    if longest > widest:
        raise ValueError(f"sample {lengths.index(longest)} has {longest} tokens, but a row holds {widest}")
    plans = (
        _packing(lengths, order, chosen, num_extra)
        for order in _orders(lengths, len(shapes))
        for count in range(1, len(shapes) + 1)
        for chosen in combinations(shapes, count)
        if chosen[0].length >= longest
        for num_extra in _extra_microbatches(lengths, chosen)
    )
    return min(plans, key=lambda candidate: candidate.cost * (1.0 + MIN_SAVING * len(candidate.shapes)))


def _extra_microbatches(lengths: Sequence[int], shapes: Sequence[RowShape]) -> list[int]:
    """Return the numbers of extra microbatches of the widest rows to try, up to enough for all samples."""
    most = sum(lengths) // (shapes[0].rows * shapes[0].length) if len(shapes) > 1 else 0
    num_tries = min(most + 1, max(1, MAX_PLACEMENTS // max(1, len(lengths))))
    return sorted({round(number) for number in np.linspace(0, most, num_tries)})


def _orders(lengths: Sequence[int], num_shapes: int) -> Iterator[list[int]]:
    """Yield the samples by falling length, then by lengths raised at random, up to their double."""
    yield np.argsort(-np.asarray(lengths, int), kind="stable").tolist()
    rng = np.random.default_rng(0)
    if 1 < len(lengths) <= FEW_SAMPLES and num_shapes > 1:
        for _ in range(RANDOM_ORDERS):
            raised = np.asarray(lengths) * rng.uniform(1.0, 2.0, len(lengths))
            yield np.argsort(-raised, kind="stable").tolist()


def _packing(lengths: Sequence[int], order: list[int], shapes: Sequence[RowShape], num_extra: int) -> Plan:
    """Lay samples in `order`, with `num_extra` microbatches of the widest rows beside those needed."""
    placements: dict[int, Placement] = {}
    used: list[RowShape] = []
    num_rows: list[int] = []
    narrower = [shape.length for shape in shapes[1:]] + [0]
    for shape, limit in zip(shapes, narrower, strict=True):
        unplaced = [index for index in order if index not in placements]
        too_long = [index for index in unplaced if lengths[index] > limit]  # for the next width
        num_extra_rows = 0 if used else num_extra * shape.rows
        if not too_long and not num_extra_rows and (limit or used):
            continue
        rows = _Bins(shape.length, len(unplaced) + num_extra_rows)
        placed = {index: rows.put(lengths[index], len(used), opens=True) for index in too_long}
        rows.count = -(-rows.count // shape.rows) * shape.rows + num_extra_rows
        placed |= {index: rows.put(lengths[index], len(used)) for index in unplaced if index not in placed}
        placements |= {index: place for index, place in placed.items() if place is not None}
        used.append(shape)
        num_rows.append(int(np.count_nonzero(rows.segments)))
    return Plan([placements[index] for index in range(len(lengths))], used, num_rows)


class _Bins:
    """Rows of one width that are filled from the left."""

    def __init__(self, length: int, most: int):
        self.length = length
        self.free = np.full(most, length)
        self.segments = np.zeros(most, np.int64)
        self.count = 0  # rows that may be used

    def put(self, length: int, batch: int, opens: bool = False) -> Placement | None:
        """Place a sample in the first row that has room, if need be in a new one; None: nowhere."""
        fits = self.free[: self.count] >= length
        row = int(np.argmax(fits)) if fits.any() else self.count
        if row == self.count:
            if not opens:
                return None
            self.count += 1
        start = self.length - int(self.free[row])
        self.free[row] -= length
        self.segments[row] += 1
        return Placement(row, start, length, int(self.segments[row]), batch)


# --- Packed rows ---


class Rows:
    """Samples laid end to end in packed rows of some `shapes`, widest first; errors as `plan`.

    Attributes:
        weights: float32 [T] of each sample; default: 0, for a pass that computes no loss.
        tokens: number of tokens of all samples.
        computed: number of columns with a token.
        positions: number of computed columns, empty rows of a microbatch included.
    """

    def __init__(self, samples: Sequence[Sample], shapes: Sequence[RowShape], weights: Arrays | None = None):
        zeros = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
        self.samples, self.weights = samples, zeros if weights is None else weights
        self.tokens = self.computed = sum(len(sample.tokens) for sample in samples)
        self.plan = self._planned(shapes)
        self.positions = sum(self.plan.positions)

    def batches(self, factors: Arrays | None = None) -> list[Batch]:
        """Return rows [R, L], a batch for each used width L; `factors`: float32 [T] of each sample."""
        widths = [shape.length for shape in self.plan.shapes]
        batches = [_empty(shape) for shape in zip(self.plan.num_rows, widths, strict=True)]
        self._lay(batches)
        if factors is not None:
            for batch in batches:
                batch.factors = np.zeros_like(batch.weights)
        for index, placement, columns, tokens in self._columns():
            batch, sample = batches[placement.batch], self.samples[index]
            place = placement.row, columns
            batch.targets[place] = sample.tokens[tokens]
            batch.advantages[place] = sample.advantages[tokens]
            batch.sampler_logprobs[place] = sample.logprobs[tokens]
            batch.old_logprobs[place] = sample.denominator[tokens]
            batch.weights[place] = self.weights[index][tokens]
            if factors is not None:
                batch.factors[place] = factors[index][tokens]
        return batches

    def by_sample(self, values: Arrays) -> list[np.ndarray]:
        """Return values [R, L] of each batch by sample, [T]: entry t belongs to token t, others are 0."""
        results = [np.zeros(len(sample.tokens), values[0].dtype) for sample in self.samples]
        for index, placement, columns, tokens in self._columns():
            results[index][tokens] = values[placement.batch][placement.row, columns]
        return results

    def _planned(self, shapes: Sequence[RowShape]) -> Plan:
        return plan([len(sample.tokens) for sample in self.samples], shapes)

    def _lay(self, batches: Sequence[Batch]) -> None:
        for sample, placement in zip(self.samples, self.plan.placements, strict=True):
            batch, start = batches[placement.batch], placement.start
            place = placement.row, slice(start, start + placement.length)
            batch.tokens[place] = sample.tokens
            batch.positions[place] = np.arange(placement.length)
            batch.segment_ids[place] = placement.segment

    def _columns(self) -> Iterator[tuple[int, Placement, slice, slice | np.ndarray]]:
        """Yield each sample's number and place, its columns of the loss, and the tokens that they are of."""
        for index, placement in enumerate(self.plan.placements):
            start, end = placement.start, placement.start + placement.length
            yield index, placement, slice(start, end - 1), slice(1, None)


def pack(
    samples: Sequence[Sample],
    pack_length: int,
    aggregation: Aggregation = "token_mean",
    weights: Arrays | None = None,
) -> Batch:
    """Pack samples into rows of `pack_length`; `weights` replace those of `aggregation`."""
    weights = weights or token_weights(samples, aggregation)
    return Rows(samples, [RowShape(pack_length, 1)], weights).batches()[0]


def microbatches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Cut [R, L] into batches [rows, L], at least one, the last one filled up with empty rows."""
    for start in range(0, max(1, len(batch.tokens)), rows):
        part = jax.tree.map(lambda array, start=start: array[start : start + rows], batch)
        padding = (0, rows - len(part.tokens)), (0, 0)
        yield jax.tree.map(lambda array, padding=padding: np.pad(array, padding), part)


def abstract_batch(shape: tuple[int, ...], sharding: NamedSharding, shares_prefixes: bool) -> Batch:
    """Return ShapeDtypeStructs of a batch, for compiling ahead of time."""
    batch = _empty((0, 0))
    if shares_prefixes:
        batch.ends = batch.sources = batch.tokens
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), batch)


def _empty(shape: tuple[int, int]) -> Batch:
    integers = {"tokens", "positions", "segment_ids", "targets"}
    names = [field.name for field in fields(Batch) if field.default is MISSING]
    return Batch(**{name: np.zeros(shape, np.int32 if name in integers else np.float32) for name in names})


# --- Shared prefixes ---


@dataclass(frozen=True)
class Tree:
    """A prefix tree of samples. Its nodes are numbered in depth-first order."""

    paths: dict[int, np.ndarray]  # int64 [T] of each sample, by its number: the node of each of its tokens
    tokens: np.ndarray  # int32 [N]
    positions: np.ndarray  # int32 [N], from the root
    ends: np.ndarray  # int32 [N], one past the last node below this one: the first that does not see it
    num_trained: int  # columns that the samples' trained tokens take


class PrefixSharedRows(Rows):
    """Packed rows in which tokens that several samples begin with are computed once.

    The trajectories of a group begin with one prompt, and often with one search and its documents. Each node
    of the tree of their tokens is computed once, in depth-first order, and sees its ancestors. The trained
    tokens of a sample stand in columns of its own beside the tree, each with the node whose state predicts
    it. Loss and gradient are those of `Rows`; only the order of sums differs. The common prefix of all
    samples stands once at the beginning of every row. `by_sample` returns the values of trained tokens.
    """

    def _planned(self, shapes: Sequence[RowShape]) -> Plan:
        if max((len(sample.tokens) for sample in self.samples), default=0) > shapes[0].length:
            return super()._planned(shapes)  # raises
        self.common = _shared_by_all(self.samples)
        self.trees = list(trees(self.samples, shapes[0].length, self.common))
        counts = [len(tree.tokens) - self.common for tree in self.trees]
        lengths = [max(count, tree.num_trained) for count, tree in zip(counts, self.trees, strict=True)]
        narrowed = [replace(shape, length=shape.length - self.common) for shape in shapes]
        packing = plan(lengths, [shape for shape in narrowed if shape.length > 0])
        self.computed = sum(packing.num_rows) * self.common + sum(counts)
        return replace(packing, shapes=[replace(s, length=s.length + self.common) for s in packing.shapes])

    def _lay(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            batch.sources, batch.ends = np.zeros_like(batch.tokens), np.zeros_like(batch.tokens)
        for tree, placement in zip(self.trees, self.plan.placements, strict=True):
            batch, row, start = batches[placement.batch], placement.row, placement.start
            prefix, branches = slice(self.common), slice(self.common, None)
            place = row, slice(self.common + start, len(tree.tokens) + start)
            batch.tokens[row, prefix], batch.tokens[place] = tree.tokens[prefix], tree.tokens[branches]
            batch.positions[row, prefix] = tree.positions[prefix]
            batch.positions[place] = tree.positions[branches]
            batch.ends[row, prefix], batch.ends[place] = batch.ends.shape[1], tree.ends[branches] + start
        paths = {index: path for tree in self.trees for index, path in tree.paths.items()}
        for index, placement, columns, trained in self._columns():
            batch, before = batches[placement.batch], paths[index][trained - 1]
            place = placement.row, columns
            batch.sources[place] = np.where(before < self.common, before, before + placement.start)
            batch.segment_ids[place] = index + 1

    def _columns(self) -> Iterator[tuple[int, Placement, slice, Any]]:
        for tree, placement in zip(self.trees, self.plan.placements, strict=True):
            start = placement.start
            for index in tree.paths:
                trained = _trained(self.samples[index])
                yield index, placement, slice(start, start + len(trained)), trained
                start += len(trained)


def trees(samples: Sequence[Sample], most: int, common: int) -> Iterator[Tree]:
    """Group samples by prompt, in trees of up to `most` nodes, and up to `most` - `common` trained tokens."""
    order = sorted(range(len(samples)), key=lambda index: samples[index].tokens.astype(">u4").tobytes())
    shared: dict[int, int] = {}  # of a tree: number of a sample -> tokens that it shares with the one before
    nodes = trained = 0
    last: Sample | None = None
    for index in order:
        sample, num_trained, num_shared = samples[index], len(_trained(samples[index])), 0
        if last is not None:
            num_shared = _common_prefix(last.tokens, sample.tokens)
            is_other_prompt = num_shared < min(len(last.prompt_ids), len(sample.prompt_ids))
            is_full = nodes + len(sample.tokens) - num_shared > most or trained + num_trained > most - common
            if is_other_prompt or is_full:
                yield _tree(samples, shared, trained)
                shared, nodes, trained, num_shared = {}, 0, 0, 0
        shared[index], last = num_shared, sample
        nodes += len(sample.tokens) - num_shared
        trained += num_trained
    if shared:
        yield _tree(samples, shared, trained)


def _tree(samples: Sequence[Sample], shared: dict[int, int], num_trained: int) -> Tree:
    """Make a tree of samples in the order of their tokens; `shared` counts tokens of the sample before."""
    paths: dict[int, np.ndarray] = {}
    last, count = np.zeros(0, np.int64), 0
    for index, num_shared in shared.items():
        start, count = count, count + len(samples[index].tokens) - num_shared
        paths[index] = last = np.concatenate([last[:num_shared], np.arange(start, count)])
    tokens, positions, ends = np.zeros((3, count), np.int32)
    for index, path in paths.items():
        tokens[path] = samples[index].tokens
        positions[path] = np.arange(len(path))
        ends[path] = path[-1] + 1  # of the last path through the node
    return Tree(paths, tokens, positions, ends, num_trained)


def _trained(sample: Sample) -> np.ndarray:
    """Return the numbers of the tokens with a column of the loss; the first token has none."""
    return np.flatnonzero(sample.mask[1:]) + 1


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _shared_by_all(samples: Sequence[Sample]) -> int:
    """Return how many tokens of their prompts all samples begin with; 0 where sharing them is no gain."""
    if len(samples) < 2:
        return 0
    shared = min(_common_prefix(samples[0].tokens, sample.tokens) for sample in samples)
    return min(shared, *(min(len(sample.prompt_ids), len(sample.tokens) - 1) for sample in samples))
