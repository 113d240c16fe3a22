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
from calibadv_jax.learner.losses import TOKEN_METRICS, policy_gradient
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


@pytest.mark.medium
@pytest.mark.parametrize("change", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}])
def test_other_terms_of_the_loss_keep_every_sample(learner, state, change, monkeypatch):
    loss = policy_loss(True, **change)
    seen = rows_of(learner, monkeypatch)
    reference = init_params(learner.policy, learner.mesh, 1) if loss.config.kl_coef else None
    metrics = learn(learner, state, samples(), config(), loss, rng(), reference).metrics
    assert int((seen[0].segment_ids > 0).sum()) == sum(len(sample.tokens) for sample in samples())
    assert metrics["actor/computed_share"] == pytest.approx(1.0)


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


@pytest.mark.parametrize(
    "aggregation", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.medium)]
)
def test_step_entropy_is_of_computed_tokens(learner, state, aggregation):
    """Mini-batches of one sample, some of which compute nothing."""
    loss, every = policy_loss(True, aggregation=aggregation), samples()
    frozen = Learner(learner.policy, optax.sgd(0.0), learner.mesh, LearnerOptions(2))

    def start():
        return frozen.init(init_params(learner.policy, learner.mesh, 0))

    computed = [sample for index, sample in enumerate(every) if index not in (1, 2, 6)]
    _, direct = frozen.update(start(), [pack(computed, ROW)], loss)
    metrics = learn(frozen, start(), every, config(minibatch_size=1), loss, rng()).metrics
    assert metrics["actor/updates"] == 8
    for name in TOKEN_METRICS & direct.keys():
        mean = direct[name] / sum(int(sample.mask.sum()) for sample in computed)
        assert metrics[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name
    assert metrics["actor/entropy"] > 1


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
