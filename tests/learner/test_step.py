"""A step of the learner: which samples are computed, and which log-probabilities the ratio divides by."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import GROUPED, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import TOKEN_METRICS, on_policy_only, policy_gradient
from calibadv_jax.learner.step import learn

VOCAB, ROW = 40, 32


@functools.cache
def policy_loss(on_policy, **changes):
    """One object for all tests: compiled once."""
    return policy_gradient(LossConfig(**changes), on_policy)


@pytest.fixture(scope="module")
def learner():
    config = GROUPED | {"vocab_size": VOCAB}
    mesh = single_device()
    return Learner(tiny(config), optax.sgd(0.1, momentum=0.5), mesh, LearnerOptions(2))


@pytest.fixture
def state(learner):
    return learner.init(init_params(learner.policy, learner.mesh, 0))


def samples(count=8, idle=(1, 2, 6)):
    """Random ones; those in `idle` have no advantage where they are trained, but noise elsewhere."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        length = int(rng.integers(6, 20))
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        advantages = rng.normal(size=length).astype(np.float32) * (~mask if index in idle else mask)
        logprobs = -rng.random(length).astype(np.float32) * mask
        made.append(Sample(rng.integers(0, VOCAB, length).astype(np.int32), mask, advantages, logprobs))
    return made


def config(minibatch_size=0, epochs=1):
    return LearnerConfig(minibatch_size=minibatch_size, epochs=epochs, row_length=ROW, row_widths=1)


def rng():
    return np.random.default_rng(3)


def rows_of(learner, monkeypatch):
    """Collects the tokens of every batch that is computed."""
    seen = []
    update = learner.update
    monkeypatch.setattr(
        learner, "update", lambda s, batches, *rest: (seen.extend(batches), update(s, batches, *rest))[1]
    )
    return seen


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_samples_without_advantage_change_nothing(learner, state, aggregation, monkeypatch):
    loss, every = policy_loss(True, aggregation=aggregation), samples()
    whole = jax.tree.map(np.array, state)  # the update takes the state over
    expected, direct = learner.update(whole, [pack(every, ROW, aggregation)], loss)
    seen = rows_of(learner, monkeypatch)
    result = learn(learner, state, every, config(), loss, rng())
    metrics = result.metrics
    close_in_norm(jax.device_get(result.state), jax.device_get(expected))
    assert int((seen[0].segment_ids > 0).sum()) == sum(
        len(sample.tokens) for index, sample in enumerate(every) if index not in (1, 2, 6)
    )
    for name in ("actor/loss", "actor/pg_loss", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(direct[name], abs=1e-5), name
    assert metrics["actor/computed_share"] == pytest.approx(seen[0].weights.sum())
    assert 0 < metrics["actor/computed_share"] < 1
    tokens = sum(int(sample.mask.sum()) for sample in every)
    assert metrics["actor/entropy"] == pytest.approx(direct["actor/entropy"] / tokens, rel=0.05)  # a mean


def test_step_without_advantages_moves_by_momentum(learner, state):
    loss = policy_loss(True)
    direct = learn(learner, state, samples(), config(), loss, rng())
    state = direct.state
    none = samples(idle=range(8))
    expected, _ = learner.update(jax.tree.map(np.array, state), [pack(none, ROW)], loss)
    before = jax.device_get(state["params"])
    result = learn(learner, state, none, config(), loss, rng())
    metrics = result.metrics
    close_in_norm(jax.device_get(result.state), jax.device_get(expected))
    assert metrics["actor/grad_norm"] == metrics["actor/computed_share"] == metrics["actor/row_fill"] == 0.0
    nothing = TOKEN_METRICS & direct.metrics.keys() | {"actor/loss", "actor/pg_loss", "perf/packing"}
    assert len(nothing) == 7 and not nothing & metrics.keys()
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, jax.device_get(result.state["params"]))
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.medium
def test_rows_of_several_widths_make_the_same_step(learner, state, monkeypatch):
    """The log-probabilities before it too, and the positions are counted as they are computed."""
    every, loss = samples(idle=()), policy_loss(False)
    wide = dataclasses.replace(config(minibatch_size=4), microbatch_rows=1)
    narrow = dataclasses.replace(wide, row_widths=4)
    before = jax.tree.map(np.array, state)
    expected = learn(learner, state, every, wide, loss, rng())
    seen = rows_of(learner, monkeypatch)
    result = learn(learner, before, every, narrow, loss, rng())
    for sample, other in zip(expected.samples, result.samples, strict=True):
        np.testing.assert_allclose(sample.old_logprobs, other.old_logprobs, atol=1e-5)
    widths = {batch.tokens.shape[1] for batch in seen}
    assert len(widths) > 1 and widths <= {32, 24, 16, 8}
    close_in_norm(jax.device_get(result.state), jax.device_get(expected.state))
    norms = [step.metrics["actor/grad_norm"] for step in (result, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    rows_per_microbatch = {32: 1, 24: 1, 16: 2, 8: 4}
    positions = sum(
        -(-len(batch.tokens) // rows_per_microbatch[width]) * rows_per_microbatch[width] * width
        for batch in seen
        for width in [batch.tokens.shape[1]]
    )
    tokens = sum(len(sample.tokens) for sample in every)
    assert result.metrics["perf/packing"] == pytest.approx(positions / tokens)


SHORT_ROW = 16
SHORT = LearnerConfig(row_length=SHORT_ROW, row_widths=1)
OWN_KEYS = {
    "gspo": {"aggregation": "sequence_mean"},
    "clip_cov": {"cov_low": 0.1, "cov_share": 0.5},
    "kl_cov": {"cov_share": 0.5},
}


class Stub:
    """A learner whose log-probabilities are the version of its policy times the target token, by -0.1."""

    def __init__(self):
        self.asked, self.batches = [], []

    def update(self, state, batches, loss, reference=None):
        self.batches.extend(batches)
        return {"params": state["params"] + 1}, {"actor/loss": 0.0}

    def logprobs(self, params, batch):
        self.asked.append(params)
        return (-0.1 * params * batch.targets).astype(np.float32)

    def position_cost(self, length):
        return 1.0


def of(first, advantages):
    """Tokens from `first` on, of which all but the prompt's are trained."""
    count = len(advantages) + 1
    zero = np.zeros(1, np.float32)
    values = np.concatenate([zero, np.asarray(advantages, np.float32)])
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Sample(tokens, np.arange(count) > 0, values, np.full(count, -1.0, np.float32))


def go(samples, config, loss, learner=None):
    stub = learner or Stub()
    rng = np.random.default_rng(0)
    on_policy = on_policy_only(loss, config.minibatch_size, config.epochs)
    result = learn(stub, {"params": 1}, samples, config, policy_gradient(loss, on_policy), rng)
    return stub, result.metrics


def test_batch_factor_reads_the_current_policy():
    """The last token of a sample has the largest covariance: a negative advantage, and the least likely."""
    config = LearnerConfig(minibatch_size=1, row_length=SHORT_ROW, row_widths=1)
    samples = [of(0, [0.0, 0.0, -1.0]), of(5, [0.0, 0.0, 0.0])]
    stub, metrics = go(samples, config, LossConfig(name="kl_cov", cov_share=0.25))
    assert stub.asked == [1, 1, 2]  # the first pass is for the ratio, of all mini-batches
    assert metrics["actor/computed_share"] == 1
    chosen = {int(b.targets[b.weights > 0][0]): b.targets[b.factors == 1].tolist() for b in stub.batches}
    assert chosen == {1: [3], 6: []}  # without any advantage no token stands out, but it is computed


@pytest.mark.parametrize("name", ["vanilla", "lld"])
def test_losses_without_logprobs_need_no_pass(name):
    stub, _ = go([of(0, [1.0, -1.0])], SHORT, LossConfig(name=name))
    assert not stub.asked
    factors = stub.batches[0].factors
    assert (factors is None) == (name == "vanilla")
    if name == "lld":
        np.testing.assert_allclose(factors[0, :2], [2.0, 0.0])  # one positive advantage, of weight 1/2


def test_step_without_advantages_needs_no_pass():
    stub, metrics = go([of(0, [0.0])], SHORT, LossConfig(name="balance_detached"))
    assert not stub.asked and metrics["actor/computed_share"] == 0


@pytest.mark.parametrize(("aggregation", "weight"), [("sequence_sum", 1 / 2), ("sequence_sum_norm", 1 / 20)])
def test_sums_report_the_computed_share(aggregation, weight):
    norm = 10 if aggregation == "sequence_sum_norm" else 0
    loss = LossConfig(aggregation=aggregation, length_norm=norm)
    samples = [of(0, [1.0, 1.0, 1.0]), of(5, [0.0])]
    stub, metrics = go(samples, SHORT, loss)
    weights = stub.batches[0].weights
    np.testing.assert_allclose(weights[weights > 0], [weight] * 3)
    assert metrics["actor/computed_share"] == pytest.approx(3 / 4)


@pytest.fixture(scope="module")
def learners():
    """Of one policy, by their rows of a microbatch."""
    mesh = single_device()
    policy = tiny(GROUPED | {"vocab_size": VOCAB})
    return {rows: Learner(policy, optax.sgd(0.1), mesh, LearnerOptions(rows)) for rows in (1, 4)}


def updated(learner, rows, loss_config):
    """Parameters after two updates on four samples each, the second one off-policy."""
    draw = np.random.default_rng(1)
    samples = [of(int(draw.integers(20)), draw.normal(size=draw.integers(4, 12))) for _ in range(8)]
    config = LearnerConfig(minibatch_size=4, row_length=SHORT_ROW, row_widths=1, microbatch_rows=rows)
    state = learner.init(init_params(learner.policy, learner.mesh, 0))
    loss = policy_gradient(loss_config, on_policy_only(loss_config, 4, 1))
    result = learn(learner, state, samples, config, loss, np.random.default_rng(0))
    assert result.metrics["actor/skipped"] == 0 and result.metrics["actor/grad_norm"] > 1e-3
    return jax.device_get(result.state["params"])


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gspo", "lld", "clip_cov", "kl_cov"])
def test_microbatch_size_changes_no_update(name, learners):
    loss_config = LossConfig(name=name, **OWN_KEYS.get(name, {}))
    single_row, all_rows = (updated(learner, rows, loss_config) for rows, learner in learners.items())
    close_in_norm(single_row, all_rows)
