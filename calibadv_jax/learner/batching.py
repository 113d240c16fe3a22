"""Trajectories laid end to end in rows, and the rows cut into microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import Aggregation
from calibadv_jax.learner.packing import RowShape, plan


@dataclass(frozen=True)
class Sample:
    """One sequence to train on. Prompt and response together; the prompt is never trained."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], True where the token is trained
    advantages: np.ndarray  # float32 [T]
    logprobs: np.ndarray  # float32 [T], from the sampler; 0 where not sampled
    old_logprobs: np.ndarray | None = None  # float32 [T], the ratio's denominator; None: the sampler's


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    """Packed rows. Column t describes the token that *follows* it, so device code never shifts.

    Shapes [R, L]. The mask is owned here: a column with weight 0 has no influence on the loss.
    """

    tokens: Any  # int32, input
    positions: Any  # int32, restart in every segment
    segment_ids: Any  # int32, 0 = padding
    targets: Any  # int32, the next token of the segment
    weights: Any  # float32, of this token in the loss; those of a mean sum to 1 over the mini-batch
    advantages: Any  # float32
    sampler_logprobs: Any  # float32, of the targets
    old_logprobs: Any  # float32, of the targets; the ratio's denominator
    factors: Any = None  # float32, of the targets, from the loss's look at the mini-batch; None: it has none


def token_weights(
    samples: Sequence[Sample], aggregation: Aggregation, length_norm: int = 1
) -> list[np.ndarray]:
    """float32 [T] for each sample: what a token's term is multiplied with.

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
    """What `token_weights` come to: 1 for the means."""
    if aggregation in ("token_mean", "sequence_mean"):
        return 1.0
    return float(sum(one.sum() for one in weights))


def content_of(samples: Sequence[Sample]) -> str:
    """A hash of all that they hold."""
    found = hashlib.sha256()
    for sample in samples:
        for array in (sample.tokens, sample.mask, sample.advantages, sample.logprobs):
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


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
        self.plan = plan([len(sample.tokens) for sample in samples], shapes)

    @property
    def tokens(self) -> int:
        """Columns that hold a token."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def positions(self) -> int:
        """Columns that are computed, those of empty rows of a microbatch included."""
        return sum(self.plan.positions)

    def batches(self, factors: Sequence[np.ndarray] | None = None) -> list[Batch]:
        """The rows [R, L], a batch for each width L that is used.

        Args:
            factors: float32 [T] of each sample, for a loss that has a look at the mini-batch.
        """
        widths = [shape.length for shape in self.plan.shapes]
        batches = [_empty(shape) for shape in zip(self.plan.num_rows, widths, strict=True)]
        for batch in batches if factors is not None else ():
            batch.factors = np.zeros_like(batch.weights)
        for index, (sample, at) in enumerate(zip(self.samples, self.plan.placements, strict=True)):
            batch = batches[at.batch]
            here = slice(at.start, at.start + at.length)
            before = slice(at.start, at.start + at.length - 1)
            batch.tokens[at.row, here] = sample.tokens
            batch.positions[at.row, here] = np.arange(at.length)
            batch.segment_ids[at.row, here] = at.segment
            batch.targets[at.row, before] = sample.tokens[1:]
            batch.advantages[at.row, before] = sample.advantages[1:]
            batch.sampler_logprobs[at.row, before] = sample.logprobs[1:]
            old = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
            batch.old_logprobs[at.row, before] = old[1:]
            batch.weights[at.row, before] = self.weights[index][1:]
            if factors is not None:
                batch.factors[at.row, before] = factors[index][1:]
        return batches

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


def abstract_batch(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Batch:
    """ShapeDtypeStructs of a batch, for compiling ahead of time."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), _empty((0, 0)))


def _empty(shape: tuple[int, int]) -> Batch:
    integers = {"tokens", "positions", "segment_ids", "targets"}
    names = [field.name for field in fields(Batch) if field.name != "factors"]
    return Batch(**{name: np.zeros(shape, np.int32 if name in integers else np.float32) for name in names})
