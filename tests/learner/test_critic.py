"""The critic's loss against published values and gradients; its values where a policy has probabilities."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from loss_cases import packed, sample
from tiny_policy import NARROW, mesh_of, single_device, tiny

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner import critic as critics
from calibadv_jax.learner.critic import CriticLearner, ValueLoss, critic_params, learn_values, make_critic
from calibadv_jax.learner.learner import LearnerOptions, init_params
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.weights import flatten

CONFIG = NARROW | {"num_key_value_heads": 2, "tie_word_embeddings": False}


def value_case(case):
    """Our loss and gradient [row][token] of a published case."""
    columns = [case["inputs"][name] for name in ("values", "old_values", "returns", "mask")]
    cases = [sample(*row) for row in zip(*columns, strict=True)]
    loss, gradients, metrics = packed(cases, LossConfig(), loss=ValueLoss(case["settings"]["clip_value"]))
    return loss, metrics["critic/clipfrac"], gradients


def test_published_values_and_gradients(shared):
    cases = json.loads((shared / "golden" / "losses.json").read_text(encoding="utf-8"))
    chosen = [c for c in cases if c["loss"] == "value" and c["settings"]["aggregation"] == "token-mean"]
    assert len(chosen) == 4
    for case in chosen:
        loss, clipped, gradients = value_case(case)
        expected = [case["expected"][name] for name in ("loss", "clip_fraction")]
        np.testing.assert_allclose([loss, clipped], expected, rtol=1e-5, atol=1e-6)
        for gradient, target in zip(gradients, case["expected"]["gradient"], strict=True):
            np.testing.assert_allclose(gradient, target, rtol=1e-4, atol=1e-6)


def critic_sample(seed, score):
    """A sample of two turns with an observation between them; every return is the score."""
    ids = np.random.default_rng(seed).integers(0, 16, (3, 3)).astype(np.int32)
    nothing = np.zeros(3, np.float32)
    turns = [Turn("search", ids[0], nothing, observation_ids=ids[1][:2]), Turn("answer", ids[2], nothing)]
    question = Question("q", "?", ("a",), "test")
    trajectory = Trajectory(question, np.arange(2, dtype=np.int32), turns)
    return critics.value_sample(trajectory, np.zeros(6, np.float32), np.full(6, score))


def test_critic_shares_parameters_except_the_head():
    policy, mesh = tiny(CONFIG), mesh_of(fsdp=4, tensor=2)
    critic, params = make_critic(policy), init_params(policy, mesh, 0)
    value_params, shardings = (
        critic_params(critic, params, mesh),
        param_shardings(critic.abstract_params, mesh),
    )
    assert set(value_params) == (set(params) - {"lm_head"}) | {"value_head"}
    assert value_params["layers"] is params["layers"]
    assert not np.asarray(value_params["value_head"]["kernel"]).any()
    assert shardings["layers"]["mlp"]["up"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert jax.tree.map(lambda leaf: leaf.sharding, value_params) == shardings


@partial(jax.jit, static_argnums=0)
def row_values(critic, params, row):
    """Return the values float32 [1, T] of a row, int32 [1, T], that is not packed."""
    decoder = critic.merge(params)
    return decoder.values(decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))


@pytest.mark.medium
@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0, ("q", "up"), "float32")])
def test_critic_learns_returns(adapters):
    """Values stand before the token that they are of, and training brings them to the returns."""
    policy, mesh = tiny(CONFIG, adapters), single_device()
    critic, params = make_critic(policy), init_params(policy, mesh, 0)
    learner = CriticLearner(critic, optax.adam(0.02), mesh, LearnerOptions(4, pack_length=16))
    state = learner.init(critic_params(critic, params, mesh))
    if adapters:  # are trained with the head; the base is the policy's own
        assert learner.base["embed"]["embedding"] is params["embed"]["embedding"]
        expected = {*flatten(policy.abstract_trained), "value_head.kernel"}
        assert set(flatten(critic.abstract_trained)) == set(flatten(state["params"])) == expected
    config = LearnerConfig(pack_length=16, microbatch_rows=4, row_widths=1)
    samples = [critic_sample(seed, score) for seed, score in enumerate((1.0, 0.0, 0.5))]
    rng, loss, losses = np.random.default_rng(0), ValueLoss(0.0), []
    for _ in range(30):
        state, metrics = learn_values(learner, state, samples, config, loss, rng)
        losses.append(metrics["critic/loss"])
    assert losses[0] == pytest.approx(0.5 * (1 + 0 + 0.25) / 3, rel=1e-5)
    assert losses[-1] < 0.3 * losses[0]
    names = ("loss", "clipfrac", "grad_norm", "skipped", "updates")
    assert set(metrics) == {f"critic/{name}" for name in names}
    whole = learner.with_base(state["params"])
    predicted = sample_logprobs(learner, state["params"], samples, config)
    for trained, values in zip(samples, predicted, strict=True):
        expected = np.asarray(row_values(critic, whole, trained.tokens[None]))[0]
        np.testing.assert_allclose(values[1:], expected[:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_critic_beside_a_bfloat16_base_learns():
    policy, mesh = tiny(CONFIG, Adapters(2, 4.0, ("q", "up"), "bfloat16")), single_device()
    critic, params = make_critic(policy), init_params(policy, mesh, 0)
    learner = CriticLearner(critic, optax.adam(0.02), mesh, LearnerOptions(4, pack_length=16))
    state = learner.init(critic_params(critic, params, mesh))
    assert learner.base["embed"]["embedding"] is params["embed"]["embedding"]
    config = LearnerConfig(pack_length=16, microbatch_rows=4, row_widths=1)
    rng, loss, losses = np.random.default_rng(0), ValueLoss(0.0), []
    for _ in range(4):
        state, metrics = learn_values(learner, state, [critic_sample(0, 1.0)], config, loss, rng)
        losses.append(metrics["critic/loss"])
    assert losses[0] == 0.5 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("clip", "errors", "clipped", "gradient"),
    [(0.0, (0.25, 0.25), 0.0, (-0.25, 0.25)), (0.2, (0.64, 0.25), 0.5, (0.0, 0.25))],
)
def test_value_loss_by_hand(clip, errors, clipped, gradient):
    """Values of 0.5, held within the clip of 0, for returns of 1 and 0: the larger error counts."""
    inputs = {"mask": [[1, 1]], "old_values": [[0, 0]], "returns": [[1, 0]], "values": [[0.5, 0.5]]}
    loss, share, (gradients,) = value_case({"inputs": inputs, "settings": {"clip_value": clip}})
    assert loss == pytest.approx(0.5 * sum(errors) / 2) and share == clipped
    np.testing.assert_allclose(gradients, gradient, rtol=1e-5)
