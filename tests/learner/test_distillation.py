"""The teacher's part of the loss against formulas by hand: weights, gradients, clip, packing, devices."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import NARROW, mesh_of, row_logits, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig, TeacherConfig
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner import objective
from calibadv_jax.learner.batching import Sample, content_hash, pack
from calibadv_jax.learner.distillation import guided_samples, teacher_logprobs
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import teacher_terms
from calibadv_jax.learner.step import learn, make_sample

VOCAB = NARROW["vocab_size"]
POLICY = tiny(NARROW)
QUESTION = Question("q", "?", ("x",), "toy")
TEACHER = TeacherConfig(policy="initial")
AS_LOSS = replace(TEACHER, acts_on="loss")
LONGEST = 8  # tokens of a sequence


# One learner and one loss for equal settings, whose programs are compiled once.
policy_gradient = functools.cache(objective.policy_gradient)


@functools.cache
def make_learner(mesh=None, rows=1, **options):
    return Learner(POLICY, optax.sgd(1.0), mesh or single_device(), LearnerOptions(rows, **options))


def gradient_of(learner, samples, teacher, weights=None, loss=LossConfig(), on_policy=True):  # noqa: B008
    """The gradient of an update at fresh parameters; the learning rate is 1."""
    state = learner.init(init_params(POLICY, learner.mesh, 0))
    before = jax.device_get(state["params"])
    batch = pack(samples, 16, weights=weights)
    state, metrics = learner.update(state, [batch], policy_gradient(loss, on_policy, teacher))
    after = jax.device_get(state["params"])
    return jax.tree.map(np.subtract, before, after), metrics


def logprobs_of(params, tokens):
    """Log-probabilities of tokens 1 … of a sequence, [T - 1]."""
    return np.asarray(row_logprobs(params, padded(tokens, np.int32)))[: len(tokens) - 1]


@jax.jit
def row_logprobs(params, row):
    """Log-probabilities of tokens 1 … of a row, [LONGEST - 1]."""
    table = jax.nn.log_softmax(row_logits(POLICY, params, row[None])[0, :-1].astype(jnp.float32))
    return jnp.take_along_axis(table, row[1:, None], axis=-1)[:, 0]


def padded(values, dtype=np.float32):
    """Values of a sequence's tokens, and zeros behind them: sequences of all lengths share programs."""
    row = np.zeros(LONGEST, dtype)
    row[: len(values)] = values
    return row


def sample_of(tokens, teacher, prompt=2, advantage=0.0, coef=1.0, old=None):
    tokens = np.asarray(tokens, np.int32)
    mask = np.arange(len(tokens)) >= prompt
    values = np.zeros(len(tokens), np.float32)
    taught = values.copy()
    taught[mask] = teacher
    denominator = values.copy()
    denominator[mask] = 0.0 if old is None else old
    return Sample(
        tokens,
        mask,
        np.where(mask, advantage, 0).astype(np.float32),
        denominator,
        teacher_logprobs=taught,
        teacher_weights=np.where(mask, coef, 0).astype(np.float32),
    )


SAMPLES = [
    sample_of([3, 1, 5, 7, 2], [-1.0, -2.5, -0.3], coef=0.5),
    sample_of([3, 1, 9, 4], [-4.0, -2.0], coef=0.5),
]


def by_hand(samples, teacher=TEACHER):
    """Σ coef · clip(lp - teacher) ∇lp / N, with lp from whole sequences, unpacked."""
    params = init_params(POLICY, single_device(), 0)
    num_trained = sum(int(sample.mask.sum()) for sample in samples)
    total = jax.tree.map(np.zeros_like, params)
    for sample in samples:
        logprobs = logprobs_of(params, sample.tokens)
        gap = np.clip(logprobs - sample.teacher_logprobs[1:], -teacher.clip, teacher.clip)
        factor = sample.mask[1:] * (sample.teacher_weights[1:] * gap - sample.advantages[1:])
        gradient = weighted_gradient(params, padded(sample.tokens, np.int32), padded(factor / num_trained))
        total = jax.tree.map(np.add, total, jax.device_get(gradient))
    return total


@jax.jit
@jax.grad
def weighted_gradient(params, row, weights):
    """∇ of the weighted sum of a row's log-probabilities; the weight of token t + 1 stands at t."""
    return jnp.sum(weights[:-1] * row_logprobs(params, row))


@pytest.mark.parametrize("teacher", [TEACHER, AS_LOSS])
@pytest.mark.parametrize("advantage", [0.0, 1.5])
def test_gradient_is_the_one_by_hand(teacher, advantage):
    """The teacher alone, and beside a reward; as an advantage and as a term of the loss they are the same."""
    samples = [replace(sample, advantages=sample.mask * np.float32(advantage)) for sample in SAMPLES]
    gradient, metrics = gradient_of(make_learner(), samples, teacher)
    close_in_norm(gradient, by_hand(samples), 1e-5)
    params = init_params(POLICY, single_device(), 0)
    gaps = []
    for sample in samples:
        mask = sample.mask[1:]
        gaps.append(logprobs_of(params, sample.tokens)[mask] - sample.teacher_logprobs[1:][mask])
    assert metrics["teacher/kl"] == pytest.approx(float(np.concatenate(gaps).sum()), rel=1e-5)
    assert metrics["teacher/guided_share"] == 5  # sums: `learn` divides by the trained tokens
    assert ("teacher/loss" in metrics) == (teacher is AS_LOSS)


@pytest.mark.parametrize("teacher", [TEACHER, AS_LOSS])
def test_expected_gradient_is_that_of_the_divergence(teacher):
    """Each possible next token, weighted by its probability: the gradient of Σ p log(p / q), by hand."""
    prompt = [3, 1]
    params = init_params(POLICY, single_device(), 0)
    rng = np.random.default_rng(0)
    other = np.asarray(jax.nn.log_softmax(rng.normal(size=VOCAB)), np.float32)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def divergence(params):
        logits = row_logits(POLICY, params, jnp.asarray([prompt], jnp.int32))[0, -1]
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        probabilities = jnp.exp(logprobs)
        return jnp.sum(probabilities * (logprobs - other)), probabilities

    expected_gradient, probabilities = jax.device_get(divergence(params))
    samples = [sample_of([*prompt, token], [other[token]]) for token in range(VOCAB)]
    weights = [sample.mask * probabilities[token] for token, sample in enumerate(samples)]
    gradient, metrics = gradient_of(make_learner(), samples, teacher, weights)
    close_in_norm(gradient, expected_gradient, 1e-5)
    if teacher is AS_LOSS:  # mse: half the squared difference, not the divergence
        expected = float(np.sum(probabilities * (np.log(probabilities) - other) ** 2) / 2)
        assert metrics["teacher/loss"] == pytest.approx(expected, rel=1e-5)


def test_large_differences_count_as_clip_and_keep_their_gradient():
    samples = [sample_of([3, 1, 5, 7], [-9999.0, -1.0])]
    clipped = replace(TEACHER, clip=2.0)
    for teacher in (clipped, replace(clipped, acts_on="loss")):
        gradient, _ = gradient_of(make_learner(), samples, teacher)
        close_in_norm(gradient, by_hand(samples, clipped), 1e-5)
    batch = pack(samples, 16)
    values = {}
    for estimator in ("kl", "abs", "mse"):
        teacher = replace(AS_LOSS, clip=2.0, estimator=estimator)
        values[estimator] = float(teacher_terms(batch, jnp.zeros_like(batch.weights), teacher)[0, 1])
    assert values == {"kl": 2.0, "abs": 2.0, "mse": 2.0}


def test_advantage_is_clipped_by_the_loss_and_uses_the_old_policy():
    """Off policy: a token whose ratio is far above 1 has no gradient if the teacher likes it."""
    params = init_params(POLICY, single_device(), 0)
    logprobs = logprobs_of(params, [3, 1, 5, 7])[1:]
    loss = LossConfig(old_logprobs="sampler")
    liked = sample_of([3, 1, 5, 7], logprobs + 5, old=logprobs - 1)  # ratio e, above 1.2
    gradient, _ = gradient_of(make_learner(), [liked], TEACHER, loss=loss, on_policy=False)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) == 0
    # Below both bounds: A r ∇lp with A = teacher - old and not teacher - lp.
    mild = sample_of([3, 1, 5, 7], logprobs + 0.5, old=logprobs - 0.1)
    gradient, _ = gradient_of(make_learner(), [mild], TEACHER, loss=loss, on_policy=False)
    # The mean over tokens 2 and 3.
    weights = np.array([0, -0.6 * np.exp(0.1) / 2, -0.6 * np.exp(0.1) / 2])
    expected = weighted_gradient(params, padded([3, 1, 5, 7], np.int32), padded(weights))
    close_in_norm(gradient, jax.device_get(expected), 1e-5)


@pytest.mark.parametrize("teacher", [TEACHER, AS_LOSS])
@pytest.mark.parametrize("shares", [False, True])
def test_rows_devices_and_shared_prefixes_change_nothing(teacher, shares):
    samples = SAMPLES * 2 + [sample_of([3, 1, 9, 4, 4], [-1.0, -1.0, -3.0], advantage=1.0)]
    loss = policy_gradient(LossConfig(), True, teacher)
    gradients = []
    for mesh, rows, shared in ((single_device(), 1, False), (mesh_of(2, fsdp=2), 2, shares)):
        learner = make_learner(mesh, rows, shares_prefixes=shared, pack_length=16)
        config = LearnerConfig(pack_length=16, microbatch_rows=rows, row_widths=1, share_prefixes=shared)
        state = learner.init(init_params(POLICY, mesh, 0))
        before = jax.device_get(state["params"])
        result = learn(learner, state, samples, config, loss, np.random.default_rng(0))
        after = jax.device_get(result.state["params"])
        gradients.append(jax.tree.map(np.subtract, before, after))
        assert result.metrics["teacher/guided_share"] == 1
    close_in_norm(gradients[0], gradients[1], 1e-5)
    close_in_norm(gradients[0], by_hand(samples), 1e-5)


def test_samples_without_advantage_are_computed_where_the_teacher_guides():
    loss = policy_gradient(LossConfig(), True, TEACHER)
    guided, unguided = sample_of([3, 1, 5], [-1.0]), sample_of([3, 1, 5], [-1.0], coef=0.0)
    assert loss.has_gradient(guided) and not loss.has_gradient(unguided)
    assert content_hash([guided]) != content_hash([unguided])


# --- Which tokens are guided ---


def trajectory(score, *turns):
    """Turns of (sampled tokens, observed tokens, the teacher's log-probabilities or None)."""
    made = []
    for sampled, observed, values in turns:
        taught = None if values is None else np.asarray(values, np.float32)
        ids = np.arange(sampled, dtype=np.int32)
        observation = np.arange(observed, dtype=np.int32)
        made.append(
            Turn("search", ids, np.zeros(sampled), observation_ids=observation, teacher_logprobs=taught)
        )
    return Trajectory(QUESTION, np.arange(2, dtype=np.int32), made, answer_score=score)


def guided(one, advantages, **keys):
    config = replace(TEACHER, **keys)
    sample = make_sample(one, np.asarray(advantages, np.float32))
    (made,) = guided_samples([sample], [one], config, 0.25)
    return made


TWO_TURNS = ((2, 3, [-0.1, -0.2]), (1, 0, [-0.3]))


def test_teacher_logprobs_lie_at_the_sampled_tokens():
    made = guided(trajectory(0.0, *TWO_TURNS), [1, 1, 0, 0, 0, -2])
    np.testing.assert_allclose(made.teacher_logprobs, [0, 0, -0.1, -0.2, 0, 0, 0, -0.3])
    assert made.teacher_weights.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0, 0.25]
    assert made.advantages.tolist() == [0, 0, 1, 1, 0, 0, 0, -2]
    alone = guided(trajectory(0.0, *TWO_TURNS), [1, 1, 0, 0, 0, -2], reward_weight=0.0)
    assert not alone.advantages.any() and alone.teacher_weights.any()


def test_failed_trajectories_and_negative_turns_are_guided_alone():
    advantages = [1, 1, 0, 0, 0, -2]
    for score, weights in ((0.4, [0.25, 0.25, 0.25]), (0.5, [0, 0, 0])):
        one = trajectory(score, *TWO_TURNS)
        made = guided(one, advantages, guides="failed", failed_below=0.5)
        assert made.teacher_weights[made.mask].tolist() == weights
    one = trajectory(1.0, *TWO_TURNS)
    made = guided(one, advantages, guides="negative")
    assert made.teacher_weights[made.mask].tolist() == [0, 0, 0.25]


def test_trajectory_that_was_not_scored_has_no_weight():
    one = trajectory(0.0, (2, 3, None), (1, 0, None))
    made = guided(one, [1, 1, 0, 0, 0, -2])
    assert not made.teacher_weights.any() and made.advantages[2] == 1
    assert teacher_logprobs(one) is None and teacher_logprobs(trajectory(0.0)) is None


def test_weight_moves_evenly_and_stays():
    config = replace(TEACHER, coef=1.0, coef_end=0.2, coef_steps=4)
    assert [config.coef_at(step) for step in (0, 1, 2, 4, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert TEACHER.coef_at(100) == 1.0
