"""Packing: every token at its place, weights that sum to one, few shapes."""

import dataclasses

import jax
import numpy as np
import pytest

from calibadv_jax.learner import batching
from calibadv_jax.learner.batching import Rows, RowShape, Sample, pack, plan, token_weights


def make(length, trained, start=0):
    mask = np.zeros(length, bool)
    mask[length - trained :] = True
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Sample(tokens, mask, tokens.astype(np.float32), -tokens.astype(np.float32))


def test_microbatches_keep_order_and_pad_the_end():
    (empty,) = batching.microbatches(pack([], 10), 2)
    assert empty.tokens.shape == (2, 10) and not any(leaf.any() for leaf in jax.tree.leaves(empty))
    batch = pack([make(10, 1, 100 * index) for index in range(5)], 10)
    split = list(batching.microbatches(batch, 2))
    assert [part.tokens.shape for part in split] == [(2, 10)] * 3
    rows = np.concatenate([part.tokens for part in split])
    np.testing.assert_array_equal(rows[:5], batch.tokens)
    assert not any(leaf[1].any() for leaf in jax.tree.leaves(split[2]))
    assert sum(float(part.weights.sum()) for part in split) == pytest.approx(1.0)


def test_samples_lie_at_the_places_of_the_plan():
    lengths = [5, 9, 3, 7, 4]
    samples = [make(length, 2, 100 * number) for number, length in enumerate(lengths)]
    batch = pack(samples, 12)
    packing = plan(lengths, [RowShape(12, 1)])
    assert batch.tokens.shape == (packing.num_rows[0], 12) == (3, 12)
    for sample, placement in zip(samples, packing.placements, strict=True):
        columns = slice(placement.start, placement.start + placement.length)
        place = placement.row, columns
        np.testing.assert_array_equal(batch.tokens[place], sample.tokens)
        np.testing.assert_array_equal(batch.positions[place], np.arange(placement.length))
        assert set(batch.segment_ids[place]) == {placement.segment}
        np.testing.assert_array_equal(batch.targets[place][:-1], sample.tokens[1:])
        assert batch.weights[place][-1] == 0  # nothing follows the last token


def test_samples_of_one_row_are_segments_of_their_own():
    batch = pack([make(3, 1), make(4, 1), make(5, 1)], 12)
    assert batch.tokens.shape[0] == 1
    assert sorted(set(batch.segment_ids[0].tolist())) == [1, 2, 3]


def test_rows_without_weights_return_values_of_samples():
    samples = [make(length, 2, 10 * number) for number, length in enumerate([5, 9, 3])]
    rows = Rows(samples, [RowShape(12, 1)])
    (batch,) = rows.batches()
    assert not batch.weights.any()
    assert rows.tokens == np.count_nonzero(batch.segment_ids) == 17
    assert rows.positions == batch.tokens.size == 24
    for sample, values in zip(samples, rows.unpack([batch.sampler_logprobs]), strict=True):
        np.testing.assert_array_equal(values[1:], sample.logprobs[1:])


def test_pack_names_a_too_long_sample():
    with pytest.raises(ValueError, match="sample 0 has 13 tokens, but a row holds 12"):
        pack([make(13, 1)], 12)


@pytest.mark.parametrize("name", ["tokens", "mask", "advantages", "logprobs"])
def test_content_depends_on_every_array(name):
    samples = [make(5, 2), make(3, 1)]
    changed = getattr(samples[1], name).copy()
    changed[-1] = not changed[-1] if name == "mask" else changed[-1] + 1
    other = [samples[0], dataclasses.replace(samples[1], **{name: changed})]
    content = batching.content_hash(samples)
    assert content == batching.content_hash([make(5, 2), make(3, 1)]) != batching.content_hash(other)


@pytest.mark.parametrize(
    ("aggregation", "sums"),
    [
        ("token_mean", [1 / 5, 4 / 5, 0]),
        ("sequence_mean", [1 / 2, 1 / 2, 0]),
        ("sequence_sum", [1 / 2, 4 / 2, 0]),
        ("sequence_sum_norm", [1 / 20, 4 / 20, 0]),
    ],
)
def test_weights_of_trained_tokens_by_aggregation(aggregation, sums):
    """Alike within a sample; a sample without trained tokens counts nowhere."""
    samples = [make(5, 1), make(5, 4), make(5, 0)]
    weights = token_weights(samples, aggregation, length_norm=10)
    np.testing.assert_allclose([values.sum() for values in weights], sums, rtol=1e-6)
    assert all(len(set(values[sample.mask])) <= 1 for values, sample in zip(weights, samples, strict=True))
    assert not any(values[~sample.mask].any() for values, sample in zip(weights, samples, strict=True))
    assert not token_weights([make(5, 0)], aggregation, 1)[0].any()


FEW = [431, 369, 587, 425, 290, 496, 874, 706, 262, 187, 275, 410]


def shapes(*widths, rows=2, cost=lambda width: 1.0):
    return [RowShape(width, batching.rows_at(width, rows, widths[0]), cost(width)) for width in widths]


def random_lengths(seed, count=40, longest=64):
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


@pytest.mark.parametrize(
    ("length", "widths", "rows"),
    [
        (16384, [16384], [8]),
        (16384, [16384, 8192], [8, 16]),
        (16384, [16384, 12288, 8192], [8, 8, 16]),
        (16384, [16384, 12288, 8192, 6144, 4096], [8, 8, 16, 16, 32]),
        (384, [384, 288, 192, 144, 96], [8, 8, 16, 16, 32]),
        (1, [1], [8]),
    ],
)
def test_narrow_microbatch_has_no_more_tokens(length, widths, rows):
    expected = [RowShape(*shape, shape[0] + 1) for shape in zip(widths, rows, strict=True)]
    count = 5 if length == 1 else len(widths)
    assert batching.row_shapes(length, 8, count, lambda width: width + 1) == expected
    assert batching.rows_at(20000, 8, 16384) == batching.rows_at(7, 8, 0) == 8


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


@pytest.mark.parametrize(
    ("lengths", "widths", "rows", "slope", "num_rows", "positions"),
    [
        # The long one needs a row; the empty row of its microbatch takes four of the others.
        ([64, *[16] * 40], [64, 16], 2, 1, {64: 2, 16: 36}, [2 * 64, 40 * 16]),
        ([64, *[16] * 40], [64, 16], 2, 0, {64: 11}, [12 * 64]),
        ([40, *[16] * 16], [64, 48, 16], 1, 1, {48: 1, 16: 16}, [48, 16 * 16]),
        ([40] * 17 + [24] * 17 + [30], [64, 48], 1, 0, {64: 17, 48: 1}, [17 * 64, 48]),
        ([40, 40, 30], [64, 48], 2, 0, {48: 3}, [4 * 48]),
        # Laid in other orders, too: in falling order they take six wide rows.
        (FEW, [1024, 768, 512], 2, 0, {1024: 4, 768: 2}, [4 * 1024, 2 * 768]),
        (FEW, [1024], 2, 0, {1024: 6}, [6 * 1024]),
        ([], [64, 32], 2, 0, {64: 0}, [0]),
    ],
)
def test_cheapest_rows_are_chosen(lengths, widths, rows, slope, num_rows, positions):
    every = shapes(*widths, rows=rows, cost=lambda width: 1.0 + slope * width)
    packing = plan(lengths, every)
    used = [shape.length for shape in packing.shapes]
    assert dict(zip(used, packing.num_rows, strict=True)) == num_rows and packing.positions == positions
    assert packing == plan(lengths, every)


def test_one_width_is_packed_first_fit_decreasing():
    packing = plan([5, 9, 3, 7, 4], shapes(12))
    assert packing.num_rows == [3]
    placements = [(placement.row, placement.start, placement.segment) for placement in packing.placements]
    assert placements == [(1, 7, 2), (0, 0, 1), (0, 9, 2), (1, 0, 1), (2, 0, 1)]


def test_row_is_filled_to_its_last_token():
    assert plan([5, 3, 4, 4], shapes(8)).num_rows == [2]


def test_long_sample_leaves_the_others_in_narrow_rows():
    packing = plan([40, *[16] * 16], shapes(64, 48, 16, rows=1, cost=lambda width: 1.0 + width))
    assert [shape.length for shape in packing.shapes] == [48, 16]
    assert [placement.batch for placement in packing.placements] == [0, *[1] * 16]


def test_few_samples_of_one_width_are_laid_by_length_only():
    packing = plan(FEW, shapes(1024))
    assert [placement.row for placement in packing.placements][6:8] == [0, 1]


def test_no_sample_takes_no_rows():
    packing = plan([], shapes(64, 32))
    assert packing.placements == [] and packing.num_rows == [0] and packing.positions == [0]
    assert packing.shapes[0].length == 64


def test_too_long_a_sample_is_named():
    with pytest.raises(ValueError, match="sample 1 has 65 tokens, but a row holds 64"):
        plan([3, 65], shapes(64, 32))


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_several_widths_return_samples(seed):
    """No column of a sample is lost, or belongs to two."""
    samples = [make(length, length // 2, 100 * n) for n, length in enumerate(random_lengths(seed), 1)]
    weights = token_weights(samples, "token_mean")
    rows = Rows(samples, shapes(64, 48, 32, cost=lambda width: 100 + width), weights)
    batches, widths = rows.batches(), [shape.length for shape in rows.plan.shapes]
    sizes = zip(rows.plan.num_rows, widths, strict=True)
    assert len(widths) > 1 and [batch.tokens.shape for batch in batches] == list(sizes)
    for placement in rows.plan.placements:
        batch, columns = batches[placement.batch], slice(placement.start, placement.start + placement.length)
        np.testing.assert_array_equal(batch.positions[placement.row, columns], np.arange(placement.length))
        assert (batch.segment_ids[placement.row, columns] == placement.segment).all()
    places = {(placement.batch, placement.row, placement.segment) for placement in rows.plan.placements}
    assert len(places) == len(samples) and all(batch.segment_ids[:, 0].all() for batch in batches)
    fields = "targets", "advantages", "sampler_logprobs", "weights"
    columns = [rows.unpack([getattr(batch, field) for batch in batches]) for field in fields]
    for sample, weight, *values in zip(samples, weights, *columns, strict=True):
        arrays = sample.tokens, sample.advantages, sample.logprobs, weight
        for array, column in zip(arrays, values, strict=True):
            np.testing.assert_allclose(column, [0, *array[1:]], rtol=1e-6)
    tokens = np.concatenate([batch.tokens[batch.segment_ids > 0] for batch in batches])
    assert sorted(tokens) == sorted(np.concatenate([sample.tokens for sample in samples]))


def test_many_samples_are_laid_in_few_ways(monkeypatch):
    """2,560 trajectories a step took five seconds of planning; each way of laying takes 30 ms."""
    laid, real = [], batching._packing
    monkeypatch.setattr(batching, "_packing", lambda *a: laid.append(1) or real(*a))
    lengths = np.random.default_rng(0).integers(100, 16_384, 2_560).tolist()
    shapes = batching.row_shapes(16_384, 8, 3, lambda width: 1.0 + width / 65_536)
    packing = plan(lengths, shapes)
    assert len(laid) <= 7  # choices of three widths, one way each
    assert packing.cost <= plan(lengths, shapes[:1]).cost
