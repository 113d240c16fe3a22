"""Trajectories packed into rows of one fixed length, so that the update compiles once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import numpy as np


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

    Shapes [R, L], or [M, R, L] once split into microbatches. The mask is owned here: a column with
    weight 0 has no influence on the loss.
    """

    tokens: Any  # int32, input
    positions: Any  # int32, restart in every segment
    segment_ids: Any  # int32, 0 = padding
    targets: Any  # int32, the next token of the segment
    weights: Any  # float32, share of this token in the mean; they sum to 1 over the mini-batch
    advantages: Any  # float32
    sampler_logprobs: Any  # float32, of the targets
    old_logprobs: Any  # float32, of the targets; the ratio's denominator


@dataclass(frozen=True)
class Placement:
    """Where a sample lies in the rows."""

    row: int
    start: int
    length: int


def place(lengths: Sequence[int], row_length: int) -> tuple[list[Placement], int]:
    """First-fit decreasing bin packing. Returns a placement for each sample, and the number of rows.

    Raises:
        ValueError: a sample is longer than a row.
    """
    free: list[int] = []
    placements: list[Placement | None] = [None] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise ValueError(f"sample {index} has {length} tokens, but a row holds {row_length}")
        row = next((row for row, space in enumerate(free) if space >= length), len(free))
        if row == len(free):
            free.append(row_length)
        placements[index] = Placement(row, row_length - free[row], length)
        free[row] -= length
    return [placement for placement in placements if placement is not None], len(free)


def token_weights(
    samples: Sequence[Sample], aggregation: Literal["token_mean", "sequence_mean"]
) -> list[np.ndarray]:
    """float32 [T] for each sample; they sum to 1 over all samples that have a trained token."""
    counts = [int(sample.mask.sum()) for sample in samples]
    trained = sum(count > 0 for count in counts)
    weights = []
    for sample, count in zip(samples, counts, strict=True):
        scale = 1.0 / sum(counts) if aggregation == "token_mean" and count else 0.0
        if aggregation == "sequence_mean" and count:
            scale = 1.0 / (trained * count)
        weights.append(sample.mask.astype(np.float32) * np.float32(scale))
    return weights


def pack(
    samples: Sequence[Sample],
    row_length: int,
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean",
    weights: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Packs samples into as many rows of `row_length` as they need.

    Args:
        weights: per-token weights instead of those of `aggregation`.
    """
    placements, num_rows = place([len(sample.tokens) for sample in samples], row_length)
    batch = _empty((num_rows, row_length))
    if weights is None:
        weights = token_weights(samples, aggregation)
    next_segment = [1] * num_rows
    for sample, weight, at in zip(samples, weights, placements, strict=True):
        here = slice(at.start, at.start + at.length)
        before = slice(at.start, at.start + at.length - 1)
        batch.tokens[at.row, here] = sample.tokens
        batch.positions[at.row, here] = np.arange(at.length)
        batch.segment_ids[at.row, here] = next_segment[at.row]
        next_segment[at.row] += 1
        batch.targets[at.row, before] = sample.tokens[1:]
        batch.weights[at.row, before] = weight[1:]
        batch.advantages[at.row, before] = sample.advantages[1:]
        batch.sampler_logprobs[at.row, before] = sample.logprobs[1:]
        old = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
        batch.old_logprobs[at.row, before] = old[1:]
    return batch


def microbatches(batch: Batch, rows: int, at_least: int = 1) -> tuple[Batch, int]:
    """[R, L] -> [M, rows, L], and how many microbatches hold anything.

    M is the next power of two, or `at_least`, so that few different shapes are ever compiled; the update
    loops over the filled ones only.
    """
    num_rows, length = batch.tokens.shape
    filled = max(1, -(-num_rows // rows))
    total = max(at_least, 1 << (filled - 1).bit_length())
    padding = total * rows - num_rows

    def split(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, padding), (0, 0))).reshape(total, rows, length)

    return jax.tree.map(split, batch), filled


def unpack(values: np.ndarray, lengths: Sequence[int], row_length: int) -> list[np.ndarray]:
    """Per-column values [R, L] back to one array [T] a sample; entry t belongs to token t, entry 0 is 0."""
    placements, _ = place(lengths, row_length)
    return [
        np.concatenate([np.zeros(1, values.dtype), values[p.row, p.start : p.start + p.length - 1]])
        for p in placements
    ]


def abstract_batch(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Batch:
    """ShapeDtypeStructs of a batch, for compiling ahead of time."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), _empty((0, 0)))


def _empty(shape: tuple[int, int]) -> Batch:
    integers = {"tokens", "positions", "segment_ids", "targets"}
    return Batch(
        **{f.name: np.zeros(shape, np.int32 if f.name in integers else np.float32) for f in fields(Batch)}
    )
