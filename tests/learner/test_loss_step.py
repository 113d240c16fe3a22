"""A step of the learner with losses that look at the whole mini-batch, and with sums as aggregation."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import GROUPED, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import on_policy_only, policy_gradient
from calibadv_jax.learner.step import learn

ROW, VOCAB = 16, 40
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
    """The last token of a sample has the largest covariance: it alone is blamed, and is the least likely."""
    config = LearnerConfig(minibatch_size=1, row_length=ROW, row_widths=1)
    samples = [of(0, [0.0, 0.0, -1.0]), of(5, [0.0, 0.0, 0.0])]
    stub, metrics = go(samples, config, LossConfig(name="kl_cov", cov_share=0.25))
    assert stub.asked == [1, 1, 2]  # the first pass is for the ratio, of all mini-batches
    assert metrics["actor/computed_share"] == 1
    chosen = {int(b.targets[b.weights > 0][0]): b.targets[b.factors == 1].tolist() for b in stub.batches}
    assert chosen == {1: [3], 6: []}  # without any advantage no token stands out, but it is computed


@pytest.mark.parametrize("name", ["vanilla", "lld"])
def test_losses_without_logprobs_need_no_pass(name):
    stub, _ = go([of(0, [1.0, -1.0])], LearnerConfig(row_length=ROW, row_widths=1), LossConfig(name=name))
    assert not stub.asked
    factors = stub.batches[0].factors
    assert (factors is None) == (name == "vanilla")
    if name == "lld":
        np.testing.assert_allclose(factors[0, :2], [2.0, 0.0])  # one praised token, of weight 1/2


def test_step_without_advantages_needs_no_pass():
    stub, metrics = go([of(0, [0.0])], LearnerConfig(row_length=ROW), LossConfig(name="balance_detached"))
    assert not stub.asked and metrics["actor/computed_share"] == 0


@pytest.mark.parametrize(("aggregation", "weight"), [("sequence_sum", 1 / 2), ("sequence_sum_norm", 1 / 20)])
def test_sums_report_the_computed_share(aggregation, weight):
    norm = 10 if aggregation == "sequence_sum_norm" else 0
    loss = LossConfig(aggregation=aggregation, length_norm=norm)
    samples = [of(0, [1.0, 1.0, 1.0]), of(5, [0.0])]
    stub, metrics = go(samples, LearnerConfig(row_length=ROW, row_widths=1), loss)
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
    config = LearnerConfig(minibatch_size=4, row_length=ROW, row_widths=1, microbatch_rows=rows)
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
