"""Samples that share what they begin with: their tree; loss and gradient stay those of plain rows."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import close_in_norm
from tiny_policy import GROUPED, mesh_of, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Rows, RowShape, Sample, token_weights
from calibadv_jax.learner.critic import CriticLearner, ValueLoss, learn_values, make_critic
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.prefix_sharing import PrefixSharedRows
from calibadv_jax.learner.step import learn, sample_logprobs

VOCAB, ROW = 40, 48
CONFIG = LearnerConfig(pack_length=ROW, row_widths=1, microbatch_rows=1)
SHARED = dataclasses.replace(CONFIG, share_prefixes=True)


def sample(rng, tokens, prompt, trained=0.6):
    mask = rng.random(len(tokens)) < trained
    mask[:prompt], mask[-1] = False, True
    advantages = rng.normal(size=len(tokens)).astype(np.float32) * mask
    logprobs = -rng.random(len(tokens)).astype(np.float32) * mask
    return Sample(np.asarray(tokens, np.int32), mask, advantages, logprobs, prompt=prompt)


def groups(seed=0, questions=4, size=5):
    """Trajectories as a group's are: one instruction, a prompt for each question, branches where they differ.

    Some are the same, and some are the beginning of another.
    """
    rng = np.random.default_rng(seed)

    def new(most):
        return rng.integers(1, VOCAB, int(rng.integers(1, most))).tolist()

    instruction, made = new(6), []
    for _ in range(questions):
        prompt = instruction + new(6)
        texts = [prompt + new(9)]
        for _ in range(size - 1):
            start = texts[int(rng.integers(len(texts)))]
            length = int(rng.integers(len(prompt), len(start) + 1))
            texts.append((start[:length] + new(9))[: ROW - 8])
        made += [sample(rng, text, len(prompt)) for text in [*texts, texts[0]]]
    return made


def learner_of(attention_chunk=16, **mesh):
    """The default chunk makes three blocks of attention of a row."""
    config = GROUPED | {"vocab_size": VOCAB, "tie_word_embeddings": False}
    options, policy = LearnerOptions(mesh.get("fsdp", 1)), tiny(config, attention_chunk=attention_chunk)
    return Learner(policy, optax.sgd(1.0), mesh_of(8 if mesh else 1, **mesh), options)


def stepped(learner, samples, config, loss):
    state = learner.init(init_params(learner.policy, learner.mesh, 0))
    before = jax.device_get(state["params"])
    result = learn(learner, state, samples, config, loss, np.random.default_rng(0))
    return jax.tree.map(np.subtract, before, jax.device_get(result.state["params"])), result


@pytest.mark.parametrize(
    ("name", "attention_chunk", "sizes"),
    [
        ("vanilla", 16, {}),
        pytest.param("vanilla", ROW, {}, marks=pytest.mark.medium),
        pytest.param("gspo", 16, {}, marks=pytest.mark.medium),
        pytest.param("lld", 16, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.medium),
        pytest.param("clip_cov", 16, {}, marks=pytest.mark.medium),
    ],
)
def test_shared_rows_make_the_step_of_plain_rows(name, attention_chunk, sizes):
    """Losses over sequences, with batch factors, and log-probabilities before the step; on a mesh, too."""
    learner, samples = learner_of(attention_chunk), groups()
    chosen = LossConfig(name=name, aggregation="sequence_mean", entropy_coef=0.01, importance_cap=2.0)
    loss = policy_gradient(chosen, on_policy=False)
    plain, expected = stepped(learner, samples, CONFIG, loss)
    shared, shared_result = stepped(learner_of(attention_chunk, **sizes), samples, SHARED, loss)
    close_in_norm(shared, plain)
    for metric, value in expected.metrics.items():
        if metric not in ("perf/packing", "actor/row_fill"):
            assert shared_result.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert shared_result.metrics["perf/packing"] < 0.7 * expected.metrics["perf/packing"]
    for sample, other in zip(shared_result.samples, expected.samples, strict=True):
        np.testing.assert_allclose(sample.old_logprobs, other.old_logprobs, atol=1e-5)


@pytest.mark.parametrize("widths", [[ROW], [ROW, ROW // 2]])
def test_shared_rows_compute_fewer_columns(widths):
    samples = groups()
    shapes = [RowShape(width, 1, cost=width) for width in widths]
    rows, plain = PrefixSharedRows(samples, shapes), Rows(samples, shapes)
    assert rows.positions < 0.7 * plain.positions
    assert rows.computed < rows.tokens
    targets = rows.unpack([batch.targets for batch in rows.batches()])
    for trained, values in zip(samples, targets, strict=True):
        np.testing.assert_array_equal(values, np.where(trained.mask, trained.tokens, 0))


def test_shared_rows_have_logprobs_of_trained_tokens_only():
    learner, samples = learner_of(), groups()
    # Three samples of one whole row, of which a column is left beside what all begin with.
    full = [sample(np.random.default_rng(1), list(range(ROW)), ROW - 1)] * 3
    params = learner.init(init_params(learner.policy, learner.mesh, 0))["params"]
    for chosen in (samples, full):
        plain, shared = (sample_logprobs(learner, params, chosen, config) for config in (CONFIG, SHARED))
        for trained, values, shared_values in zip(chosen, plain, shared, strict=True):
            np.testing.assert_allclose(shared_values, np.where(trained.mask, values, 0.0), atol=1e-5)


@pytest.mark.medium
def test_critic_learns_the_same_from_shared_rows():
    policy, mesh = make_critic(learner_of().policy), single_device()
    learner, states = CriticLearner(policy, optax.sgd(1.0), mesh, LearnerOptions(2)), []
    samples = [dataclasses.replace(sample, old_logprobs=sample.logprobs) for sample in groups()]
    for config in (CONFIG, SHARED):
        state = learner.init(init_params(policy, mesh, 0))
        state, _ = learn_values(learner, state, samples, config, ValueLoss(0.5), np.random.default_rng(0))
        states.append(jax.device_get(state["params"]))
    close_in_norm(*states)


def test_no_sample_and_a_too_long_sample():
    rows = PrefixSharedRows([], [RowShape(ROW, 1)])
    assert rows.computed == rows.tokens == rows.positions == 0
    assert [batch.sources.shape for batch in rows.batches()] == [(0, ROW)]
    samples = [sample(np.random.default_rng(0), list(range(length)), 2) for length in (9, ROW + 1)]
    with pytest.raises(ValueError, match=f"sample 1 has {ROW + 1} tokens, but a row holds {ROW}"):
        PrefixSharedRows(samples, [RowShape(ROW, 1)])


def test_row_filled_by_the_common_prefix():
    """One column is left in it: a tree for each sample."""
    samples = [sample(np.random.default_rng(1), list(range(1, ROW + 1)), ROW - 1)] * 3
    assert assert_each_sees_its_beginning(samples, ROW).plan.num_rows == [3]


def test_kernel_without_sharing_is_refused():
    splash = tiny(GROUPED | {"vocab_size": VOCAB}, kernel="splash")
    with pytest.raises(UserError, match="policy.attention is splash, .* set it to xla or cudnn"):
        LearnerOptions(1, shares_prefixes=True).check(splash, single_device())


def assert_each_sees_its_beginning(samples, *widths):
    weights = token_weights(samples, "sequence_mean")
    shapes = [RowShape(width, 1, cost=width) for width in widths]
    rows, plain = PrefixSharedRows(samples, shapes, weights), Rows(samples, shapes)
    batches = rows.batches()
    held = sum(int(np.count_nonzero(batch.tokens)) for batch in batches)  # no token of the samples is 0
    assert rows.computed == held <= rows.tokens == plain.tokens == plain.computed
    codes = [  # of a column: its batch, its row, and the column whose state predicts its target
        (number * 1000 + np.arange(len(batch.sources))[:, None]) * 1000 + batch.sources
        for number, batch in enumerate(batches)
    ]
    arrays = codes, [batch.weights for batch in batches], [batch.sampler_logprobs for batch in batches]
    columns = map(rows.unpack, arrays)
    for trained, weight, code, values, logprobs in zip(samples, weights, *columns, strict=True):
        np.testing.assert_array_equal(values, weight)
        np.testing.assert_array_equal(logprobs, trained.logprobs)
        for token in np.flatnonzero(trained.mask):
            place, column = divmod(int(code[token]), 1000)
            batch, row = batches[place // 1000], place % 1000
            seen = np.flatnonzero(batch.ends[row, : column + 1] > column)
            np.testing.assert_array_equal(batch.tokens[row, seen], trained.tokens[:token])
            np.testing.assert_array_equal(batch.positions[row, seen], np.arange(token))
    trained = sum(np.count_nonzero(sample.mask[1:]) for sample in samples)
    assert sum(np.count_nonzero(batch.weights) for batch in batches) == trained
    for tree in rows.trees:  # computes no prefix twice
        texts = [samples[index].tokens for index in tree.paths]
        assert len(tree.tokens) == len({text[: n + 1].tobytes() for text in texts for n in range(len(text))})
    return rows


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([[ROW], [ROW, ROW // 2], [3 * ROW]]))
@settings(max_examples=20, deadline=None)
def test_trained_tokens_see_their_own_beginning(seed, questions, widths):
    """Whatever lies beside them in the row."""
    assert_each_sees_its_beginning(groups(seed, questions), *widths)


def test_first_trained_token_follows_what_all_begin_with():
    """Three trees of one prompt: the last one lies behind the first one in its row."""
    rng, branches = np.random.default_rng(0), ((3, 40), (4, 44), (5, 5))
    samples = [sample(rng, [1, 2, *[branch] * count], 2, trained=1.0) for branch, count in branches]
    rows = assert_each_sees_its_beginning(samples, ROW)
    assert rows.common == 2 and [place.start for place in rows.plan.placements] == [0, 0, 40]
