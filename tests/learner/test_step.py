"""From trajectories to updates: what a sample holds, which batches a step makes, and what is computed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import GROUPED, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import TOKEN_METRICS, on_policy_only, policy_gradient
from calibadv_jax.learner.step import learn, make_sample, mini_batches

QUESTION = Question("q", "?", ("x",), "test")
VOCAB = 40
ROW = 8
CONFIG = LearnerConfig(pack_length=ROW, row_widths=1)
LONG, PLAIN = dataclasses.replace(CONFIG, pack_length=32), LossConfig()


class Notebook:
    """A learner that writes down its batches. Its log-probabilities name the policy and the target."""

    def __init__(self):
        self.updates, self.passes = [], []

    def update(self, state, batches, loss, reference=None):
        (batch,) = batches or [pack([], ROW)]  # without rows where there is nothing to compute
        self.updates.append((batch, loss, reference))
        version, count = state["params"] + 1, np.count_nonzero(batch.weights)
        assert bool(batches) == bool(count)
        metrics = {"actor/loss": float(version), "actor/entropy": 1.2 * count} if batches else {}
        return {"params": version}, metrics

    def logprobs(self, params, batch):
        self.passes.append(params)
        return (-params - batch.targets / 100).astype(np.float32)

    def position_cost(self, length):
        return 1.0

    @property
    def batches(self):
        return [batch for batch, *_ in self.updates]

    @property
    def taught(self):
        """First digits of the trained tokens of each update: the numbers of `numbered` samples."""
        return [sorted({int(token) // 10 for token in b.targets[b.weights > 0]}) for b in self.batches]


def learned(notebook, samples, config=CONFIG, loss=PLAIN, seed=0, reference=None):
    policy_loss = policy_gradient(loss, on_policy_only(loss, config.minibatch_size, config.epochs))
    return learn(
        notebook, {"params": 1}, samples, config, policy_loss, np.random.default_rng(seed), reference
    )


def sample(first, advantages):
    """Tokens from `first` on, of which all but the prompt's are trained."""
    mask = np.arange(len(advantages) + 1) > 0
    values = np.array([0.0, *advantages], np.float32)
    tokens = np.arange(first, first + len(mask), dtype=np.int32)
    return Sample(tokens, mask, values, np.where(mask, -9, 0).astype(np.float32))


def numbered(count=5, idle=()):
    """Sample i is the tokens 10 i, 10 i + 1, 10 i + 2; the `idle` ones have no advantage."""
    return [sample(10 * index, [0.0 if index in idle else 1.0] * 2) for index in range(count)]


def array(*values, dtype=np.float32):
    return np.array(values, dtype)


ints = functools.partial(array, dtype=np.int32)


def trajectory(*sampled):
    return Trajectory(QUESTION, ints(1, 2, 3), [Turn("answer", ints(*sampled), array(*sampled))])


def test_prompt_and_response_end_to_end():
    turns = [
        Turn("search", ints(5, 6), array(-0.5, -0.6), observation_ids=ints(7)),
        Turn("answer", ints(8), array(-0.8)),
    ]
    made = make_sample(Trajectory(QUESTION, ints(1, 2, 3), turns), array(1.5, 1.5, 0, -2))
    assert made.tokens.tolist() == [1, 2, 3, 5, 6, 7, 8] and made.tokens.dtype == np.int32
    assert made.mask.tolist() == [False, False, False, True, True, False, True]
    assert made.advantages.tolist() == [0, 0, 0, 1.5, 1.5, 0, -2]
    np.testing.assert_array_equal(made.logprobs, array(0, 0, 0, -0.5, -0.6, 0, -0.8))
    assert made.old_logprobs is None and made.prompt_ids.tolist() == [1, 2, 3]
    turn = Turn("unfinished", ints(), array(), observation_ids=ints(4))
    untrained = make_sample(Trajectory(QUESTION, ints(1), [turn]), array(0))
    assert untrained.tokens.tolist() == [1, 4] and not untrained.mask.any()


def test_samples_return_in_order_with_recomputed_logprobs():
    """Past one without a sampled token and one whose advantage is 0, of which none are computed."""
    trajectories = [trajectory(5, 6), trajectory(), trajectory(7), trajectory(8, 9)]
    made = list(map(make_sample, trajectories, [array(1, 1), array(), array(0), array(-1, -1)]))
    for size, recomputed in ((0, []), (2, [0, 3])):
        results = learned(Notebook(), made, dataclasses.replace(CONFIG, minibatch_size=size)).samples
        assert all(new.tokens is old.tokens for new, old in zip(results, made, strict=True))
        assert [index for index, new in enumerate(results) if new.old_logprobs is not None] == recomputed
    np.testing.assert_allclose(results[0].old_logprobs, [0, 0, 0, -1.05, -1.06], rtol=1e-6)
    np.testing.assert_allclose(results[3].old_logprobs[3:], [-1.08, -1.09], rtol=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_samples_without_trained_tokens_are_not_trained(kl_coef):
    made = [sample(10, [1.0]), sample(20, []), sample(30, [1.0])]
    config = dataclasses.replace(CONFIG, minibatch_size=1, epochs=2)
    notebook = Notebook()
    result = learned(notebook, made, config, LossConfig(kl_coef=kl_coef))
    assert result.metrics["actor/updates"] == 4 and sorted(notebook.taught) == [[1], [1], [3], [3]]
    nothing = learned(Notebook(), made[1:2], config)
    assert (nothing.state, nothing.metrics, len(nothing.samples)) == ({"params": 1}, {}, 1)


@pytest.mark.parametrize("prompts", [[1] * 4 + [2] * 4 + [3] * 4, [1, 2, 3] * 4])
@pytest.mark.parametrize("size", [4, 5])
def test_groups_stay_whole_in_shuffled_mini_batches(prompts, size):
    """Wherever their trajectories stand; they are cut at full mini-batches only. Epochs differ in order."""
    made, rng = [sample(prompt, [1.0]) for prompt in prompts], np.random.default_rng(0)
    config = dataclasses.replace(CONFIG, minibatch_size=size, epochs=3, shuffle="groups")
    chosen = list(mini_batches(made, config, rng))
    assert [len(numbers) for numbers in chosen] == ([4, 4, 4] if size == 4 else [5, 5, 2]) * 3
    orders = np.concatenate(chosen).reshape(3, 12)
    groups = np.array(prompts)[orders].reshape(3, 3, 4)
    assert (groups == groups[..., :1]).all() and len(np.unique(groups[..., 0], axis=0)) > 1
    assert all(sorted(order) == list(range(12)) for order in orders)


def test_group_is_cut_only_at_a_full_mini_batch():
    made = [sample(prompt, [1.0]) for prompt in [1] * 4 + [2] * 4 + [3] * 4]
    config = dataclasses.replace(CONFIG, minibatch_size=5, shuffle="groups")
    chosen = list(mini_batches(made, config, np.random.default_rng(0)))
    assert [len(numbers) for numbers in chosen] == [5, 5, 2]
    order = np.concatenate(chosen)
    assert [made[number].tokens[0] for number in order[::4]] != [1, 2, 3]
    for start in range(0, 12, 4):
        assert sorted(order[start : start + 4]) == list(range(order[start], order[start] + 4))


def test_one_update_takes_all_samples():
    notebook = Notebook()
    metrics = learned(notebook, numbered()).metrics
    assert notebook.taught == [[0, 1, 2, 3, 4]] and metrics["actor/updates"] == 1


@pytest.mark.parametrize(
    ("terms", "computed"),
    [({}, [0, 2]), ({"entropy_coef": 0.1}, [0, 1, 2, 3]), ({"kl_coef": 0.1}, [0, 1, 2, 3])],
)
def test_samples_without_advantage_are_computed_for_other_terms(terms, computed):
    """With the log-probabilities of the policy before the first update."""
    notebook, config = Notebook(), dataclasses.replace(CONFIG, epochs=2)
    metrics = learned(notebook, numbered(4, idle=(1, 3)), config, LossConfig(**terms)).metrics
    assert notebook.taught == [computed, computed]
    assert metrics["actor/computed_share"] == pytest.approx(len(computed) / 4)
    for batch in notebook.batches:
        trained = batch.weights > 0
        np.testing.assert_allclose(batch.old_logprobs[trained], -1 - batch.targets[trained] / 100, rtol=1e-6)
        assert np.count_nonzero(batch.segment_ids) == 3 * len(computed)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", [1 / 3] * 3), ("sequence_mean", [1 / 4, 1 / 4, 1 / 2])],
)
def test_aggregation_of_the_loss_is_used(aggregation, expected):
    """One sample of two trained tokens beside one of one."""
    notebook = Notebook()
    samples = [sample(0, [1.0, 1.0]), sample(5, [1.0])]
    learned(notebook, samples, loss=LossConfig(aggregation=aggregation))
    (batch,) = notebook.batches
    assert batch.tokens.shape == (1, ROW)
    assert sorted(batch.weights[batch.weights > 0]) == pytest.approx(expected)


@pytest.mark.parametrize(("aggregation", "weight"), [("sequence_sum", 1 / 2), ("sequence_sum_norm", 1 / 20)])
def test_sums_report_the_share_that_was_computed(aggregation, weight):
    notebook = Notebook()
    loss = LossConfig(aggregation=aggregation, length_norm=10 if aggregation == "sequence_sum_norm" else 0)
    metrics = learned(notebook, [sample(0, [1.0] * 3), sample(5, [0.0])], loss=loss).metrics
    (batch,) = notebook.batches
    np.testing.assert_allclose(batch.weights[batch.weights > 0], [weight] * 3)
    assert metrics["actor/computed_share"] == pytest.approx(3 / 4)


class NotebookWithNorm(Notebook):
    """Every update has a gradient's norm of 2, with or without rows."""

    def update(self, state, batches, loss, reference=None):
        state, metrics = super().update(state, batches, loss, reference)
        return state, metrics | {"actor/grad_norm": 2.0}


@pytest.mark.parametrize("idle", [(), (0, 3), (0, 1, 2, 3)])
def test_gradient_norm_is_a_mean_over_all_updates(idle):
    config = dataclasses.replace(CONFIG, minibatch_size=1)
    metrics = learned(NotebookWithNorm(), numbered(4, idle), config).metrics
    assert (metrics["actor/updates"], metrics["actor/grad_norm"]) == (4, 2)


def test_epoch_trains_every_sample_once():
    config, reference = dataclasses.replace(CONFIG, minibatch_size=2, epochs=3), {"the": "initial policy"}
    notebook, repeated, other = Notebook(), Notebook(), Notebook()
    result = learned(notebook, numbered(), config, LossConfig(clip_high=0.3), reference=reference)
    epochs = [notebook.taught[start : start + 3] for start in (0, 3, 6)]
    assert [sorted(sum(epoch, [])) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert [len(numbers) for numbers in notebook.taught] == [2, 2, 1] * 3
    assert len({str(epoch) for epoch in epochs}) == 3
    assert result.state == {"params": 10}
    assert result.metrics == {
        "actor/loss": pytest.approx(np.mean(range(2, 11))),
        "actor/entropy": pytest.approx(1.2),
        "actor/updates": 9,
        "actor/computed_share": 1,
        "actor/row_fill": pytest.approx((6 / 8 + 6 / 8 + 3 / 8) / 3),
        "perf/packing": pytest.approx(3 * 8 * ROW / 15),  # microbatches of eight rows for 15 tokens
    }
    ((loss, reference_id),) = {(loss, id(reference)) for _, loss, reference in notebook.updates}
    assert loss.config.clip_high == 0.3 and reference_id == id(reference)
    learned(repeated, numbered(), config)
    learned(other, numbered(), config, seed=1)
    assert notebook.taught == repeated.taught != other.taught


@pytest.mark.parametrize("idle", [(), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_metrics_are_means_over_computed_tokens(idle, aggregation):
    config, loss = dataclasses.replace(CONFIG, minibatch_size=1), LossConfig(aggregation=aggregation)
    metrics = learned(Notebook(), numbered(4, idle), config, loss).metrics
    assert metrics["actor/updates"] == 4
    assert metrics["actor/computed_share"] == pytest.approx(1 - len(idle) / 4)
    assert metrics.get("actor/entropy") == (None if len(idle) == 4 else pytest.approx(1.2))
    assert ("actor/loss" in metrics) == ("perf/packing" in metrics) == (len(idle) < 4)
    whole = learned(Notebook(), [sample(0, [1.0] * 3), sample(5, [0.0])], loss=loss)
    share = 1 / 2 if aggregation == "sequence_mean" else 3 / 4  # of the weights, beside one without advantage
    assert whole.metrics["actor/computed_share"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("changes", "old", "recomputed"),
    [
        ({"minibatch_size": 2}, "recompute", True),
        ({"epochs": 2}, "recompute", True),
        ({"minibatch_size": 2}, "sampler", False),
        ({"epochs": 2}, "sampler", False),
        ({"minibatch_size": 2, "epochs": 2}, "recompute", True),
        ({"minibatch_size": 2, "epochs": 2}, "sampler", False),
        ({}, "sampler", False),
        ({}, "recompute", False),  # the loss takes the current policy's own
    ],
)
def test_old_logprobs_are_computed_before_the_first_update(changes, old, recomputed):
    config, loss, notebook = dataclasses.replace(CONFIG, **changes), LossConfig(old_logprobs=old), Notebook()
    learned(notebook, numbered(), config, loss)
    assert notebook.passes == [1] * recomputed
    on_policy = on_policy_only(loss, config.minibatch_size, config.epochs)
    assert on_policy == (not changes and old == "recompute")
    for batch in notebook.batches:
        trained = batch.weights > 0
        expected = -1 - batch.targets / 100 if recomputed else np.full(trained.shape, -9.0)
        np.testing.assert_allclose(batch.old_logprobs[trained], expected[trained], rtol=1e-6)
        assert (batch.sampler_logprobs[trained] == -9).all() and batch.factors is None


def test_batch_factor_reads_the_current_policy():
    """The last token of a sample has the largest covariance: a negative advantage, and the least likely."""
    config, notebook = dataclasses.replace(CONFIG, minibatch_size=1), Notebook()
    samples, loss = [sample(0, [0.0, 0.0, -1.0]), sample(5, [0.0] * 3)], LossConfig("kl_cov", cov_share=0.25)
    assert learned(notebook, samples, config, loss).metrics["actor/computed_share"] == 1
    assert notebook.passes == [1, 1, 2]  # the first pass is for the ratio, of all mini-batches
    chosen = {int(b.targets[b.weights > 0][0]): b.targets[b.factors == 1].tolist() for b in notebook.batches}
    assert chosen == {1: [3], 6: []}  # without any advantage no token stands out, but it is computed


def test_factor_without_logprobs_needs_no_pass():
    for name, advantages, factors in (("lld", [1.0, -1.0], [[2, 0]]), ("balance_detached", [0.0, 0.0], [])):
        notebook = Notebook()  # one positive advantage, of weight 1/2; nothing to compute
        metrics = learned(notebook, [sample(0, advantages)], loss=LossConfig(name)).metrics
        assert not notebook.passes and metrics["actor/computed_share"] == any(advantages)
        assert [b.factors[b.weights > 0].tolist() for b in notebook.batches if b.weights.any()] == factors


# --- With a policy ---


@pytest.fixture(scope="module")
def learner():
    policy, options = tiny(GROUPED | {"vocab_size": VOCAB}), LearnerOptions(2, pack_length=32)
    return Learner(policy, optax.sgd(0.1, momentum=0.5), single_device(), options)


@pytest.fixture
def state(learner):
    return learner.init(init_params(learner.policy, learner.mesh, 0))


def random_samples(idle):
    """Those in `idle` have no advantage where they are trained, but noise elsewhere."""
    rng, made = np.random.default_rng(0), []
    for index, length in enumerate(rng.integers(6, 30, 8)):
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        advantages, logprobs = rng.normal(size=(2, length)).astype(np.float32)
        advantages *= ~mask if index in idle else mask
        made.append(
            Sample(rng.integers(0, VOCAB, length).astype(np.int32), mask, advantages, -abs(logprobs) * mask)
        )
    return made


@functools.cache
def on_policy_loss(aggregation):
    """One object for all tests: compiled once."""
    return policy_gradient(LossConfig(aggregation=aggregation), True)


def go(learner, state, samples, config, loss):
    return learn(learner, state, samples, config, loss, np.random.default_rng(3))


@pytest.mark.parametrize(
    ("aggregation", "idle"),
    [("token_mean", (1, 2, 6)), ("sequence_mean", (1, 2, 6)), ("token_mean", range(8))],
)
def test_samples_without_advantage_change_nothing(learner, state, aggregation, idle):
    """As one update with all of them. Where none has an advantage, the momentum moves the parameters."""
    loss, every = on_policy_loss(aggregation), random_samples(idle)
    state = go(learner, state, random_samples(()), LONG, loss).state
    before = jax.tree.map(np.array, state)  # the update takes the state over
    expected, direct = learner.update(jax.tree.map(np.array, state), [pack(every, 32, aggregation)], loss)
    result = go(learner, state, every, LONG, loss)
    close_in_norm(jax.device_get(result.state), jax.device_get(expected))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before["params"], result.state["params"])
    assert max(jax.tree.leaves(moved)) > 1e-3
    for name in ("actor/loss", "actor/pg_loss", "actor/grad_norm"):
        assert result.metrics.get(name, 0.0) == pytest.approx(direct[name], abs=1e-5), name
    trained = [np.count_nonzero(sample.mask[1:]) for sample in every]
    computed = [0 if index in idle else count for index, count in enumerate(trained)]
    if aggregation == "token_mean":
        assert result.metrics["actor/computed_share"] == pytest.approx(sum(computed) / sum(trained))


def test_step_without_advantages_reports_no_loss(learner, state):
    loss = on_policy_loss("token_mean")
    trained = go(learner, state, random_samples(()), LONG, loss)
    metrics = go(learner, trained.state, random_samples(range(8)), LONG, loss).metrics
    assert metrics["actor/grad_norm"] == metrics["actor/computed_share"] == metrics["actor/row_fill"] == 0.0
    omitted = TOKEN_METRICS & trained.metrics.keys() | {"actor/loss", "actor/pg_loss", "perf/packing"}
    assert len(omitted) == 7 and not omitted & metrics.keys()


@pytest.mark.medium
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_token_metrics_are_means_over_computed_tokens(learner, aggregation):
    """Mini-batches of one sample, some of which compute nothing."""
    loss, every, idle = on_policy_loss(aggregation), random_samples((1, 2, 6)), (1, 2, 6)
    frozen = Learner(learner.policy, optax.sgd(0.0), learner.mesh, learner.options)

    def start():
        return frozen.init(init_params(learner.policy, learner.mesh, 0))

    computed = [made for index, made in enumerate(every) if index not in idle]
    _, direct = frozen.update(start(), [pack(computed, 32)], loss)
    metrics = go(frozen, start(), every, dataclasses.replace(LONG, minibatch_size=1), loss).metrics
    assert metrics["actor/updates"] == 8
    num_tokens = sum(int(made.mask.sum()) for made in computed)
    for name in TOKEN_METRICS & direct.keys():
        assert metrics[name] == pytest.approx(direct[name] / num_tokens, rel=1e-4, abs=1e-5), name
    assert metrics["actor/entropy"] > 1


OWN_KEYS = {
    "gspo": {"aggregation": "sequence_mean"},
    "lld": {},
    "clip_cov": {"cov_low": 0.1, "cov_share": 0.5},
    "kl_cov": {"cov_share": 0.5},
}


@pytest.fixture(scope="module")
def learners(learner):
    """Of one policy, by their rows of a microbatch."""
    optimizer = optax.sgd(0.1)
    return {rows: Learner(learner.policy, optimizer, learner.mesh, LearnerOptions(rows)) for rows in (1, 4)}


@pytest.mark.medium
@pytest.mark.parametrize("name", OWN_KEYS)
def test_size_of_a_microbatch_changes_no_update(learners, name):
    """Of losses that read more than a token: after two updates on four samples each, one off-policy."""
    rng = np.random.default_rng(1)
    samples = [sample(int(rng.integers(20)), rng.normal(size=rng.integers(4, 12))) for _ in range(8)]
    loss = policy_gradient(LossConfig(name=name, **OWN_KEYS[name]), on_policy=False)
    updated = []
    for rows, learner in learners.items():
        config = LearnerConfig(minibatch_size=4, pack_length=16, row_widths=1, microbatch_rows=rows)
        state = learner.init(init_params(learner.policy, learner.mesh, 0))
        result = learn(learner, state, samples, config, loss, np.random.default_rng(0))
        assert result.metrics["actor/skipped"] == 0 and result.metrics["actor/grad_norm"] > 1e-3
        updated.append(jax.device_get(result.state["params"]))
    close_in_norm(*updated)


@pytest.mark.medium
def test_rows_of_several_widths_make_the_same_step(learner, state, monkeypatch):
    """The log-probabilities before it too, and the positions are counted as they are computed."""
    every, loss = random_samples(()), policy_gradient(LossConfig(), False)
    wide = dataclasses.replace(LONG, minibatch_size=4, microbatch_rows=1)
    before = jax.tree.map(np.array, state)
    expected = go(learner, state, every, wide, loss)
    shapes, update = [], learner.update

    def noting(state, batches, *arguments):
        shapes.extend(batch.tokens.shape for batch in batches)
        return update(state, batches, *arguments)

    monkeypatch.setattr(learner, "update", noting)
    result = go(learner, before, every, dataclasses.replace(wide, row_widths=4), loss)
    for sample, other in zip(expected.samples, result.samples, strict=True):
        np.testing.assert_allclose(sample.old_logprobs, other.old_logprobs, atol=1e-5)
    close_in_norm(jax.device_get(result.state), jax.device_get(expected.state))
    grad_norm = expected.metrics["actor/grad_norm"]
    assert result.metrics["actor/grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    rows = {32: 1, 24: 1, 16: 2, 8: 4}  # of a microbatch
    assert len({width for _, width in shapes}) > 1
    positions = sum(-(-count // rows[width]) * rows[width] * width for count, width in shapes)
    tokens = sum(len(sample.tokens) for sample in every)
    assert result.metrics["perf/packing"] == pytest.approx(positions / tokens)
