"""From trajectories to updates: what a sample holds, which batches a step makes, what they are given."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.losses import on_policy_only, policy_gradient
from calibadv_jax.learner.step import learn, make_sample, mini_batches

QUESTION = Question("q", "?", ("x",), "test")
ROW = 8


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


def test_prompt_and_response_end_to_end():
    turns = [
        Turn("search", ints(5, 6), floats(-0.5, -0.6), observation_ids=ints(7)),
        Turn("answer", ints(8), floats(-0.8)),
    ]
    trained = Trajectory(QUESTION, ints(1, 2, 3), turns)
    silent = Trajectory(QUESTION, ints(1), [Turn("unfinished", ints(), floats(), observation_ids=ints(4))])
    advantages = [floats(0), floats(1.5, 1.5, 0, -2)]
    untrained, sample = map(make_sample, [silent, trained], advantages)
    assert untrained.tokens.tolist() == [1, 4] and not untrained.mask.any()
    assert sample.tokens.tolist() == [1, 2, 3, 5, 6, 7, 8] and sample.tokens.dtype == np.int32
    assert sample.mask.tolist() == [False, False, False, True, True, False, True]
    assert sample.advantages.tolist() == [0, 0, 0, 1.5, 1.5, 0, -2]
    np.testing.assert_array_equal(sample.logprobs, floats(0, 0, 0, -0.5, -0.6, 0, -0.8))
    assert sample.old_logprobs is None


def trajectory(*sampled):
    return Trajectory(QUESTION, ints(1, 2, 3), [Turn("answer", ints(*sampled), floats(*sampled))])


def test_samples_return_in_order_with_recomputed_logprobs():
    """Past one without a sampled token and one whose advantage is 0, of which none are computed."""
    trajectories = [trajectory(5, 6), trajectory(), trajectory(7), trajectory(8, 9)]
    advantages = [floats(1, 1), floats(), floats(0), floats(-1, -1)]
    made = list(map(make_sample, trajectories, advantages))
    for size, recomputed in ((0, []), (2, [0, 3])):
        config = LearnerConfig(minibatch_size=size, row_length=ROW, row_widths=1)
        back = learned(Notebook(), made, config, LossConfig()).samples
        assert [sample.tokens is other.tokens for sample, other in zip(back, made, strict=True)] == [True] * 4
        assert [index for index, sample in enumerate(back) if sample.old_logprobs is not None] == recomputed
    np.testing.assert_allclose(back[0].old_logprobs, [0, 0, 0, -1.05, -1.06], rtol=1e-6)
    np.testing.assert_allclose(back[3].old_logprobs[3:], [-1.08, -1.09], rtol=1e-6)


def test_samples_without_trained_tokens_are_not_trained():
    trajectories = [trajectory(4, 5), trajectory(), trajectory(6)]
    made = [
        make_sample(trajectory, np.ones(len(trajectory.response_ids), np.float32))
        for trajectory in trajectories
    ]
    config = LearnerConfig(minibatch_size=1, epochs=2, row_length=ROW, row_widths=1)
    for loss in (LossConfig(), LossConfig(kl_coef=0.1)):
        notebook = Notebook()
        result = learned(notebook, made, config, loss)
        assert result.metrics["actor/updates"] == len(notebook.updates) == 4
        taught = sorted(tuple(batch.targets[batch.weights > 0]) for batch, *_ in notebook.updates)
        assert taught == [(4, 5), (4, 5), (6,), (6,)]
    nothing = learned(Notebook(), made[1:2], config, LossConfig())
    assert (nothing.state, nothing.metrics, len(nothing.samples)) == ({"params": 1}, {}, 1)


class Notebook:
    """A learner that writes down its batches. Its log-probabilities name the policy and the target."""

    def __init__(self):
        self.updates, self.passes = [], 0

    def update(self, state, batches, loss, reference=None):
        (batch,) = batches
        self.updates.append((batch, loss, reference))
        version = state["params"] + 1
        return {"params": version}, {"actor/loss": float(version)}

    def logprobs(self, params, batch):
        self.passes += 1
        return (-params - batch.targets / 100).astype(np.float32)

    def position_cost(self, length):
        return 1.0


def samples(count=5):
    """Sample i is the tokens 10 i, 10 i + 1, … with its two last ones trained."""
    made = []
    for index in range(count):
        tokens = np.arange(10 * index, 10 * index + 4, dtype=np.int32)
        mask = np.array([False, False, True, True])
        made.append(
            Sample(tokens, mask, np.where(mask, index + 1, 0).astype(np.float32), floats(0, 0, -9, -9))
        )
    return made


def of_prompts(*prompts):
    """A sample for each: its prompt is that token, and its trained one its number, from 100."""
    mask = np.array([False, True])
    values = mask.astype(np.float32)
    return [
        Sample(ints(prompt, 100 + number), mask, values, -values, prompt=1)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("prompts", [[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4], [1, 2, 3, 4] * 3])
def test_groups_stay_whole_in_shuffled_mini_batches(prompts):
    """Wherever their trajectories stand; every one is trained once in each epoch, in another order."""
    made = of_prompts(*prompts)
    config = LearnerConfig(minibatch_size=3, epochs=3, row_length=ROW, row_widths=1, shuffle="groups")
    notebook = Notebook()
    learned(notebook, made, config, LossConfig())
    taught = [(batch.targets[batch.weights > 0] - 100).tolist() for batch, *_ in notebook.updates]
    assert len(taught) == 4 * 3
    assert all(len({prompts[number] for number in numbers}) == 1 for numbers in taught)
    orders = [tuple(prompts[numbers[0]] for numbers in taught[epoch : epoch + 4]) for epoch in (0, 4, 8)]
    assert len(set(orders)) > 1
    for epoch in (0, 4, 8):
        assert sorted(sum(taught[epoch : epoch + 4], [])) == list(range(12))


def test_group_is_cut_only_at_full_mini_batches():
    made = of_prompts(*[1] * 4, *[2] * 4, *[3] * 4)
    config = LearnerConfig(minibatch_size=5, row_length=ROW, row_widths=1, shuffle="groups")
    chosen = list(mini_batches(made, config, np.random.default_rng(0)))
    order = np.concatenate(chosen)
    assert [len(numbers) for numbers in chosen] == [5, 5, 2]
    assert [made[number].tokens[0] for number in order[::4]] != [1, 2, 3]
    for start in range(0, 12, 4):
        assert sorted(order[start : start + 4]) == list(range(order[start], order[start] + 4))


def learned(learner, samples, config, loss, seed=0, reference=None):
    loss = policy_gradient(loss, on_policy_only(loss, config.minibatch_size, config.epochs))
    return learn(learner, {"params": 1}, samples, config, loss, np.random.default_rng(seed), reference)


def go_over(config, loss=None, seed=0, count=5, reference=None):
    notebook = Notebook()
    result = learned(notebook, samples(count), config, loss or LossConfig(), seed, reference)
    state, metrics = result.state, result.metrics
    batches = [sorted({int(first) // 10 for first in b.tokens[b.weights > 0]}) for b, *_ in notebook.updates]
    return notebook, state, metrics, batches


def test_epoch_trains_every_sample_once():
    config = LearnerConfig(minibatch_size=2, epochs=3, row_length=ROW, row_widths=1)
    notebook, state, metrics, batches = go_over(config)
    epochs = [batches[start : start + 3] for start in (0, 3, 6)]
    assert [sorted(sum(epoch, [])) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert [len(batch) for batch in batches] == [2, 2, 1] * 3
    assert len({str(epoch) for epoch in epochs}) == 3
    assert state == {"params": 10}
    assert metrics == {
        "actor/loss": pytest.approx(np.mean(range(2, 11))),
        "actor/updates": 9,
        "actor/computed_share": 1,
        "actor/row_fill": pytest.approx((1 + 1 + 0.5) / 3),  # rows of two samples, and one that is half empty
        "perf/packing": pytest.approx(3 * 8 * ROW / 20),  # microbatches of eight rows for 20 tokens
    }
    assert batches == go_over(config)[3] != go_over(config, seed=1)[3]


class Counting(Notebook):
    """Every token that is computed has an entropy of 1.2 nats."""

    def update(self, state, batches, loss, reference=None):
        state, metrics = super().update(state, batches, loss, reference)
        count = sum(np.count_nonzero(batch.weights) for batch in batches)
        return state, metrics | {"actor/entropy": 1.2 * count, "actor/grad_norm": 2.0}


@pytest.mark.parametrize(("idle", "entropy"), [((), 1.2), ((0, 3), 1.2), ((0, 1, 2, 3), None)])
def test_metrics_are_means_over_computed_tokens(idle, entropy):
    every = samples(4)
    for index in idle:
        every[index].advantages[:] = 0
    config = LearnerConfig(minibatch_size=1, row_length=ROW, row_widths=1)
    metrics = learned(Counting(), every, config, LossConfig()).metrics
    assert (metrics["actor/updates"], metrics["actor/grad_norm"]) == (4, 2)
    assert metrics["actor/computed_share"] == pytest.approx(1 - len(idle) / 4)
    assert metrics.get("actor/entropy") == (entropy and pytest.approx(entropy))
    assert ("actor/loss" in metrics) == ("perf/packing" in metrics) == (entropy is not None)


@pytest.mark.parametrize(
    ("terms", "computed"),
    [({}, [0, 2]), ({"entropy_coef": 0.1}, [0, 1, 2, 3]), ({"kl_coef": 0.1}, [0, 1, 2, 3])],
)
def test_other_loss_terms_compute_samples_without_advantage(terms, computed):
    """With the log-probabilities of the policy before the first update."""
    every, loss = samples(4), LossConfig(**terms)
    for index in (1, 3):
        every[index].advantages[:] = 0
    notebook, config = Notebook(), LearnerConfig(epochs=2, row_length=ROW, row_widths=1)
    learned(notebook, every, config, loss)
    for batch, *_ in notebook.updates:
        trained = batch.weights > 0
        assert sorted({int(first) // 10 for first in batch.tokens[trained]}) == computed
        np.testing.assert_allclose(batch.old_logprobs[trained], -1 - batch.targets[trained] / 100, rtol=1e-6)


def test_one_update_takes_everything():
    _, _, metrics, batches = go_over(LearnerConfig(row_length=ROW, row_widths=1))
    assert batches == [[0, 1, 2, 3, 4]] and metrics["actor/updates"] == 1


@pytest.mark.parametrize(
    ("changes", "old", "recomputed"),
    [
        ({"minibatch_size": 2}, "recompute", True),
        ({"epochs": 2}, "recompute", True),
        ({"minibatch_size": 2}, "sampler", False),
        ({"epochs": 2}, "sampler", False),
        ({}, "sampler", False),
        ({}, "recompute", False),  # the loss takes the current policy's own
    ],
)
def test_old_logprobs_are_computed_before_the_first_update(changes, old, recomputed):
    config = LearnerConfig(row_length=ROW, row_widths=1, **changes)
    loss = LossConfig(old_logprobs=old)
    notebook, *_ = go_over(config, loss)
    assert notebook.passes == int(recomputed)
    on_policy = on_policy_only(loss, config.minibatch_size, config.epochs)
    assert on_policy == (not changes and old == "recompute")
    for batch, *_ in notebook.updates:
        trained = batch.weights > 0
        expected = -1 - batch.targets / 100 if recomputed else np.full(trained.shape, -9.0)
        np.testing.assert_allclose(batch.old_logprobs[trained], expected[trained], rtol=1e-6)
        assert (batch.sampler_logprobs[trained] == -9).all()


def test_every_update_gets_the_loss_and_the_reference():
    reference = {"the": "initial policy"}
    config = LearnerConfig(minibatch_size=2, row_length=ROW, row_widths=1)
    updates = go_over(config, LossConfig(clip_high=0.3), reference=reference)[0].updates
    assert len({loss for _, loss, _ in updates}) == 1
    for _, loss, given in updates:
        assert loss.config.clip_high == 0.3 and given is reference


def test_aggregation_of_the_loss_is_used():
    """One sample of two trained tokens beside one of one."""
    short = Sample(ints(1, 2), np.array([False, True]), floats(0, 1), floats(0, -9))
    for aggregation, expected in (("token_mean", [1 / 3] * 3), ("sequence_mean", [1 / 4, 1 / 4, 1 / 2])):
        notebook = Notebook()
        config, loss = LearnerConfig(row_length=ROW, row_widths=1), LossConfig(aggregation=aggregation)
        learned(notebook, [samples(1)[0], short], config, loss)
        ((batch, *_),) = notebook.updates
        assert batch.tokens.shape == (1, ROW)
        assert sorted(batch.weights[batch.weights > 0]) == pytest.approx(expected)
