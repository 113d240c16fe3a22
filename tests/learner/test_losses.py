"""Losses against their formulas in docs/losses.md, in NumPy, and against published values and gradients.

Also what holds for every loss, whatever the tokens.
"""

from __future__ import annotations

import json
from dataclasses import fields

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from loss_cases import batch_of, columns, packed, sample

from calibadv_jax.config import LossConfig
from calibadv_jax.core.registry import LOSSES
from calibadv_jax.learner.batching import pack
from calibadv_jax.learner.objective import policy_gradient

LOW, HIGH = 0.2, 0.3
RANDOM = np.random.default_rng(0)
ROWS = [  # new and old log-probabilities, and advantages
    (new, new + RANDOM.normal(scale=0.5, size=len(new)), RANDOM.normal(size=len(new)))
    for new in (RANDOM.uniform(-3, -0.1, length) for length in (4, 7, 1))
]


def ppo(ratio, advantages):
    return np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - LOW, 1 + HIGH))


def dual_clip(new, old, advantages):
    terms = ppo(np.exp(new - old), advantages)
    return np.where(advantages < 0, np.minimum(terms, -1.5 * advantages), terms)


def gmpo(new, old, advantages):
    bounded = np.where(advantages > 0, np.minimum(new - old, HIGH), np.maximum(new - old, -LOW))
    return -np.mean(advantages) * np.exp(np.mean(bounded))


def kl_cov(new, old, advantages):
    covariance = (advantages - advantages.mean()) * (new - new.mean())
    chosen = covariance >= np.sort(covariance)[-int(0.4 * len(new))]
    return -advantages * np.exp(new - old) + 0.7 * chosen * np.abs(new - old)


def lld(new, old, advantages):
    return ppo(np.exp(new - old), advantages) + 0.5 * np.mean(np.maximum(0, old - new)[advantages > 0])


def sapo(new, old, advantages):
    tau = np.where(advantages > 0, 2.0, 3.0)
    return -advantages * 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))


def dppo_tv(new, old, advantages):
    moved = np.exp(new) - np.exp(old)
    beyond = np.where(advantages > 0, moved > HIGH, -moved > LOW)
    return np.where(beyond, 0.0, -advantages * np.minimum(np.exp(new - old), 1.25) * new)


CASES = {  # of a trajectory where the aggregation is sequence_mean, else of all tokens
    "vanilla": (dual_clip, {"dual_clip": 1.5}),
    "cispo": (lambda new, old, a: -a * new * np.clip(np.exp(new - old), 1 - LOW, 1 + HIGH), {}),
    "gspo": (lambda new, old, a: ppo(np.exp(np.mean(new - old)), a), {"aggregation": "sequence_mean"}),
    "gmpo": (gmpo, {"aggregation": "sequence_mean"}),
    "gpg": (lambda new, old, a: -a * new, {}),
    "kl_cov": (kl_cov, {"cov_share": 0.4, "cov_kl_coef": 0.7}),
    "lld": (lld, {"lld_coef": 0.5}),
    "sapo": (sapo, {"aggregation": "sequence_mean", "tau_positive": 2.0, "tau_negative": 3.0}),
    "dppo_tv": (dppo_tv, {"ratio_cap": 1.25}),
    "dro": (lambda new, old, a: -a * new + 0.5 * 0.3 * (new - old) ** 2, {"dro_beta": 0.3}),
}


def cases(rows=ROWS, gaps=None):
    """Samples of the rows; `gaps` are the learner's log-probabilities less the sampler's."""
    samplers = [old - gap for (_, old, _), gap in zip(rows, gaps or [0] * len(rows), strict=True)]
    pairs = zip(rows, samplers, strict=True)
    return [sample(*row, np.ones(len(row[0])), sampler) for row, sampler in pairs]


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_its_formula(name):
    formula, keys = CASES[name]
    widths = {} if name in ("gpg", "kl_cov", "sapo", "dro") else {"clip_low": LOW, "clip_high": HIGH}
    loss, _, _ = packed(cases(), LossConfig(name=name, **widths, **keys))
    rows = ROWS if "aggregation" in keys else [map(np.concatenate, zip(*ROWS, strict=True))]
    assert loss == pytest.approx(np.mean([np.mean(formula(*row)) for row in rows]), rel=1e-5)


@pytest.mark.parametrize(("aggregation", "norm"), [("sequence_sum", 0), ("sequence_sum_norm", 5)])
def test_sums_are_means_over_trajectories(aggregation, norm):
    config = LossConfig(name="gpg", aggregation=aggregation, length_norm=norm)
    expected = np.mean([np.sum(-advantages * new) for new, _, advantages in ROWS]) / (norm or 1)
    assert packed(cases(), config)[0] == pytest.approx(expected, rel=1e-5)


def test_clip_acts_on_the_pessimistic_side():
    old = np.log([0.2] * 4)
    new = columns(old + np.log([1.5, 1.5, 0.5, 0.5]))
    batch = batch_of([1.0, -1.0, 1.0, -1.0], list(old))
    loss, metrics = policy_gradient(LossConfig(), False)(new, 0.0 * new, batch, None)
    # min(r A, clip(r) A): 1.2, -1.5, 0.5, -0.8
    assert float(loss) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4, abs=1e-6)
    assert float(metrics["actor/pg_clipfrac"]) == 2  # tokens


def test_clip_high_leaves_the_lower_side_alone():
    old = np.log([0.2] * 2)
    new = columns(old + np.log([1.5, 0.5]))
    config = LossConfig(clip_low=0.2, clip_high=0.4)
    loss, _ = policy_gradient(config, False)(new, 0.0 * new, batch_of([1.0, -1.0], list(old)), None)
    assert float(loss) == pytest.approx(-(1.4 - 0.8) / 2, abs=1e-6)


def test_importance_cap_truncates_the_weight():
    old, sampler = [-1.0, -1.0], [-1.0 - np.log(4.0), -1.0 + np.log(2.0)]
    new = columns(old)
    config = LossConfig(importance_cap=2.0)
    loss, metrics = policy_gradient(config, False)(new, 0.0 * new, batch_of([1.0, 1.0], old, sampler), None)
    assert float(loss) == pytest.approx(-(2.0 + 0.5) / 2, abs=1e-6)
    assert float(metrics["actor/sampler_mismatch"]) == pytest.approx(np.log(4) + np.log(2), abs=1e-6)


def test_importance_cap_has_no_floor():
    """A token that the sampler found far likelier keeps a weight of e^-3, or e^-1, whatever its advantage."""
    new = columns([-4.0, -4.0])
    batch = batch_of([1.0, -2.0], [-4.0, -4.0], [-1.0, -3.0])
    loss, _ = policy_gradient(LossConfig(importance_cap=2.0), False)(new, 0.0 * new, batch, None)
    assert float(loss) == pytest.approx(-(np.exp(-3.0) - 2 * np.exp(-1.0)) / 2, abs=1e-6)


@pytest.mark.parametrize("gating", [False, True])
def test_lld_at_ratio_one_has_the_value_of_vanilla(gating):
    row = sample([-1.0, -2.0, -0.5, -1.0], [-1.0, -2.0, -0.5, -1.0], [1.0, 1.0, -1.0, 3.0], [1] * 4)
    loss, (gradient,), _ = packed([row], LossConfig(name="lld", lld_gating=gating))
    vanilla_loss, (vanilla_gradient,), _ = packed([row], LossConfig())
    assert loss == vanilla_loss
    push = 0.0 if gating else -0.1 / 3
    np.testing.assert_allclose(gradient - vanilla_gradient, [push, push, 0, push], atol=1e-6)


@pytest.mark.parametrize("name", ["balance_detached", "balance"])
def test_balanced_losses_have_one_value(name):
    """At ratio 1: terms of positive advantages come to -4/3, others to 1/3; the factor is 1.75 x 4."""
    row = sample([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5], [1, 3, -1], [1, 1, 1])
    loss, _, _ = packed([row], LossConfig(name=name, balance_ratio=1.75))
    assert loss == pytest.approx(0.75 * 4 / 3, abs=1e-6)


# Over the sequences: e^0.4, e^-1.4 and e^1.5, by the token e^0.1, e^-0.2 and e^1.5; masked: in the mean as 0.
@pytest.mark.parametrize(
    ("keys", "weights", "masked"),
    [
        ({"importance_level": "sequence", "importance_cap": 1.2, "importance_low": 0.3}, [1.2, 0, 1.2], 7),
        ({"importance_level": "sequence_geometric", "importance_cap": 1.2}, [1.105171, 0.818731, 1.2], None),
        ({"importance_high": 3.0}, [1, 1, 0], 1),
        ({"importance_cap": 1.05}, [1.05, np.exp(-0.2), 1.05], None),  # without a floor
    ],
)
def test_importance_weights_correct_for_the_sampler(keys, weights, masked):
    gaps = [np.full(4, 0.1), np.full(7, -0.2), np.full(1, 1.5)]
    loss, gradients, metrics = packed(cases(gaps=gaps), LossConfig(name="gpg", **keys))
    terms = [weight * np.sum(-a * new) for weight, (new, _, a) in zip(weights, ROWS, strict=True)]
    assert loss == pytest.approx(sum(terms) / 12, rel=1e-5)
    assert metrics.get("actor/sampler_masked") == masked
    assert [gradient.any() for gradient in gradients] == [weight > 0 for weight in weights]
    assert metrics["actor/sampler_mismatch"] == pytest.approx(4 * 0.1 + 7 * 0.2 + 1.5, rel=1e-5)


@pytest.mark.parametrize("over", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize("by", ["k2", "k3"])
def test_tokens_far_from_the_sampler_are_rejected(by, over):
    """Of three trajectories in one row, by the tokens of each alone."""
    gaps = [np.linspace(0.1, 0.2, 4), np.linspace(-0.9, 0.1, 7), np.full(1, 0.6)]
    measures = [0.5 * gap**2 if by == "k2" else np.exp(gap) - 1 - gap for gap in gaps]
    if over != "token":
        reduce = {"sequence_sum": np.sum, "sequence_mean": np.mean, "sequence_max": np.max}[over]
        measures = [np.full(len(measure), reduce(measure)) for measure in measures]
    accepted = np.concatenate(measures) <= 0.15
    assert {True, False} == set(accepted.tolist())
    config = LossConfig(name="gpg", reject_by=by, reject_over=over, reject_above=0.15)
    _, gradients, metrics = packed(cases(gaps=gaps), config)
    np.testing.assert_array_equal(np.concatenate(gradients) != 0, accepted)
    assert metrics["actor/sampler_masked"] == np.sum(~accepted)


@pytest.mark.parametrize("name", [name for name in LOSSES if not LOSSES[name].batch_factor])
def test_gradient_at_ratio_one_is_reinforces(name):
    """Each token by its own advantage; gmpo has one for all of a trajectory."""
    rows = [(new, new, advantages) for new, _, advantages in ROWS]
    _, gradients, _ = packed(cases(rows), LossConfig(name=name, aggregation="sequence_mean"))
    for gradient, (*_, advantages) in zip(gradients, rows, strict=True):
        effective = np.full(len(advantages), advantages.mean()) if name == "gmpo" else advantages
        np.testing.assert_allclose(gradient, -effective / (3 * len(gradient)), rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "ratios", "advantages", "expected", "clipped"),
    [
        ({"dual_clip": 3.0}, [4, 2, 4], [-1, -1, 0], [0, 2 / 3, 0], 1),
        ({"name": "cispo", "drop_above": 3.0}, [4, 2, 4], [1, 1, -1], [0, -1.2 / 3, 1.2 / 3], 3),
        # Only the second token fell, but its advantage is negative: gated, there is no penalty.
        ({"name": "lld", "lld_coef": 0.5, "lld_gating": True}, [1, 0.9], [1, -1], [-1 / 2, 0.9 / 2], 0),
        ({"name": "lld", "lld_coef": 0.5}, [1, 0.9], [1, -1], [-1 / 2 - 0.5, 0.9 / 2], 0),
        # At ratio 1 every positive advantage is pushed, unless gated.
        ({"name": "lld", "lld_gating": True}, [1] * 4, [1, 1, -1, 3], [-1 / 4, -1 / 4, 1 / 4, -3 / 4], 0),
        ({"name": "lld"}, [1] * 3, [1, -1, 3], [-1 / 3 - 0.1 / 2, 1 / 3, -1 - 0.1 / 2], 0),
        # At ratio 1: terms of positive advantages come to -4/3, others to 1/3; the factor is 1.75 x 4.
        ({"name": "balance_detached", "balance_ratio": 1.75}, [1] * 3, [1, 3, -1], [-1 / 3, -1, 7 / 3], 0),
        ({"name": "balance", "balance_ratio": 1.75}, [1] * 3, [1, 3, -1], [1 / 4, 3 / 4, 0], 0),
    ],
)
def test_gradients_of_options_by_hand(keys, ratios, advantages, expected, clipped):
    new = -1.0 + np.log(ratios)
    row = sample(new, np.full(len(new), -1.0), advantages, np.ones(len(new)))
    _, (gradient,), metrics = packed([row], LossConfig(**keys))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    assert metrics["actor/pg_clipfrac"] == clipped


def test_sequence_importance_weight_counts_trained_tokens():
    row = sample([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [1, 0], [-1.0, -9.0])
    config = LossConfig(importance_level="sequence", importance_cap=5.0)
    assert packed([row], config)[0] == pytest.approx(-1)


@pytest.mark.parametrize(
    ("name", "clips", "inside"),
    [
        ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.25}, [True, False, False, True]),
        ("dppo_tv", {"clip_low": 0.25, "clip_high": 0.15}, [False, False, True, True]),
        # old × log(old / new) + (1 - old) × log((1 - old) / (1 - new)): 0.087, 0.382, 0.087, 0.049
        ("dppo_kl", {"clip_low": 0.06, "clip_high": 0.2}, [True, False, False, True]),
        ("dppo_kl", {"clip_low": 0.2, "clip_high": 0.06}, [False, False, True, True]),
    ],
)
def test_dppo_bounds_each_side_by_its_own_key(name, clips, inside):
    """Probabilities of 0.5 that are 0.7, 0.9, 0.3 and (against its advantage) 0.35 now."""
    row = sample(np.log([0.7, 0.9, 0.3, 0.35]), [np.log(0.5)] * 4, [1.0, 1.0, -1.0, 1.0], [1] * 4)
    _, (gradient,), _ = packed([row], LossConfig(name=name, **clips))
    np.testing.assert_array_equal(gradient != 0, inside)


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"name": "dro"}])
def test_samples_without_advantages_move_other_terms(settings):
    loss = policy_gradient(LossConfig(**settings), False)
    rows = ([0, 0], [1, 1]), ([0, 1], [1, 1]), ([0, 1], [0, 0])
    made = [sample([-1.0, -1.0], [-1.0, -1.0], *row)[0] for row in rows]
    assert list(map(loss.has_gradient, made)) == [bool(settings), True, False]


@pytest.mark.parametrize(("keys", "third"), [({}, 0), ({"cov_high": 4.0}, -2)])
def test_clip_cov_draws_unclipped_tokens_between_its_limits(keys, third):
    """Covariances 1.45 (clipped), 1.45, 4.35 and -1.45: the second is dropped, the third within the limit."""
    rows = [sample([-0.1, -0.1, -3.0, -3.0], [-1.0, -0.1, -3.0, -3.0], [2, 2, -2, 2], [1, 1, 1, 1])]
    loss, (gradient,), _ = packed(rows, LossConfig(name="clip_cov", cov_low=0.5, cov_share=1.0, **keys))
    assert loss == pytest.approx(-(1.2 * 2 + third + 2) / 4)
    np.testing.assert_allclose(gradient, [0, 0, -third / 4, -2 / 4], rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_token_metrics_count_each_token_once(aggregation):
    """A long sequence of which nothing is clipped beside a short one of which all is."""
    made = [
        sample([-1.0] * n, [old] * n, [1] * n, [1] * n, [-1.5] * n)[0] for n, old in ((3, -1.0), (1, -2.0))
    ]
    batch = pack(made, 6, aggregation)
    new = jnp.full(batch.weights.shape, -1.0)
    _, metrics = policy_gradient(LossConfig(), False)(new, 0 * new + 2.0, batch, None)
    names = ("pg_clipfrac", "entropy", "ppo_kl", "sampler_mismatch")
    assert metrics.keys() == {"actor/pg_loss", *(f"actor/{name}" for name in names)}
    assert [float(metrics[f"actor/{name}"]) for name in names] == pytest.approx([1, 8, -1, 4 * 0.5])


def test_log_ratio_is_held_within_20():
    new = columns([0.0])
    loss, _ = policy_gradient(LossConfig(), False)(new, 0.0 * new, batch_of([-1.0], [-500.0]), None)
    assert float(loss) == pytest.approx(np.exp(20.0), rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "difference", "expected"),
    [
        *(("kl", -0.5, 0.5), ("abs", -0.5, 0.5), ("mse", -0.5, 0.125)),
        *(("low_var_kl", difference, np.exp(difference) - difference - 1) for difference in (-0.5, 2.0)),
        *(("low_var_kl", difference, 10.0) for difference in (5.0, -30.0)),  # its limit
    ],
)
def test_kl_estimators(estimator, difference, expected):
    new, reference = columns([-1.0]), columns([-1.0 + difference])
    config = LossConfig(kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01)
    loss, metrics = policy_gradient(config, True)(new, columns([2.0]), batch_of([0.0], [-1.0]), reference)
    assert float(loss) == pytest.approx(0.1 * expected - 0.01 * 2.0, abs=1e-6)
    assert float(metrics["actor/kl_loss"]) == pytest.approx(expected, rel=1e-5)


# --- Whatever the tokens ---

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
EACH = [  # each compiles its own programs
    pytest.param(name, marks=() if name in ("vanilla", "gspo", "kl_cov") else pytest.mark.medium)
    for name in CONFIGS
]


@st.composite
def random_rows(draw, idle=False):
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


@pytest.mark.parametrize("name", EACH)
@few
@hypothesis.given(cases=random_rows(), seed=st.integers(0, 99))
def test_order_and_packing_change_nothing(name, cases, seed):
    made = [sample(*case) for case in cases]
    order = list(np.random.default_rng(seed).permutation(len(made)))
    apart = packed(made, CONFIGS[name], pack_length=10)
    assert_same(packed(made, CONFIGS[name], order=order), apart)


@pytest.mark.parametrize("name", [name for name in EACH if "dro" not in name.values])  # dro pulls all back
@few
@hypothesis.given(cases=random_rows(idle=True))
def test_without_advantages_nothing_moves(name, cases):
    loss, gradients, _ = packed([sample(*case) for case in cases], CONFIGS[name])
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", EACH)
@few
@hypothesis.given(cases=random_rows())
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


@pytest.mark.parametrize("name", EACH)
@few
@hypothesis.given(cases=random_rows())
def test_on_policy_equals_equal_old_logprobs(name, cases):
    """Gradients at ratio 1 too: `on_policy` only saves the pass that would recompute the denominator."""
    apart = packed([sample(new, new, by, mask) for new, _, by, mask in cases], CONFIGS[name])
    stale = packed([sample(*case) for case in cases], CONFIGS[name], on_policy=True)
    assert_same(stale, apart)


@pytest.mark.parametrize("name", EACH)
def test_rounding_of_the_old_logprobs_chooses_no_gradient(name):
    """They come from another program than the new ones: in a first update nothing else is apart."""
    new, by = np.array([-1.0, -2.0, -0.5, -1.0]), [1.0, 1.0, -1.0, 3.0]
    rounding = np.array([2e-6, -2e-6, 1e-6, -1e-6])
    _, (expected,), _ = packed([sample(new, new, by, [1] * 4)], CONFIGS[name])
    for old in (new + rounding, new - rounding):
        _, (actual,), _ = packed([sample(new, old, by, [1] * 4)], CONFIGS[name])
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_ratios_without_bound_stay_finite():
    """Beyond what exp can hold in float32, where the published code overflows."""
    far = [0.0, 0.0], [-500.0, -500.0]
    for name, config in CONFIGS.items():
        for sign in (1.0, -1.0):
            loss, gradients, _ = packed([sample(*far, [sign, sign / 2], [1, 1])], config)
            assert np.isfinite(loss) and np.isfinite(gradients).all(), name


# --- Published values, where they are present ---

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_sum_norm",
    "mean over rows": "sequence_mean",
}
PUBLISHED = {  # of the published losses; others are ours, but for hyphens
    "clip-higher": "vanilla",
    "dual-clip": "vanilla",
    "cispo_verl": "cispo",
    "geo-mean": "gmpo",
} | {name.replace("_", "-"): name for name in LOSSES if name not in ("gmpo", "balance_detached")}
SAME_FLAGS = ("vanilla", "clip-higher", "lld", "balance", "gspo")  # others count other tokens as clipped
KEYS = {
    "gating": "lld_gating",
    "pg_loss_ratio": "balance_ratio",
    "kl_coef": "cov_kl_coef",
    "limit_low": "clip_low",
    "limit_high": "clip_high",
    "beta": "dro_beta",
} | {field.name: field.name for field in fields(LossConfig) if field.name not in ("kl_coef", "aggregation")}
CORRECTIONS = {  # those whose masked tokens leave the mean are scaled to ours, which stay in it
    0: {"importance_cap": 2.0},
    1: {"importance_cap": 2.0, "importance_level": "sequence"},
    4: {"importance_low": 0.5, "importance_high": 2.0},
    5: {"importance_cap": 2.0, "importance_low": 0.2, "importance_high": 2.0},
    7: {"importance_low": 0.5, "importance_high": 2.0, "importance_level": "sequence"},
    # The limits there are those of the weight's inverse.
    6: {"importance_low": 1 / 1.1, "importance_high": 1 / 0.9, "importance_level": "sequence_geometric"},
    8: {"importance_cap": 2.0, "reject_by": "k3", "reject_over": "sequence_max", "reject_above": 0.5},
    9: {"reject_by": "k3", "reject_above": 0.1},
    11: {"reject_by": "k2", "reject_over": "sequence_max", "reject_above": 0.4},
    12: {"importance_cap": 2.0, "importance_low": 0.5, "importance_high": 2.0},
    13: {"importance_cap": 3.0, "importance_low": 0.4, "importance_high": 3.0}
    | {"importance_level": "sequence"},
}


def config_of(case: dict) -> LossConfig:
    settings = case["settings"]
    keys = {ours: settings[key] for key, ours in KEYS.items() if key in settings}
    if "clip_ratio" in settings:
        keys |= {"clip_low": settings["clip_ratio"], "clip_high": settings["clip_ratio"]}
    aggregation = AGGREGATIONS[settings["aggregation"]]
    norm = len(case["inputs"]["mask"][0]) if aggregation == "sequence_sum_norm" else 0
    return LossConfig(name=PUBLISHED[case["loss"]], aggregation=aggregation, length_norm=norm, **keys)


def scale_of(case: dict) -> float:
    """The factor of our loss: theirs may count empty rows, and the Dr. GRPO sum is no mean over rows."""
    trained = sum(any(row) for row in case["inputs"]["mask"])
    aggregation, authors = case["settings"]["aggregation"], case["source"].startswith("CalibAdv")
    if authors and aggregation == "seq-mean-token-sum-norm":
        return trained
    if aggregation == "mean over rows" or (authors and aggregation == "seq-mean-token-sum"):
        return trained / len(case["inputs"]["mask"])
    return 1.0


class Draw:
    """Draws the tokens that the published code drew."""

    def __init__(self, case: dict):
        places = np.argwhere(case["inputs"]["mask"]).tolist()
        self.candidates, self.chosen = (
            [places.index(place) for place in case["expected"][name]] for name in ("candidates", "chosen")
        )

    def choice(self, candidates, count, replace):
        assert list(candidates) == self.candidates and count == len(self.chosen) and not replace
        return np.array(self.chosen)


def compared(case: dict, config: LossConfig, scale: float, *more: str, rng=None) -> dict[str, float]:
    """Compare loss and gradients; return our metrics."""
    names = ("log_prob", "old_log_prob", "advantages", "mask", *more)
    rows = [sample(*row) for row in zip(*(case["inputs"][name] for name in names), strict=True)]
    loss, gradients, metrics = packed(rows, config, rng)
    tolerances = {"rtol": 1e-4, "atol": 1e-5, "err_msg": case["name"]}
    np.testing.assert_allclose(scale * loss, case["expected"]["loss"], **tolerances)
    for gradient, target in zip(gradients, case["expected"]["gradient"], strict=True):
        np.testing.assert_allclose(scale * gradient, target, **tolerances)
    return metrics


@pytest.fixture(scope="module")
def published(shared):
    return json.loads((shared / "golden" / "losses.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values_and_gradients(published, name):
    cases = [case for case in published if case["loss"] == name]
    assert len(cases) == 6
    for case in cases:
        rng = Draw(case) if case["settings"].get("deterministic") is False else None
        metrics = compared(case, config_of(case), scale_of(case), rng=rng)
        if name in SAME_FLAGS:
            fraction = metrics["actor/pg_clipfrac"] / np.sum(case["inputs"]["mask"])
            assert fraction == pytest.approx(case["expected"]["clip_fraction"], abs=1e-6)


@pytest.mark.parametrize("number", CORRECTIONS)
def test_published_corrections_between_sampler_and_learner(published, number):
    (case,) = [case for case in published if case["name"] == f"rollout-correction_{number}"]
    config = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, **CORRECTIONS[number])
    count, accepted = np.sum(case["inputs"]["mask"]), np.sum(case["expected"]["kept_mask"])
    metrics = compared(case, config, count / accepted, "rollout_log_prob")
    if "reject" in case["settings"]:
        assert metrics["actor/sampler_masked"] == count - accepted
