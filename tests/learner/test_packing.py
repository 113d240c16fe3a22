"""Rows of several widths: every sample at its own place, nothing cheaper overlooked, few widths."""

import itertools

import numpy as np
import pytest

from calibadv_jax.learner import batching
from calibadv_jax.learner.batching import (
    Rows,
    RowShape,
    Sample,
    pack,
    place,
    plan,
    row_shapes,
    row_widths,
    rows_at,
    token_weights,
)


def shapes(*widths, rows=2, cost=lambda width: 1.0):
    return [RowShape(width, rows_at(width, rows, widths[0]), cost(width)) for width in widths]


def random_lengths(seed, count=40, longest=64):
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


def test_widths_are_shares_of_the_row_length():
    assert row_widths(16384, 1) == [16384]
    assert row_widths(16384, 2) == [16384, 8192]
    assert row_widths(16384, 3) == [16384, 12288, 8192]
    assert row_widths(384, 5) == [384, 288, 192, 144, 96]
    assert row_widths(1, 5) == [1]


def test_narrow_microbatch_has_no_more_tokens():
    assert [rows_at(width, 8, 16384) for width in row_widths(16384, 5)] == [8, 8, 16, 16, 32]
    assert rows_at(20000, 8, 16384) == rows_at(7, 8, 0) == 8


@pytest.mark.parametrize("seed", range(5))
def test_no_two_samples_share_a_column(seed):
    lengths = random_lengths(seed)
    packing = plan(lengths, shapes(64, 48, 32, cost=lambda width: 100 + width))
    sizes = zip(packing.num_rows, packing.shapes, strict=True)
    taken_columns = [np.zeros((n, shape.length), int) for n, shape in sizes]
    segments = set()
    for length, at in zip(lengths, packing.placements, strict=True):
        assert at.length == length and at.start + length <= packing.shapes[at.batch].length
        taken_columns[at.batch][at.row, at.start : at.start + length] += 1
        segments.add((at.batch, at.row, at.segment))
    assert all(columns.max() == 1 and columns[:, 0].all() for columns in taken_columns)
    assert len(segments) == len(lengths)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slope", [0.0, 0.01, 0.1])
def test_extra_width_must_be_worth_its_compilation(seed, slope):
    lengths = random_lengths(seed)

    def cost(width):
        return 1.0 + slope * width

    every = shapes(64, 48, 32, cost=cost)
    packing = plan(lengths, every)
    alone = [plan(lengths, [shape]) for shape in every if shape.length >= max(lengths)]
    assert packing.cost <= min(single.cost for single in alone) + 1e-9
    if len(packing.shapes) > 1:
        assert packing.cost < 0.99 * min(single.cost for single in alone)


def test_short_samples_take_narrow_rows():
    lengths = [64, *[16] * 40]
    narrow = plan(lengths, shapes(64, 16, cost=lambda width: 1.0 + width))
    assert [shape.length for shape in narrow.shapes] == [64, 16]
    # The long one needs a row; the empty row of its microbatch takes four of the others.
    assert narrow.num_rows == [2, 36] and narrow.positions == [2 * 64, 40 * 16]
    flat = plan(lengths, shapes(64, 16))
    assert [shape.length for shape in flat.shapes] == [64] and flat.positions == [12 * 64]


def test_long_sample_leaves_others_in_narrow_rows():
    lengths = [40, *[16] * 16]
    packing = plan(lengths, shapes(64, 48, 16, rows=1, cost=lambda width: 1.0 + width))
    assert [shape.length for shape in packing.shapes] == [48, 16]
    assert [at.batch for at in packing.placements] == [0, *[1] * 16]


def test_one_width_is_first_fit_decreasing():
    placements, num_rows = place([5, 9, 3, 7, 4], 12)
    assert num_rows == 3
    assert [(at.row, at.start, at.segment) for at in placements] == [
        (1, 7, 2),
        (0, 0, 1),
        (0, 9, 2),
        (1, 0, 1),
        (2, 0, 1),
    ]


def test_nothing_takes_no_rows():
    packing = plan([], shapes(64, 32))
    assert packing.placements == [] and packing.num_rows == [0] and packing.positions == [0]
    assert packing.shapes[0].length == 64


def test_too_long_a_sample_is_named():
    with pytest.raises(ValueError, match="sample 1 has 65 tokens, but a row holds 64"):
        plan([3, 65], shapes(64, 32))


def test_rows_of_two_widths_return_samples():
    rng = np.random.default_rng(0)
    samples = []
    for length in (30, 12, 9, 16, 3):
        mask = np.arange(length) > 1
        tokens = rng.integers(0, 99, length).astype(np.int32)
        samples.append(Sample(tokens, mask, rng.normal(size=length).astype(np.float32), -tokens / 7 * mask))
    weights = token_weights(samples, "token_mean")
    rows = Rows(samples, shapes(32, 16, rows=1, cost=lambda w: w**2), weights)
    batches = rows.batches()
    widths = [shape.length for shape in rows.plan.shapes]
    assert len(widths) == 2
    assert [batch.tokens.shape for batch in batches] == list(zip(rows.plan.num_rows, widths, strict=True))
    for field in ("tokens", "weights", "advantages", "sampler_logprobs"):
        pairs = zip(samples, weights, strict=True)
        apart = [pack([sample], 32, weights=[weight]) for sample, weight in pairs]
        kept = itertools.chain(*(getattr(batch, field)[batch.segment_ids > 0] for batch in batches))
        expected = itertools.chain(*(getattr(batch, field)[batch.segment_ids > 0] for batch in apart))
        assert sorted(kept) == sorted(expected)
    back = rows.taken([batch.sampler_logprobs for batch in batches])
    for sample, values in zip(samples, back, strict=True):
        np.testing.assert_allclose(values[1:], sample.logprobs[1:], rtol=1e-6)


def test_remaining_samples_take_a_narrower_row():
    lengths = [40] * 17 + [24] * 17 + [30]  # none needs a row of 64; more than are tried in other orders
    packing = plan(lengths, shapes(64, 48, rows=1))
    assert packing.num_rows == [17, 1] and packing.positions == [17 * 64, 48]
    assert plan([40, 40, 30], shapes(64, 48, rows=2)).positions == [4 * 48]


def test_few_samples_are_laid_in_other_orders_too():
    lengths = [431, 369, 587, 425, 290, 496, 874, 706, 262, 187, 275, 410]
    packing = plan(lengths, shapes(1024, 768, 512))
    assert packing.positions == [4 * 1024, 2 * 768]  # in falling order they take six wide rows
    assert packing == plan(lengths, shapes(1024, 768, 512))
    alone = plan(lengths, shapes(1024))
    assert [at.row for at in alone.placements][6:8] == [0, 1] and alone.num_rows == [6]


def test_many_samples_are_laid_in_few_ways(monkeypatch):
    """2,560 trajectories a step took five seconds of planning; each way of laying takes 30 ms."""
    laid, real = [], batching._laid
    monkeypatch.setattr(batching, "_laid", lambda *a: laid.append(1) or real(*a))
    lengths = np.random.default_rng(0).integers(100, 16_384, 2_560).tolist()
    shapes = row_shapes(16_384, 8, 3, lambda width: 1.0 + width / 65_536)
    packing = plan(lengths, shapes)
    assert len(laid) <= 7  # choices of three widths, one way each
    assert packing.cost <= plan(lengths, shapes[:1]).cost
