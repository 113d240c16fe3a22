"""The clipped objective and its extra terms, against values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.losses import KL_ESTIMATORS, policy_gradient


def batch_of(advantages, old, sampler=None):
    """One row: a prompt token, then one trained token for each advantage, equally weighted."""
    count = len(advantages)
    zero = np.zeros(1, np.float32)
    sample = Sample(
        np.arange(count + 1, dtype=np.int32),
        np.array([False] + [True] * count),
        np.concatenate([zero, np.asarray(advantages, np.float32)]),
        np.concatenate([zero, np.asarray(sampler or old, np.float32)]),
        np.concatenate([zero, np.asarray(old, np.float32)]),
    )
    return pack([sample], count + 1)


def columns(values):
    return jnp.asarray([[*values, 0.0]], jnp.float32)


def test_clipping_acts_on_the_pessimistic_side():
    ratios = np.array([1.5, 1.5, 0.5, 0.5])
    advantages = [1.0, -1.0, 1.0, -1.0]
    old = np.log([0.2] * 4)
    new = columns(old + np.log(ratios))
    loss, metrics = policy_gradient(LossConfig(), False)(
        new, 0.0 * new, batch_of(advantages, list(old)), None
    )
    # min(r A, clip(r) A): 1.2, -1.5, 0.5, -0.8
    assert float(loss) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4, abs=1e-6)
    assert float(metrics["actor/pg_clipfrac"]) == 2  # tokens


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_token_metrics_count_each_token_once(aggregation):
    """A long sequence of which nothing is clipped beside a short one of which all is."""
    samples = [
        Sample(
            np.arange(count + 1, dtype=np.int32),
            np.arange(count + 1) > 0,
            np.ones(count + 1, np.float32),
            np.full(count + 1, -1.5, np.float32),
            np.full(count + 1, old, np.float32),
        )
        for count, old in ((3, -1.0), (1, -2.0))
    ]
    batch = pack(samples, 6, aggregation)
    new = jnp.full(batch.weights.shape, -1.0)
    _, metrics = policy_gradient(LossConfig(), False)(new, 0 * new + 2.0, batch, None)
    sums = {name: float(value) for name, value in metrics.items() if name != "actor/pg_loss"}
    assert sums == {
        "actor/pg_clipfrac": 1,  # token of four
        "actor/entropy": 8,
        "actor/ppo_kl": -1,
        "actor/sampler_mismatch": pytest.approx(4 * 0.5),
    }


def test_clip_higher_leaves_the_lower_side_alone():
    old = np.log([0.2] * 2)
    new = columns(old + np.log([1.5, 0.5]))
    config = LossConfig(clip_low=0.2, clip_high=0.4)
    loss, _ = policy_gradient(config, False)(new, 0.0 * new, batch_of([1.0, -1.0], list(old)), None)
    assert float(loss) == pytest.approx(-(1.4 - 0.8) / 2, abs=1e-6)


def test_truncated_importance_sampling_caps_the_weight():
    old, sampler = [-1.0, -1.0], [-1.0 - np.log(4.0), -1.0 + np.log(2.0)]
    new = columns(old)
    config = LossConfig(importance_cap=2.0)
    loss, metrics = policy_gradient(config, False)(new, 0.0 * new, batch_of([1.0, 1.0], old, sampler), None)
    assert float(loss) == pytest.approx(-(2.0 + 0.5) / 2, abs=1e-6)
    assert float(metrics["actor/sampler_mismatch"]) == pytest.approx(np.log(4) + np.log(2), abs=1e-6)


def test_importance_cap_has_no_floor():
    """The cap has no floor: e**-3 stays e**-3, for praised tokens and for blamed ones."""
    new = columns([-4.0, -4.0])
    config = LossConfig(importance_cap=2.0)
    batch = batch_of([1.0, -2.0], [-4.0, -4.0], [-1.0, -3.0])
    loss, _ = policy_gradient(config, False)(new, 0.0 * new, batch, None)
    assert float(loss) == pytest.approx(-(np.exp(-3.0) - 2 * np.exp(-1.0)) / 2, abs=1e-6)


def test_log_ratio_is_held_within_20():
    new = columns([0.0])
    loss, _ = policy_gradient(LossConfig(), False)(new, 0.0 * new, batch_of([-1.0], [-500.0]), None)
    assert float(loss) == pytest.approx(np.exp(20.0), rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", np.exp(-0.5) + 0.5 - 1)],
)
def test_kl_estimators(estimator, expected):
    new, reference = columns([-1.0]), columns([-1.5])
    assert float(KL_ESTIMATORS[estimator](reference - new)[0, 0]) == pytest.approx(expected, abs=1e-6)
    config = LossConfig(kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01)
    loss, metrics = policy_gradient(config, True)(new, columns([2.0]), batch_of([0.0], [-1.0]), reference)
    assert float(loss) == pytest.approx(0.1 * expected - 0.01 * 2.0, abs=1e-6)
    assert float(metrics["actor/kl_loss"]) == pytest.approx(expected, abs=1e-6)


def test_low_variance_kl_ends_at_10():
    differences = columns([2.0, 5.0, -30.0])
    values = np.asarray(KL_ESTIMATORS["low_var_kl"](differences))[0]
    np.testing.assert_allclose(values[:3], [np.exp(2.0) - 3, 10.0, 10.0], rtol=1e-5)
