"""Every loss against its formula in docs/losses.md, row by row in NumPy, without packing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import batch_of, columns, packed, sample

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.losses import KL_ESTIMATORS, policy_gradient

LOW, HIGH = 0.2, 0.3


def clipped(ratio, advantage, low=LOW, high=HIGH):
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def cispo(rows):
    return [[-a * n * min(max(np.exp(n - o), 1 - LOW), 1 + HIGH) for n, o, a in row] for row in rows]


def gspo(rows):
    ratios = [np.exp(np.mean([n - o for n, o, _ in row])) for row in rows]
    return [[clipped(s, a) for *_, a in row] for s, row in zip(ratios, rows, strict=True)]


def gmpo(rows):
    terms = []
    for row in rows:
        bounded = [min(n - o, HIGH) if a > 0 else max(n - o, -LOW) for n, o, a in row]
        terms.append([-np.mean([a for *_, a in row]) * np.exp(np.mean(bounded))] * len(row))
    return terms


def dual(rows):
    plain = [[(clipped(np.exp(n - o), a), a) for n, o, a in row] for row in rows]
    return [[min(term, -1.5 * a) if a < 0 else term for term, a in row] for row in plain]


def kl_cov(rows):
    flat = np.array([token for row in rows for token in row])
    covariance = (flat[:, 2] - flat[:, 2].mean()) * (flat[:, 0] - flat[:, 0].mean())
    least = sorted(covariance)[-int(0.4 * len(flat))]
    chosen = iter(covariance >= least)
    return [[-a * np.exp(n - o) + 0.7 * next(chosen) * abs(n - o) for n, o, a in row] for row in rows]


def lld(rows):
    falls = [max(0, o - n) for row in rows for n, o, a in row if a > 0]
    count = sum(map(len, rows))
    # The mean over tokens with positive advantages, spread so that the mean over all tokens gives it.
    extra = 0.5 * np.mean(falls)
    terms = [[clipped(np.exp(n - o), a) for n, o, a in row] for row in rows]
    terms[0][0] += extra * count
    return terms


def sapo(rows):
    def gate(ratio, tau):
        return 4 / tau / (1 + np.exp(-tau * (ratio - 1)))

    return [[-a * gate(np.exp(n - o), 2.0 if a > 0 else 3.0) for n, o, a in row] for row in rows]


def dppo_tv(rows):
    """REINFORCE weighted by the capped ratio, without tokens that have moved too far where pushed."""

    def term(n, o, a):
        moved = np.exp(n) - np.exp(o)
        beyond = moved > HIGH if a > 0 else -moved > LOW
        return 0.0 if beyond else -a * min(np.exp(n - o), 1.25) * n

    return [[term(*token) for token in row] for row in rows]


CASES = {
    "vanilla": (dual, {"dual_clip": 1.5}),
    "cispo": (cispo, {}),
    "gspo": (gspo, {"aggregation": "sequence_mean"}),
    "gmpo": (gmpo, {"aggregation": "sequence_mean"}),
    "gpg": (lambda rows: [[-a * n for n, _, a in row] for row in rows], {}),
    "kl_cov": (kl_cov, {"cov_share": 0.4, "cov_kl_coef": 0.7}),
    "lld": (lld, {"lld_coef": 0.5}),
    "sapo": (sapo, {"aggregation": "sequence_mean", "tau_positive": 2.0, "tau_negative": 3.0}),
    "dppo_tv": (dppo_tv, {"ratio_cap": 1.25}),
    "dro": (
        lambda rows: [[-a * n + 0.5 * 0.3 * (n - o) ** 2 for n, o, a in row] for row in rows],
        {"dro_beta": 0.3},
    ),
}


def random_rows(seed=0):
    rng = np.random.default_rng(seed)
    return [
        [(new, new + rng.normal(scale=0.5), rng.normal()) for new in rng.uniform(-3, -0.1, length)]
        for length in (4, 7, 1)
    ]


def made_of(rows, sampler=None):
    columns = [[list(values) for values in zip(*row, strict=True)] + [[1] * len(row)] for row in rows]
    samplers = sampler or [None] * len(rows)
    return [sample(*values, given) for values, given in zip(columns, samplers, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_its_formula(name):
    formula, keys = CASES[name]
    widths = {} if name in ("gpg", "kl_cov", "sapo", "dro") else {"clip_low": LOW, "clip_high": HIGH}
    rows = random_rows()
    loss, _, _ = packed(made_of(rows), LossConfig(name=name, **widths, **keys))
    means = [np.mean(row) for row in formula(rows)]
    whole = np.mean([term for row in formula(rows) for term in row])
    assert loss == pytest.approx(np.mean(means) if "aggregation" in keys else whole, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_sum_norm"])
def test_sums_are_means_over_trajectories(aggregation):
    rows = random_rows()
    norm = 5 if aggregation == "sequence_sum_norm" else 0
    config = LossConfig(name="gpg", aggregation=aggregation, length_norm=norm)
    expected = np.mean([sum(-a * n for n, _, a in row) for row in rows]) / (norm or 1)
    assert packed(made_of(rows), config)[0] == pytest.approx(expected, rel=1e-5)


def test_sequence_importance_weight_is_the_product_of_tokens():
    """Beside others in one row; outside the limits it is masked, but stays in the mean."""
    rows = random_rows()
    shifts = (0.1, -0.2, 1.5)  # the learner's log-probability less the sampler's, of every token
    sampler = [[o - shift for _, o, _ in row] for row, shift in zip(rows, shifts, strict=True)]
    config = LossConfig(name="gpg", importance_level="sequence", importance_cap=1.2, importance_low=0.3)
    loss, gradients, metrics = packed(made_of(rows, sampler), config)
    weights = [1.2, 0.0, 1.2]  # of e^0.4, e^-1.4 and e^1.5
    total = sum(w * -a * n for w, row in zip(weights, rows, strict=True) for n, _, a in row)
    assert loss == pytest.approx(total / 12, rel=1e-5)
    assert metrics["actor/sampler_masked"] == 7 and not gradients[1].any()
    mean = LossConfig(name="gpg", importance_level="sequence_geometric", importance_cap=1.2)
    weights = [np.exp(0.1), np.exp(-0.2), 1.2]
    total = sum(w * -a * n for w, row in zip(weights, rows, strict=True) for n, _, a in row)
    assert packed(made_of(rows, sampler), mean)[0] == pytest.approx(total / 12, rel=1e-5)
    high = LossConfig(name="gpg", importance_high=3.0)
    loss, gradients, metrics = packed(made_of(rows, sampler), high)
    assert metrics["actor/sampler_masked"] == 1 and not gradients[2].any() and gradients[1].all()


@pytest.mark.parametrize("over", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize("by", ["k2", "k3"])
def test_tokens_far_from_the_sampler_are_rejected(by, over):
    """Of three trajectories in one row, by the tokens of each alone."""
    rows = random_rows()
    gaps = [np.linspace(0.1, 0.2, 4), np.linspace(-0.9, 0.1, 7), np.full(1, 0.6)]
    sampler = [
        [o - gap for (_, o, _), gap in zip(row, of, strict=True)] for row, of in zip(rows, gaps, strict=True)
    ]
    each = [0.5 * gap**2 if by == "k2" else np.exp(gap) - 1 - gap for gap in gaps]
    join = {"sequence_sum": np.sum, "sequence_mean": np.mean, "sequence_max": np.max}.get(over)
    whole = [measure if join is None else np.full(len(measure), join(measure)) for measure in each]
    kept = [measure <= 0.15 for measure in whole]
    assert any(mask.any() for mask in kept) and not all(mask.all() for mask in kept)
    config = LossConfig(name="gpg", reject_by=by, reject_over=over, reject_above=0.15)
    loss, gradients, metrics = packed(made_of(rows, sampler), config)
    for gradient, stays in zip(gradients, kept, strict=True):
        np.testing.assert_array_equal(gradient != 0, stays)
    assert metrics["actor/sampler_masked"] == sum(int((~stays).sum()) for stays in kept)


@pytest.mark.parametrize(
    "name", ["vanilla", "cispo", "gspo", "gmpo", "gpg", "sapo", "dppo_tv", "dppo_kl", "dro"]
)
def test_gradient_at_ratio_one_is_reinforces(name):
    """Each token by its own advantage; gmpo has one for all of a trajectory."""
    rows = [[(new, new, advantage) for new, _, advantage in row] for row in random_rows()]
    config = LossConfig(name=name, aggregation="sequence_mean")
    _, gradients, _ = packed(made_of(rows), config)
    for gradient, row in zip(gradients, rows, strict=True):
        advantages = np.array([advantage for *_, advantage in row])
        effective = np.full(len(row), advantages.mean()) if name == "gmpo" else advantages
        np.testing.assert_allclose(gradient, -effective / (3 * len(row)), rtol=1e-5)


def one_row(ratios, advantages, mask=None, sampler=None, level=-1.0):
    new = level + np.log(ratios)
    return [sample(new, [level] * len(ratios), advantages, mask or [1] * len(ratios), sampler)]


def test_dual_clipped_token_counts_as_clipped():
    rows = one_row([4.0, 2.0, 4.0], [-1.0, -1.0, 0.0])
    _, (gradient,), metrics = packed(rows, LossConfig(dual_clip=3.0))
    assert metrics["actor/pg_clipfrac"] == 1 and gradient[0] == 0 and gradient[1] > 0


def test_cispo_drops_positive_advantages_beyond_its_limit():
    rows = one_row([4.0, 2.0, 4.0], [1.0, 1.0, -1.0])
    _, (gradient,), _ = packed(rows, LossConfig(name="cispo", drop_above=3.0))
    np.testing.assert_allclose(gradient, [0, -1.2 / 3, 1.2 / 3], rtol=1e-5)


def test_sequence_importance_weight_counts_trained_tokens():
    rows = one_row([1.0, 1.0], [1.0, 1.0], mask=[1, 0], sampler=[-1.0, -9.0])
    config = LossConfig(importance_level="sequence", importance_cap=5.0)
    assert packed(rows, config)[0] == pytest.approx(-1)


@pytest.mark.parametrize(
    ("name", "clips", "kept"),
    [
        ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.25}, [True, False, False, True]),
        ("dppo_tv", {"clip_low": 0.25, "clip_high": 0.15}, [False, False, True, True]),
        # old × log(old / new) + (1 - old) × log((1 - old) / (1 - new)): 0.087, 0.382, 0.087, 0.049
        ("dppo_kl", {"clip_low": 0.06, "clip_high": 0.2}, [True, False, False, True]),
        ("dppo_kl", {"clip_low": 0.2, "clip_high": 0.06}, [False, False, True, True]),
    ],
)
def test_dppo_bounds_each_side_by_its_own_key(name, clips, kept):
    """Probabilities of 0.5 that are 0.7, 0.9, 0.3 and (against its advantage) 0.35 now."""
    new, advantages = np.log([0.7, 0.9, 0.3, 0.35]), [1.0, 1.0, -1.0, 1.0]
    rows = [sample(new, [np.log(0.5)] * 4, advantages, [1] * 4)]
    _, (gradient,), _ = packed(rows, LossConfig(name=name, **clips))
    np.testing.assert_array_equal(gradient != 0, kept)


def test_lld_gating_reads_positive_advantages_alone():
    """The second token fell, but its advantage is negative: there is no penalty."""
    rows = one_row([1.0, 0.9], [1.0, -1.0])
    gated, plain = (LossConfig(name="lld", lld_coef=0.5, lld_gating=gating) for gating in (True, False))
    np.testing.assert_allclose(packed(rows, gated)[1][0], [-1 / 2, 0.9 / 2], rtol=1e-5)
    np.testing.assert_allclose(packed(rows, plain)[1][0], [-1 / 2 - 0.5, 0.9 / 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "moves"),
    [({}, False), ({"kl_coef": 0.1}, True), ({"entropy_coef": 0.1}, True), ({"name": "dro"}, True)],
)
def test_samples_without_advantages_move_other_terms(settings, moves):
    loss = policy_gradient(LossConfig(**settings), False)
    (nothing, _), (advantaged, _), (untrained, _) = (
        sample([-1.0, -1.0], [-1.0, -1.0], advantages, mask)
        for advantages, mask in (([0, 0], [1, 1]), ([0, 1], [1, 1]), ([0, 1], [0, 0]))
    )
    assert loss.is_moved_by(nothing) == moves
    assert loss.is_moved_by(advantaged) and not loss.is_moved_by(untrained)


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


def test_truncated_importance_sampling_caps_the_weight():
    """The cap has no floor: e**-3 stays e**-3, for positive advantages and for negative ones."""
    old, gaps = [-4.0] * 3, np.array([np.log(4.0), -3.0, -1.0])
    batch, new = batch_of([1.0, 1.0, -2.0], old, (old - gaps).tolist()), columns(old)
    loss, metrics = policy_gradient(LossConfig(importance_cap=2.0), False)(new, 0.0 * new, batch, None)
    assert float(loss) == pytest.approx(-(2.0 + np.exp(-3.0) - 2 * np.exp(-1.0)) / 3, abs=1e-6)
    assert float(metrics["actor/sampler_mismatch"]) == pytest.approx(np.log(4) + 4, abs=1e-6)


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
