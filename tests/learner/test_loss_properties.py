"""What holds for every loss, whatever the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from loss_cases import packed, sample

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.losses import LOSSES

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

EXTRA = {
    "vanilla": {"dual_clip": 2.0},
    "cispo": {"drop_above": 1.5},
    "gspo": {"aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05},
    "gmpo": {"aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    "gpg": {"aggregation": "sequence_sum_norm", "length_norm": 16},
    "clip_cov": {"cov_low": 0.1, "cov_share": 1.0},
    "kl_cov": {"cov_share": 0.3},
    "lld": {"lld_gating": True, "aggregation": "sequence_sum"},
    "balance": {"balance_ratio": 1.75},
    "balance_detached": {"balance_ratio": 1.75, "aggregation": "sequence_mean"},
    "sapo": {"tau_positive": 2.0, "aggregation": "sequence_mean"},
    "dppo_tv": {"clip_low": 0.05, "clip_high": 0.05, "ratio_cap": 3.0},
    "dppo_kl": {"clip_low": 0.05, "clip_high": 0.05},
    "dro": {"aggregation": "sequence_sum"},
}
CONFIGS = {name: LossConfig(name=name, **EXTRA[name]) for name in LOSSES}
NAMES = [  # each compiles its own programs
    pytest.param(name, marks=() if name in ("vanilla", "gspo", "kl_cov") else pytest.mark.medium)
    for name in CONFIGS
]


@st.composite
def rows(draw, idle=False):
    """One to five rows of up to nine tokens, with gaps in the mask; no two covariances are equal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)):
        mask = rng.random(length) < draw(st.sampled_from([0.3, 0.8, 1.0]))
        mask[rng.integers(length)] = True
        made.append((*rng.uniform(-3, -0.1, (2, length)), rng.normal(size=length) * (not idle), mask))
    return made


def few(function):
    return hypothesis.settings(max_examples=6, suppress_health_check=list(hypothesis.HealthCheck))(function)


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    for gradient, other in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@few
@hypothesis.given(cases=rows(), seed=st.integers(0, 99))
def test_order_and_packing_change_nothing(name, cases, seed):
    made = [sample(*case) for case in cases]
    order = list(np.random.default_rng(seed).permutation(len(made)))
    apart = packed(made, CONFIGS[name], row_length=10)
    assert_same(packed(made, CONFIGS[name], order=order), apart)


@pytest.mark.parametrize("name", [name for name in NAMES if "dro" not in name.values])  # dro pulls all back
@few
@hypothesis.given(cases=rows(idle=True))
def test_without_advantages_nothing_moves(name, cases):
    loss, gradients, _ = packed([sample(*case) for case in cases], CONFIGS[name])
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", NAMES)
@few
@hypothesis.given(cases=rows())
def test_columns_that_are_not_trained_have_no_influence(name, cases):
    expected = packed([sample(*case) for case in cases], CONFIGS[name])
    other = [
        sample(*(np.where(mask, values, junk) for values, junk in ((new, -9), (old, -2), (by, 7))), mask)
        for new, old, by, mask in cases
    ]
    actual = packed(other, CONFIGS[name])
    assert_same(actual, expected)
    for gradient, (*_, mask) in zip(actual[1], cases, strict=True):
        assert not gradient[~mask].any()


@pytest.mark.parametrize("name", NAMES)
@few
@hypothesis.given(cases=rows())
def test_on_policy_equals_equal_old_logprobs(name, cases):
    """Gradients at ratio 1 too: `on_policy` only saves the pass that would recompute the denominator."""
    apart = packed([sample(new, new, by, mask) for new, _, by, mask in cases], CONFIGS[name])
    stale = packed([sample(*case) for case in cases], CONFIGS[name], on_policy=True)
    assert_same(stale, apart)


@pytest.mark.parametrize(("gating", "push"), [(False, -0.1 / 3), (True, 0.0)])
def test_lld_pushes_positive_advantages_at_ratio_one(gating, push):
    row = sample([-1.0, -2.0, -0.5, -1.0], [-1.0, -2.0, -0.5, -1.0], [1.0, 1.0, -1.0, 3.0], [1] * 4)
    loss, (gradient,), _ = packed([row], LossConfig(name="lld", lld_gating=gating))
    plain, (without,), _ = packed([row], LossConfig())
    assert loss == plain
    np.testing.assert_allclose(gradient - without, [push, push, 0, push], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_of_the_old_logprobs_chooses_no_gradient(name):
    """They come from another program than the new ones: in a first update nothing else is apart."""
    new, by = np.array([-1.0, -2.0, -0.5, -1.0]), [1.0, 1.0, -1.0, 3.0]
    rounding = np.array([2e-6, -2e-6, 1e-6, -1e-6])
    _, (expected,), _ = packed([sample(new, new, by, [1] * 4)], CONFIGS[name])
    for old in (new + rounding, new - rounding):
        _, (actual,), _ = packed([sample(new, old, by, [1] * 4)], CONFIGS[name])
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_balance_detached_moves_both_sides():
    """At ratio 1: terms of positive advantages come to -4/3, others to 1/3; the factor is 1.75 x 4."""
    row = sample([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5], [1.0, 3.0, -1.0], [1, 1, 1])
    for name, expected in (
        ("balance_detached", [-1 / 3, -1, 7 / 3]),
        ("balance", [1 / 4, 3 / 4, 0]),
    ):  # upside down
        loss, (gradient,), _ = packed([row], LossConfig(name=name, balance_ratio=1.75))
        assert loss == pytest.approx(0.75 * 4 / 3, abs=1e-6)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_ratios_without_bound_stay_finite():
    """Beyond what exp can hold in float32, where the published code overflows."""
    far = [0.0, 0.0], [-500.0, -500.0]
    for name, config in CONFIGS.items():
        for sign in (1.0, -1.0):
            loss, gradients, _ = packed([sample(*far, [sign, sign / 2], [1, 1])], config)
            assert np.isfinite(loss) and np.isfinite(gradients).all(), name
