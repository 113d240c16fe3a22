"""Moments in host memory: where they lie, the same updates, and checkpoints from and to them."""

import dataclasses

import jax
import numpy as np
import pytest
from rounding import close_in_norm
from tiny_policy import NARROW, mesh_of, single_device, tiny

from calibadv_jax.config import LossConfig, OptimizerConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule, parts
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.snapshots.checkpoint import CheckpointStore

LOSS = policy_gradient(LossConfig(), on_policy=True)


def make_learner(name, offload, mesh):
    config = OptimizerConfig(name=name, lr=0.1, schedule="constant")
    policy = tiny(NARROW)
    return Learner(
        policy, make_optimizer(config, make_schedule(config, 10)), mesh, LearnerOptions(4, offload=offload)
    )


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (4, 12)).astype(np.int32)
    mask = np.arange(12) > 3
    return pack(
        [
            Sample(row, mask, (rng.normal(size=12) * mask).astype(np.float32), -mask.astype(np.float32))
            for row in tokens
        ],
        12,
    )


def kinds(state):
    """Memory kinds of the leaves with the shape of a parameter, by section of the state."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(state["params"])}
    return {
        name: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[name]) if leaf.shape in shapes}
        for name in ("params", "opt_state")
    }


def step(learner, state, seed):
    """The optimizer's step with drawn gradients, none near zero, where AdamW would follow rounding."""
    rng = np.random.default_rng(seed)
    abstract = learner.policy.abstract_params
    drawn = jax.tree.map(lambda p: rng.uniform(0.5, 1.5, p.shape) * rng.choice([-1, 1], p.shape), abstract)
    gradients = jax.device_put(jax.tree.map(np.float32, drawn), param_shardings(abstract, learner.mesh))
    with jax.set_mesh(learner.mesh):
        return learner._apply(state, gradients)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloaded_moments_give_the_same_updates(name):
    states = {}
    for offload in (False, True):
        mesh = single_device()
        learner = make_learner(name, offload, mesh)
        state = learner.init(init_params(learner.policy, mesh, 0))
        for number in range(2):
            expected = {"params": {"device"}, "opt_state": {"pinned_host" if offload else "device"}}
            assert kinds(state) == kinds(learner.abstract_state()) == expected
            state, metrics = step(learner, state, number)
        assert metrics["actor/skipped"] == 0
        states[offload] = jax.device_get(state)
        broken = dataclasses.replace(batch(), weights=batch().weights * np.nan)
        state, metrics = learner.update(state, [broken], LOSS)
        assert metrics["actor/skipped"] == 1
        # To the bit: what was there is kept.
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[offload])
    jax.tree.map(close_in_norm, states[True], states[False])


@pytest.mark.medium
def test_moments_of_a_mesh_lie_on_its_hosts():
    mesh = mesh_of(fsdp=4, tensor=2)
    learner = make_learner("adamw", True, mesh)
    state = learner.init(init_params(learner.policy, mesh, 0))
    assert kinds(state)["opt_state"] == {"pinned_host"}
    alone = make_learner("adamw", False, single_device())
    other = alone.init(init_params(alone.policy, alone.mesh, 0))
    for number in range(2):
        state, _ = step(learner, state, number)
        other, _ = step(alone, other, number)
    assert kinds(state)["opt_state"] == {"pinned_host"}
    jax.tree.map(close_in_norm, state, other)


@pytest.mark.medium
@pytest.mark.parametrize("offload", [False, True], ids=["to_device", "to_host"])
def test_checkpoint_restores_with_or_without_offload(tmp_path, offload):
    """Saved by one, restored by the other or the same, and trained further."""
    mesh = single_device()
    first, then = make_learner("adamw", True, mesh), make_learner("adamw", offload, mesh)
    state = first.init(init_params(first.policy, mesh, 0))
    state, _ = first.update(state, [batch()], LOSS)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(1, state, {})
    restored, _ = store.restore(1, then.abstract_state())
    store.close()
    assert kinds(restored)["opt_state"] == {"pinned_host" if offload else "device"}
    expected, _ = step(first, state, 1)
    continued, _ = step(then, restored, 1)
    jax.tree.map(close_in_norm, continued, expected)


def test_part_brings_moments_of_its_parameters_only():
    """Every leaf is given to one part to change; what lies on the host is given to no other."""
    step = make_learner("adamw", True, single_device())._apply
    leaves = jax.tree.leaves(make_learner("adamw", True, single_device()).abstract_state())
    changed, near = zip(*(step._divided(leaves, names) for names, _ in step._parts), strict=True)
    assert sorted(index for mine in changed for index in mine) == list(range(len(leaves)))
    assert len(changed) > 2
    assert {leaf.sharding.memory_kind for others in near for leaf in others.values()} == {"device"}
    on_device = sum(leaf.sharding.memory_kind == "device" for leaf in leaves)
    assert all(
        len(others) + sum(leaf.sharding.memory_kind == "device" for leaf in mine.values()) == on_device
        for mine, others in zip(changed, near, strict=True)
    )


def test_parts_are_bounded_by_largest_parameter_or_quarter():
    assert parts({"a": 3, "b": 10, "c": 7, "d": 4}) == [["b"], ["c", "a"], ["d"]]
    assert parts({"a": 1}) == [["a"]]
    assert parts({str(number): 1 for number in range(8)}) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
