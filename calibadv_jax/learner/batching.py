"""Trajectories laid end to end in rows, and the rows cut into microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import Aggregation
from calibadv_jax.learner.packing import Plan, RowShape, plan


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
    def prompt_ids(self) -> np.ndarray:
        """int32 [P]: the tokens that all samples of its question begin with."""
        if self.prompt is not None:
            return self.tokens[: self.prompt]
        return self.tokens[: int(np.argmax(self.mask))] if self.mask.any() else self.tokens


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    """Packed rows. Column t describes the token that *follows* it, so device code never shifts.

    Shapes [R, L]. The mask is owned here: a column with weight 0 has no influence on the loss. Where samples
    share computed tokens (`sharing`), only `tokens`, `positions` and `ends` are of the computed columns.
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
    """Return the weight of each token's term, float32 [T] for each sample.

    Samples without a trained token count nowhere. The weights of a mean sum to 1.

    Args:
        length_norm: tokens by which ``sequence_sum_norm`` divides.
    """
    counts = [int(sample.mask.sum()) for sample in samples]
    trained = sum(count > 0 for count in counts)
    divisors = {
        "token_mean": lambda count: sum(counts),
        "sequence_mean": lambda count: trained * count,
        "sequence_sum": lambda count: trained,
        "sequence_sum_norm": lambda count: trained * length_norm,
    }
    return [
        sample.mask.astype(np.float32) * np.float32(1.0 / divisors[aggregation](count) if count else 0.0)
        for sample, count in zip(samples, counts, strict=True)
    ]


def weight_total(weights: Sequence[np.ndarray], aggregation: Aggregation) -> float:
    """Return the sum of `token_weights`: 1 for the means."""
    if aggregation in ("token_mean", "sequence_mean"):
        return 1.0
    return float(sum(values.sum() for values in weights))


def content_of(samples: Sequence[Sample]) -> str:
    """Return a hash of the samples' arrays."""
    content = hashlib.sha256()
    for sample in samples:
        for array in (sample.tokens, sample.mask, sample.advantages, sample.logprobs):
            content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


class Rows:
    """Samples laid end to end in packed rows: the way there, and back.

    Args:
        shapes: of the rows that may be used, widest first.
        weights: float32 [T] of each sample; default: 0, for a pass that computes no loss.

    Raises:
        ValueError: a sample is longer than a row.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        shapes: Sequence[RowShape],
        weights: Sequence[np.ndarray] | None = None,
    ):
        nothing = (np.zeros(len(sample.tokens), np.float32) for sample in samples)
        self.samples, self.weights = samples, list(nothing if weights is None else weights)
        self.plan = self._planned(shapes)

    def _planned(self, shapes: Sequence[RowShape]) -> Plan:
        return plan([len(sample.tokens) for sample in self.samples], shapes)

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def computed(self) -> int:
        """Columns that hold a token."""
        return self.tokens

    @property
    def positions(self) -> int:
        """Columns that are computed, those of empty rows of a microbatch included."""
        return sum(self.plan.positions)

    def batches(self, factors: Sequence[np.ndarray] | None = None) -> list[Batch]:
        """The rows [R, L], a batch for each width L that is used.

        Args:
            factors: float32 [T] of each sample, for a loss with a `BatchFactor`.
        """
        batches = self._empty(factors)
        for index, (sample, at) in enumerate(zip(self.samples, self.plan.placements, strict=True)):
            batch, here = batches[at.batch], slice(at.start, at.start + at.length)
            batch.tokens[at.row, here] = sample.tokens
            batch.positions[at.row, here] = np.arange(at.length)
            batch.segment_ids[at.row, here] = at.segment
            self._fill(batch, at.row, slice(here.start, here.stop - 1), index, slice(1, None), factors)
        return batches

    def _empty(self, factors: Sequence[np.ndarray] | None) -> list[Batch]:
        widths = [shape.length for shape in self.plan.shapes]
        batches = [_empty(shape) for shape in zip(self.plan.num_rows, widths, strict=True)]
        for batch in batches if factors is not None else ():
            batch.factors = np.zeros_like(batch.weights)
        return batches

    def _fill(
        self,
        batch: Batch,
        row: int,
        columns: slice,
        index: int,
        tokens: slice | np.ndarray,
        factors: Sequence[np.ndarray] | None,
    ) -> None:
        """Writes the loss's inputs of these tokens of a sample into these columns."""
        sample = self.samples[index]
        old = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
        batch.targets[row, columns] = sample.tokens[tokens]
        batch.advantages[row, columns] = sample.advantages[tokens]
        batch.sampler_logprobs[row, columns] = sample.logprobs[tokens]
        batch.old_logprobs[row, columns] = old[tokens]
        batch.weights[row, columns] = self.weights[index][tokens]
        if factors is not None:
            batch.factors[row, columns] = factors[index][tokens]

    def taken(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per-column values [R, L] of each batch, back as [T] a sample.

        Entry t belongs to token t, entry 0 is 0.
        """
        return [
            np.concatenate(
                [np.zeros(1, values[p.batch].dtype), values[p.batch][p.row, p.start : p.start + p.length - 1]]
            )
            for p in self.plan.placements
        ]


def pack(
    samples: Sequence[Sample],
    row_length: int,
    aggregation: Aggregation = "token_mean",
    weights: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Packs samples into as many rows of `row_length` as they need.

    Args:
        weights: per-token weights instead of those of `aggregation`.
    """
    weights = token_weights(samples, aggregation) if weights is None else weights
    return Rows(samples, [RowShape(row_length, 1)], weights).batches()[0]


def microbatches(batch: Batch, rows: int) -> Iterator[Batch]:
    """[R, L] -> batches [rows, L], the last one filled up with empty rows; at least one."""
    for start in range(0, max(1, len(batch.tokens)), rows):
        part = jax.tree.map(lambda array, at=start: array[at : at + rows], batch)
        padding = (0, rows - len(part.tokens)), (0, 0)
        yield jax.tree.map(lambda array, padding=padding: np.pad(array, padding), part)


def abstract_batch(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, shares_prefixes: bool = False
) -> Batch:
    """ShapeDtypeStructs of a batch, for compiling ahead of time."""
    batch = _empty((0, 0))
    if shares_prefixes:
        batch.ends = batch.sources = batch.tokens
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), batch)


def _empty(shape: tuple[int, int]) -> Batch:
    integers = {"tokens", "positions", "segment_ids", "targets"}
    names = [field.name for field in fields(Batch) if field.default is MISSING]
    return Batch(**{name: np.zeros(shape, np.int32 if name in integers else np.float32) for name in names})
