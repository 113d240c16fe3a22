"""Packing: every token at its place, weights that sum to one, few shapes."""

import dataclasses

import jax
import numpy as np
import pytest

from calibadv_jax.learner.batching import (
    Rows,
    RowShape,
    Sample,
    content_of,
    microbatches,
    pack,
    place,
    token_weights,
    weight_total,
)


def make(length, trained, start=0):
    mask = np.zeros(length, bool)
    mask[length - trained :] = True
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Sample(tokens, mask, tokens.astype(np.float32), -tokens.astype(np.float32))


def test_packed_samples_lie_at_their_placements():
    samples = [make(n, 2, 100 * i) for i, n in enumerate([5, 9, 3, 7, 4])]
    batch = pack(samples, 12)
    placements, rows = place([5, 9, 3, 7, 4], 12)
    assert batch.tokens.shape == (rows, 12) == (3, 12)
    for sample, at in zip(samples, placements, strict=True):
        here = slice(at.start, at.start + at.length)
        np.testing.assert_array_equal(batch.tokens[at.row, here], sample.tokens)
        np.testing.assert_array_equal(batch.positions[at.row, here], np.arange(at.length))
        assert len(set(batch.segment_ids[at.row, here])) == 1
        np.testing.assert_array_equal(batch.targets[at.row, here][:-1], sample.tokens[1:])
        assert batch.weights[at.row, at.start + at.length - 1] == 0  # nothing follows the last token


def test_no_two_samples_share_a_segment():
    batch = pack([make(3, 1), make(4, 1), make(5, 1)], 12)
    assert batch.tokens.shape[0] == 1
    assert sorted(set(batch.segment_ids[0].tolist())) == [1, 2, 3]


def test_token_mean_weights_every_trained_token_alike():
    weights = token_weights([make(5, 1), make(5, 3)], "token_mean")
    assert np.concatenate(weights)[np.concatenate(weights) > 0].tolist() == [0.25] * 4


def test_sequence_mean_weights_every_trained_trajectory_alike():
    weights = token_weights([make(5, 1), make(5, 4), make(5, 0)], "sequence_mean")
    np.testing.assert_allclose([w.sum() for w in weights], [0.5, 0.5, 0.0])


def test_rows_return_values_by_sample():
    samples = [make(n, 2, 10 * i) for i, n in enumerate([5, 9, 3])]
    rows = Rows(samples, [RowShape(12, 1)])
    (batch,) = rows.batches()
    assert not batch.weights.any() and rows.tokens == np.count_nonzero(batch.segment_ids) == 17
    assert rows.positions == batch.tokens.size == 24
    back = rows.taken([batch.sampler_logprobs])
    for sample, values in zip(samples, back, strict=True):
        np.testing.assert_array_equal(values[1:], sample.logprobs[1:])


def test_microbatches_keep_order_and_pad_the_end():
    batch = pack([make(10, 1, 100 * index) for index in range(5)], 10)
    split = list(microbatches(batch, 2))
    assert [part.tokens.shape for part in split] == [(2, 10)] * 3
    rows = np.concatenate([part.tokens for part in split])
    np.testing.assert_array_equal(rows[:5], batch.tokens)
    assert not any(leaf[1].any() for leaf in jax.tree.leaves(split[2]))
    assert sum(float(part.weights.sum()) for part in split) == pytest.approx(1.0)


def test_nothing_is_one_empty_microbatch():
    (part,) = microbatches(pack([], 10), 2)
    assert part.tokens.shape == (2, 10) and not any(leaf.any() for leaf in jax.tree.leaves(part))


def test_too_long_a_sample_is_refused():
    with pytest.raises(ValueError, match="sample 0 has 13 tokens, but a row holds 12"):
        pack([make(13, 1)], 12)


def test_sums_are_divided_by_trajectories_that_are_trained():
    samples = [make(5, 1), make(5, 4), make(5, 0)]
    for aggregation, each in (("sequence_sum", 1 / 2), ("sequence_sum_norm", 1 / 20)):
        weights = token_weights(samples, aggregation, length_norm=10)
        np.testing.assert_allclose([values.sum() for values in weights], [each, 4 * each, 0.0], rtol=1e-6)
        assert weight_total(weights, aggregation) == pytest.approx(5 * each)
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights(samples, aggregation)
        assert weight_total(weights, aggregation) == 1.0 == pytest.approx(sum(map(np.sum, weights)))


def test_old_logprobs_are_the_samplers_unless_recomputed():
    plain = make(5, 2)
    recomputed = dataclasses.replace(plain, old_logprobs=plain.logprobs - 1)
    for given, old in ((plain, plain.logprobs), (recomputed, plain.logprobs - 1)):
        batch = pack([given], 5)
        np.testing.assert_array_equal(batch.old_logprobs[0, :4], old[1:])
        np.testing.assert_array_equal(batch.sampler_logprobs[0, :4], plain.logprobs[1:])


@pytest.mark.parametrize("name", ["tokens", "mask", "advantages", "logprobs"])
def test_content_depends_on_every_array(name):
    samples = [make(5, 2), make(3, 1)]
    changed = getattr(samples[1], name).copy()
    changed[-1] = not changed[-1] if name == "mask" else changed[-1] + 1
    other = [samples[0], dataclasses.replace(samples[1], **{name: changed})]
    assert content_of(samples) == content_of([make(5, 2), make(3, 1)]) != content_of(other)
