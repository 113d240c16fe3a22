"""The importance treatment of demonstrations against formulas by hand: gradients, clipping, other terms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import NARROW, row_logits, single_device, tiny

from calibadv_jax.config import DemonstrationsConfig, LearnerConfig, LossConfig
from calibadv_jax.learner import objective
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import shaped_terms
from calibadv_jax.learner.step import learn

POLICY = tiny(NARROW)
RATIO = DemonstrationsConfig(file="d")
SHAPED = DemonstrationsConfig(file="d", importance="shaped", gamma=0.3)
LONGEST = 8  # tokens of a sample
SMALL = LearnerConfig(pack_length=16, microbatch_rows=1, row_widths=1)


# One learner and one loss for equal settings, whose programs are compiled once.
policy_gradient = cache(objective.policy_gradient)


@cache
def make_learner():
    return Learner(POLICY, optax.sgd(1.0), single_device(), LearnerOptions(1, pack_length=16))


def sample_of(tokens, advantage, is_demonstration, logprobs=-1.0):
    tokens = np.asarray(tokens, np.int32)
    mask = np.arange(len(tokens)) >= 2
    sampler = np.where(mask, 0.0 if is_demonstration else logprobs, 0.0).astype(np.float32)
    advantages = np.where(mask, advantage, 0).astype(np.float32)
    return Sample(tokens, mask, advantages, sampler, prompt=2, is_demonstration=is_demonstration)


SAMPLED = sample_of([3, 1, 5, 7, 2], -0.5, False)
SHOWN = sample_of([3, 1, 9, 4], 1.5, True)
DISLIKED = sample_of([3, 1, 8], -0.7, True)
SAMPLES = [SAMPLED, SHOWN, DISLIKED]


def logprobs_of(params, sample):
    """Log-probabilities of a sample's trained tokens, from the sequence by itself."""
    return np.asarray(row_logprobs(params, row_of(sample)))[np.flatnonzero(sample.mask) - 1]


def row_of(sample):
    """A sample's tokens, and zeros behind them: samples of all lengths share programs."""
    return np.pad(sample.tokens, (0, LONGEST - len(sample.tokens)))


@jax.jit
def row_logprobs(params, row):
    """Log-probabilities of tokens 1 … of a row, [LONGEST - 1]."""
    table = jax.nn.log_softmax(row_logits(POLICY, params, row[None])[0, :-1].astype(jnp.float32))
    return jnp.take_along_axis(table, row[1:, None], axis=-1)[:, 0]


def stepped(demonstrations, loss=LossConfig(), config=SMALL, samples=SAMPLES):  # noqa: B008
    """The gradient of a step at fresh parameters (the learning rate is 1), and its result."""
    learner = make_learner()
    state = learner.init(init_params(POLICY, learner.mesh, 0))
    before = jax.device_get(state["params"])
    on_policy = loss.old_logprobs == "recompute" and not config.minibatch_size and config.epochs == 1
    function = policy_gradient(loss, on_policy, demonstrations=demonstrations)
    result = learn(learner, state, samples, config, function, np.random.default_rng(0))
    after = jax.device_get(result.state["params"])
    return jax.tree.map(np.subtract, before, after), result


def by_hand(factors):
    """∇ of -Σ A · factor(lp) / N, with the log-probabilities of whole sequences."""
    params = init_params(POLICY, single_device(), 0)
    num_trained = sum(int(sample.mask.sum()) for sample in SAMPLES)

    total = jax.tree.map(np.zeros_like, params)
    for sample, factor in zip(SAMPLES, factors, strict=True):
        weights = np.zeros(LONGEST - 1, np.float32)
        weights[np.flatnonzero(sample.mask) - 1] = -sample.advantages[sample.mask] / num_trained
        gradient = weighted_gradient(params, row_of(sample), weights, factor)
        total = jax.tree.map(np.add, total, jax.device_get(gradient))
    return total


@partial(jax.jit, static_argnums=3)
@jax.grad
def weighted_gradient(params, row, weights, factor):
    """∇ of Σ weight · factor(lp) over the tokens of a row."""
    return jnp.sum(weights * factor(row_logprobs(params, row)))


def ratio(logprobs):
    """exp(lp - sg(lp)): 1, with the gradient of lp."""
    return jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))


def clipped(logprobs):
    return 0.0 * logprobs


def shaped(logprobs):
    return jnp.exp(logprobs) / (jnp.exp(logprobs) + 0.3)


@pytest.mark.parametrize(
    ("demonstrations", "factor"), [(RATIO, ratio), (SHAPED, shaped)], ids=["ratio", "shaped"]
)
def test_gradient_is_the_one_by_hand(demonstrations, factor):
    """Sampled tokens have the ratio either way; one step on policy."""
    gradient, _ = stepped(demonstrations)
    close_in_norm(gradient, by_hand([ratio, factor, factor]), 1e-5)


def test_ratio_starts_at_one_although_the_sampler_is_the_denominator_of_others():
    """old_logprobs=sampler: sampled tokens are far from it, and clipped; demonstrations are not."""
    loss = LossConfig(old_logprobs="sampler", importance_cap=2.0)
    far = replace(SAMPLED, advantages=-SAMPLED.advantages, logprobs=SAMPLED.mask * np.float32(-9.0))
    gradient, result = stepped(RATIO, loss, samples=[far, SHOWN, DISLIKED])
    expected = by_hand([clipped, ratio, ratio])
    close_in_norm(gradient, expected, 1e-5)
    assert result.metrics["actor/pg_clipfrac"] == pytest.approx(3 / 6)
    for sample in result.samples[1:]:
        expected = np.zeros(len(sample.tokens), np.float32)
        expected[sample.mask] = logprobs_of(init_params(POLICY, single_device(), 0), sample)
        np.testing.assert_allclose(sample.old_logprobs, expected, atol=1e-5)
        np.testing.assert_array_equal(sample.logprobs, sample.old_logprobs)
    np.testing.assert_array_equal(result.samples[0].logprobs, far.logprobs)


def test_correction_for_the_sampler_leaves_demonstrations_alone():
    """Masks of tokens that learner and sampler see differently: the sampled ones go, the others stay."""
    loss = LossConfig(importance_low=0.5, importance_high=2.0)
    far = replace(SAMPLED, logprobs=SAMPLED.mask * np.float32(-30.0))
    gradient, result = stepped(RATIO, loss, samples=[far, SHOWN, DISLIKED])
    close_in_norm(gradient, by_hand([clipped, ratio, ratio]), 1e-5)
    assert result.metrics["actor/sampler_masked"] == pytest.approx(3 / 6)


def test_logprob_of_demonstrations_is_logged_and_kept():
    params = init_params(POLICY, single_device(), 0)
    expected = np.concatenate([logprobs_of(params, SHOWN), logprobs_of(params, DISLIKED)])
    _, result = stepped(RATIO)
    assert result.metrics["demonstrations/logprob"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert result.samples[0].old_logprobs is None  # not needed on policy
    _, result = stepped(RATIO, samples=[SAMPLED])
    assert "demonstrations/logprob" not in result.metrics


def test_later_updates_of_a_step_are_clipped_by_the_ratio_only():
    """Two epochs: the first moves the tokens; the ratio then clips, the shape does not."""
    config = replace(SMALL, epochs=2)
    tight = LossConfig(clip_low=1e-6, clip_high=1e-6)
    _, by_ratio = stepped(RATIO, tight, config, samples=[SHOWN])
    _, by_shape = stepped(SHAPED, tight, config, samples=[SHOWN])
    assert by_ratio.metrics["actor/pg_clipfrac"] > 0
    assert by_shape.metrics["actor/pg_clipfrac"] == 0.0


def test_divergence_to_the_reference_counts_sampled_tokens_only():
    """Its estimators hold for tokens that the policy sampled."""
    learner = make_learner()
    params = init_params(POLICY, learner.mesh, 0)
    reference = jax.tree.map(lambda leaf: 1.5 * leaf, params)
    loss = LossConfig(kl_coef=0.5)
    values = {}
    for name, samples in {"both": [SAMPLED, SHOWN], "marked": [SAMPLED]}.items():
        state = learner.init(init_params(POLICY, learner.mesh, 0))
        function = policy_gradient(loss, True, demonstrations=RATIO)
        _, metrics = learner.update(state, [pack(samples, 16)], function, reference)
        num_trained = sum(int(sample.mask.sum()) for sample in samples)
        values[name] = metrics["actor/kl_loss"] * num_trained
    assert values["both"] == pytest.approx(values["marked"], rel=1e-5) and values["both"] > 1e-3


def test_shape_has_luffys_gradient_and_is_stable():
    """A γ p / (p + γ)²: largest at p = γ; finite where p underflows."""
    logprobs = jnp.log(jnp.array([1e-3, 0.1, 0.9]))
    for gamma in (0.1, 0.5):
        gradient = jax.jit(jax.grad(lambda lp, g=gamma: shaped_terms(lp, jnp.ones(3), g).sum()))(logprobs)
        p = np.exp(np.asarray(logprobs))
        np.testing.assert_allclose(gradient, -gamma * p / (p + gamma) ** 2, rtol=1e-5)
    extreme = jnp.array([-200.0, 0.0])
    assert jnp.isfinite(jax.grad(lambda lp: shaped_terms(lp, jnp.ones(2), 0.1).sum())(extreme)).all()
    np.testing.assert_allclose(shaped_terms(extreme, jnp.array([2.0, 2.0]), 0.1)[1], -2 / 1.1, rtol=1e-6)


def test_rows_without_demonstrations_have_no_column_of_them():
    assert pack([SAMPLED], 16).demonstrated is None
    batch = pack(SAMPLES, 16)
    is_trained = batch.weights > 0
    is_shown = (batch.demonstrated > 0) & is_trained
    np.testing.assert_array_equal(is_shown, is_trained & (batch.advantages != -0.5))
