"""Samples that share what they begin with: their tree; loss and gradient stay those of plain rows."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import close_in_norm
from tiny_policy import GROUPED, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig, MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Rows, RowShape, Sample, SharedRows, token_weights, trees
from calibadv_jax.learner.critic import CriticLearner, ValueLoss, critic_of, learn_values
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.learner.step import learn, sample_logprobs
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Policy

VOCAB, ROW = 40, 48
CONFIG = LearnerConfig(row_length=ROW, row_widths=1, microbatch_rows=1)
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
            kept = int(rng.integers(len(prompt), len(start) + 1))
            texts.append((start[:kept] + new(9))[: ROW - 8])
        texts.append(texts[0])
        made += [sample(rng, text, len(prompt)) for text in texts]
    return made


def policy_of(attention_chunk):
    config = GROUPED | {"vocab_size": VOCAB, "tie_word_embeddings": False}
    return tiny(config, attention_chunk=attention_chunk)


@pytest.fixture(scope="module")
def policy():
    """Rows are three blocks of its attention."""
    return policy_of(16)


def learner_of(policy, devices=1, **mesh):
    device_mesh = make_mesh(MeshConfig(**(mesh or {"fsdp": 1})), devices=jax.devices()[:devices])
    return Learner(policy, optax.sgd(1.0), device_mesh, LearnerOptions(mesh.get("fsdp", 1)))


def stepped(learner, samples, config, loss):
    state = learner.init(init_params(learner.policy, learner.mesh, 0))
    before = jax.device_get(state["params"])
    result = learn(learner, state, samples, config, loss, np.random.default_rng(0))
    after = jax.device_get(result.state["params"])
    return jax.tree.map(np.subtract, before, after), result


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(20, 60))
@settings(max_examples=60, deadline=None)
def test_tree_holds_every_sample_and_nothing_else(seed, questions, most):
    samples = [sample for sample in groups(seed, questions) if len(sample.tokens) <= most]
    forest = list(trees(samples, most, common=0))
    assert sorted(index for tree in forest for index in tree.samples) == list(range(len(samples)))
    for tree in forest:
        assert len(tree.tokens) <= most
        columns = np.arange(len(tree.tokens))
        sees = (columns[:, None] >= columns) & (columns[:, None] < tree.ends)
        prefixes = set()
        for index, path in zip(tree.samples, tree.paths, strict=True):
            tokens = samples[index].tokens
            np.testing.assert_array_equal(tree.tokens[path], tokens)
            np.testing.assert_array_equal(tree.positions[path], np.arange(len(tokens)))
            for position, node in enumerate(path):
                np.testing.assert_array_equal(np.flatnonzero(sees[node]), path[: position + 1])
            prefixes |= {tokens[: n + 1].tobytes() for n in range(len(tokens))}
        assert len(tree.tokens) == len(prefixes)


@pytest.mark.parametrize("widths", [[ROW], [ROW, ROW // 2]])
def test_shared_rows_return_values_by_sample(widths):
    samples = groups()
    rows = SharedRows(samples, [RowShape(width, 1, cost=width) for width in widths])
    batches = rows.batches()
    plain = Rows(samples, [RowShape(width, 1, cost=width) for width in widths])
    assert rows.positions < 0.7 * plain.positions
    held = sum(int(np.count_nonzero(batch.tokens)) for batch in batches)  # no token of the samples is 0
    assert rows.computed == held < rows.tokens == plain.tokens == plain.computed
    for sample, values in zip(
        samples, rows.taken([batch.sampler_logprobs for batch in batches]), strict=True
    ):
        np.testing.assert_array_equal(values, sample.logprobs)
    for sample, values in zip(samples, rows.taken([batch.targets for batch in batches]), strict=True):
        np.testing.assert_array_equal(values, np.where(sample.mask, sample.tokens, 0))


@pytest.mark.parametrize(
    ("name", "attention_chunk"),
    [
        ("vanilla", 16),
        pytest.param("vanilla", ROW, marks=pytest.mark.medium),
        pytest.param("gspo", 16, marks=pytest.mark.medium),
        pytest.param("lld", 16, marks=pytest.mark.medium),
        pytest.param("clip_cov", 16, marks=pytest.mark.medium),
    ],
)
def test_shared_rows_make_the_step_of_plain_rows(name, attention_chunk):
    """Losses over sequences, with batch factors, and log-probabilities before the step."""
    learner, samples = learner_of(policy_of(attention_chunk)), groups()
    chosen = LossConfig(name=name, aggregation="sequence_mean", entropy_coef=0.01, importance_cap=2.0)
    loss = policy_gradient(chosen, on_policy=False)
    plain, expected = stepped(learner, samples, CONFIG, loss)
    shared, shared_result = stepped(learner, samples, SHARED, loss)
    close_in_norm(shared, plain)
    for metric, value in expected.metrics.items():
        if metric not in ("perf/packing", "actor/row_fill"):
            assert shared_result.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert shared_result.metrics["perf/packing"] < 0.7 * expected.metrics["perf/packing"]
    for sample, other in zip(shared_result.samples, expected.samples, strict=True):
        np.testing.assert_allclose(sample.old_logprobs, other.old_logprobs, atol=1e-5)


@pytest.mark.medium
def test_eight_devices_equal_one(policy):
    loss = policy_gradient(LossConfig(), on_policy=False)
    alone, _ = stepped(learner_of(policy), groups(), SHARED, loss)
    spread, _ = stepped(learner_of(policy, 8, fsdp=4, tensor=2), groups(), SHARED, loss)
    close_in_norm(spread, alone)


def test_logprobs_of_trained_tokens_only(policy):
    learner, samples = learner_of(policy), groups()
    params = learner.init(init_params(policy, learner.mesh, 0))["params"]
    both = (sample_logprobs(learner, params, samples, config) for config in (CONFIG, SHARED))
    for sample, plain, shared in zip(samples, *both, strict=True):
        np.testing.assert_allclose(shared, np.where(sample.mask, plain, 0.0), atol=1e-5)


@pytest.mark.medium
def test_critic_learns_the_same_from_shared_rows(policy):
    mesh = single_device()
    learner = CriticLearner(critic_of(policy), optax.sgd(1.0), mesh, LearnerOptions(2))
    samples = [dataclasses.replace(sample, old_logprobs=sample.logprobs) for sample in groups()]
    states = []
    for config in (CONFIG, SHARED):
        state = learner.init(init_params(learner.policy, mesh, 0))
        state, _ = learn_values(learner, state, samples, config, ValueLoss(0.5), np.random.default_rng(0))
        states.append(jax.device_get(state["params"]))
    close_in_norm(*states)


def test_too_long_a_sample_is_named():
    samples = [sample(np.random.default_rng(0), list(range(length)), 2) for length in (9, ROW + 1)]
    with pytest.raises(ValueError, match=f"sample 1 has {ROW + 1} tokens, but a row holds {ROW}"):
        SharedRows(samples, [RowShape(ROW, 1)])


def test_nothing_takes_no_rows():
    rows = SharedRows([], [RowShape(ROW, 1)])
    assert rows.computed == rows.tokens == rows.positions == 0
    assert [batch.sources.shape for batch in rows.batches()] == [(0, ROW)]


def test_row_filled_by_the_common_prefix(policy):
    """One column is left in it: a tree for each sample."""
    learner = learner_of(policy)
    samples = [sample(np.random.default_rng(1), list(range(ROW)), ROW - 1)] * 3
    rows = SharedRows(samples, [RowShape(ROW, 1)], token_weights(samples, "token_mean"))
    assert rows.plan.num_rows == [3]
    params = learner.init(init_params(policy, learner.mesh, 0))["params"]
    expected = sample_logprobs(learner, params, samples[:1], CONFIG)[0]
    for values in sample_logprobs(learner, params, samples, SHARED):
        assert values[-1] == pytest.approx(expected[-1], abs=1e-5)


def test_kernel_without_sharing_is_refused(policy):
    numerics = dataclasses.replace(policy.numerics, kernel="splash")
    splash = Policy(policy.architecture, numerics)
    mesh = single_device()
    with pytest.raises(UserError, match="policy.attention is splash, .* set it to xla or cudnn"):
        Learner(splash, optax.sgd(1.0), mesh, LearnerOptions(1, shares_prefixes=True))


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]))
@settings(max_examples=30, deadline=None)
def test_shared_rows_keep_all_weights(seed, copies):
    samples = groups(seed) * copies
    weights = token_weights(samples, "sequence_mean")
    rows = SharedRows(samples, [RowShape(ROW, 1), RowShape(ROW // 2, 1)], weights)
    batches = rows.batches()
    assert sum(np.count_nonzero(batch.weights) for batch in batches) == sum(
        np.count_nonzero(trained.mask[1:]) for trained in samples
    )
    for kept, given_weights in zip(rows.taken([batch.weights for batch in batches]), weights, strict=True):
        np.testing.assert_array_equal(kept, given_weights)


def assert_each_sees_its_beginning(samples, length):
    rows = SharedRows(samples, [RowShape(length, 1)])
    batches = rows.batches()
    codes = [
        (number * 1000 + np.arange(len(batch.sources))[:, None]) * 1000 + batch.sources
        for number, batch in enumerate(batches)
    ]
    for trained, code in zip(samples, rows.taken(codes), strict=True):
        for token in np.flatnonzero(trained.mask):
            place, column = divmod(int(code[token]), 1000)
            batch, row = batches[place // 1000], place % 1000
            seen = np.flatnonzero(batch.ends[row, : column + 1] > column)
            np.testing.assert_array_equal(batch.tokens[row, seen], trained.tokens[:token])
            np.testing.assert_array_equal(batch.positions[row, seen], np.arange(token))
    return rows


@pytest.mark.parametrize(("seed", "questions"), [(0, 4), (1, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("length", [ROW, 3 * ROW])
def test_trained_tokens_see_their_own_beginning(seed, questions, length):
    """Whatever lies beside them in the row."""
    assert_each_sees_its_beginning(groups(seed, questions), length)


def test_first_trained_token_follows_what_all_begin_with():
    """Three trees of one prompt: the last one lies behind the first one in its row."""
    rng = np.random.default_rng(0)
    samples = [
        sample(rng, [1, 2, *[branch] * count], 2, trained=1.0) for branch, count in ((3, 40), (4, 44), (5, 5))
    ]
    rows = assert_each_sees_its_beginning(samples, ROW)
    assert rows.common == 2 and [at.start for at in rows.plan.placements] == [0, 0, 40]
