"""Clipping, moments, decay and schedules, against a few lines of numpy; moments in host memory."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from tiny_policy import NARROW, mesh_of, single_device, tiny

from calibadv_jax.config import LossConfig, OptimizerConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule, parameter_groups
from calibadv_jax.policy.sharding import param_shardings, replicated
from calibadv_jax.snapshots.checkpoint import CheckpointStore

SHAPES = {
    "embed": {"embedding": (4, 3)},
    "layers": {"mlp": {"kernel": (2, 3, 5)}, "norm": {"scale": (2, 3)}, "q": {"bias": (2, 3)}},
}
DECAYED = [True, True, False, False]  # in the order of the leaves: embedding, kernel, scale, bias


def tree(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (size * rng.normal(size=shape)).astype(np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def leaves(params):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]


def after(gradients, **keys):
    """Leaves after these updates of the leaves `BEFORE`."""
    config = OptimizerConfig(**{"lr": 0.1, "schedule": "constant"} | keys)
    optimizer, params = make_optimizer(config, make_schedule(config, 10)), tree(0)
    state = optimizer.init(params)
    for gradient in gradients:
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
    return leaves(params)


BEFORE = leaves(tree(0))


def adamw(gradients, rates, beta1, beta2, weight_decay, max_grad_norm, eps):
    """AdamW over leaves, with the gradient scaled down to the global norm first."""
    params, first, second = list(BEFORE), *([np.zeros_like(p) for p in BEFORE] for _ in range(2))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        scale = min(1.0, max_grad_norm / np.sqrt(sum((leaf**2).sum() for leaf in leaves(gradient))))
        for index, leaf in enumerate(leaves(gradient)):
            first[index] = beta1 * first[index] + (1 - beta1) * scale * leaf
            second[index] = beta2 * second[index] + (1 - beta2) * (scale * leaf) ** 2
            mean = first[index] / (1 - beta1**step)
            deviation = np.sqrt(second[index] / (1 - beta2**step))
            decay = weight_decay * params[index] * DECAYED[index]
            params[index] = params[index] - rate * (mean / (deviation + eps) + decay)
    return params


@pytest.mark.parametrize(("warmup_updates", "rates"), [(0, [0.1] * 3), (2, [0, 0.05, 0.1])])
def test_adamw_clips_decays_matrices_and_keeps_its_moments(warmup_updates, rates):
    gradients = [tree(1, 100.0), tree(2, 0.01), tree(3, 1.0)]  # far above, below and near the norm
    keys = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.05, "max_grad_norm": 2.0, "eps": 0.1}
    expected = adamw(gradients, rates, **keys)
    for actual, target in zip(after(gradients, warmup_updates=warmup_updates, **keys), expected, strict=True):
        np.testing.assert_allclose(actual, target, atol=1e-5)


def test_first_update_of_a_warmup_changes_nothing():
    for actual, target in zip(after([tree(1)], warmup_updates=2), BEFORE, strict=True):
        np.testing.assert_array_equal(actual, target)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_huge_gradient_counts_as_one_of_the_largest_norm(name):
    """Adam alone would forget the size of the first gradient, so the second one shows it."""
    direction = tree(1)
    norm = float(optax.tree.norm(direction))

    def after_gradient_of(size):
        first = jax.tree.map(lambda leaf: leaf * np.float32(size / norm), direction)
        return after([first, tree(2, 0.1)], name=name, max_grad_norm=1.0)

    at_the_limit, beyond, below = (after_gradient_of(size) for size in (1.0, 1000.0, 0.1))
    for actual, target in zip(beyond, at_the_limit, strict=True):
        np.testing.assert_allclose(actual, target, atol=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(at_the_limit, below, strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_eps_damps_small_gradients(name):
    """A first step is gradient / (|gradient| + eps) of the rate; Muon's on what is no layer matrix."""
    exact, damped = (after([tree(1, 1e-3)], name=name, eps=eps) for eps in (1e-8, 1.0))
    for index in (0, 2, 3):
        assert np.abs(exact[index] - BEFORE[index]).max() > 0.05
        assert np.abs(damped[index] - BEFORE[index]).max() < 1e-3


def test_muon_orthogonalises_every_layer_by_itself():
    changed = jax.tree.map(np.copy, tree(1))
    changed["layers"]["mlp"]["kernel"][0] = tree(2)["layers"]["mlp"]["kernel"][0]
    kernel = after([tree(1)], name="muon", max_grad_norm=1e9)[1]
    other = after([changed], name="muon", max_grad_norm=1e9)[1]
    np.testing.assert_allclose(kernel[1], other[1], atol=1e-5)
    assert np.abs(kernel[0] - other[0]).max() > 1e-3


@pytest.mark.parametrize("sizes", [{"data": 8, "fsdp": 1}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_devices_share_muons_layers(sizes):
    """By the floating-point operations that XLA counts for one device; the result is the same."""
    optimizer = make_optimizer(OptimizerConfig(name="muon"), optax.constant_schedule(0.1))
    kernel = np.random.default_rng(0).normal(size=(16, 32, 64)).astype(np.float32)

    def of_one_device(mesh):
        placed = jax.device_put({"layers": {"kernel": kernel}}, replicated(mesh))

        def update(gradients):
            return optimizer.update(gradients, optimizer.init(gradients), gradients)[0]

        with jax.set_mesh(mesh):
            compiled = jax.jit(update, out_shardings=replicated(mesh)).lower(placed).compile()
            return compiled.cost_analysis()["flops"], compiled(placed)["layers"]["kernel"]

    whole, expected = of_one_device(single_device())
    part, actual = of_one_device(mesh_of(**sizes))
    assert part < whole / 6
    close_in_norm(actual, expected, 1e-4)  # five products one after the other, each rounding the last


def test_muon_moves_other_parameters_by_adams_rate():
    """Of a warm-up over two updates the first moves nothing, the second half as much as the peak would."""
    embedding, kernel, scale, bias = (
        new - old for new, old in zip(after([tree(1)], name="muon", adam_lr=0.01), BEFORE, strict=True)
    )
    # The first step of Adam with Nesterov's momentum is the same for every gradient.
    first = 0.01 * (1 + 0.9 * 0.1 / (1 - 0.9**2))
    for change in (embedding, scale, bias):
        np.testing.assert_allclose(np.abs(change), first, rtol=1e-3)
    for matrix in kernel:  # each layer is a matrix of its own, nearly orthogonal
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert singular.min() > 0.05 and singular.max() < 0.2
    damped = after([tree(1)], name="muon", adam_lr=0.01, eps=1e3)
    for index in (0, 2, 3):
        np.testing.assert_allclose(damped[index], BEFORE[index], atol=1e-4)
    for adam_lr in (0.0, 0.02):  # muon's own rate, and another one
        keys = {"name": "muon", "adam_lr": adam_lr, "weight_decay": 0.0}
        start = after([tree(1)], warmup_updates=2, **keys)
        jax.tree.map(np.testing.assert_array_equal, start, BEFORE)
        # The first update leaves the same moments, at whatever rate.
        once, twice = after([tree(1)], **keys), after([tree(1), tree(2)], **keys)
        warmed = after([tree(1), tree(2)], warmup_updates=2, **keys)
        for actual, old, one_step, both in zip(warmed, BEFORE, once, twice, strict=True):
            np.testing.assert_allclose(actual - old, (both - one_step) / 2, atol=1e-5)
            assert np.abs(actual - old).max() > 1e-3


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 1, 2, 2, 2, 2]),
        ("linear", [0, 1, 2, 1.5, 1, 0]),
        ("cosine", [0, 1, 2, 1 + np.sqrt(0.5), 1, 0]),
    ],
)
def test_schedules_peak_and_end_with_the_run(schedule, expected):
    def rates(counts, total, **keys):
        rate = make_schedule(OptimizerConfig(lr=2.0, schedule=schedule, **keys), total)
        return [float(rate(count)) for count in counts]

    assert rates((0, 2, 4, 6, 8, 12), 12, warmup_updates=4) == pytest.approx(expected, abs=1e-6)
    shorter = rates((0, 2, 4, 6), 6, warmup_updates=4, decay_updates=12)  # the run ends on the way
    assert shorter == pytest.approx(expected[:4], abs=1e-6)
    assert rates((0, 2, 4, 8), 8) == pytest.approx(expected[2:], abs=1e-6)


# --- Moments in host memory ---

LOSS = policy_gradient(LossConfig(), on_policy=True)


def make_learner(name, offload, mesh):
    config = OptimizerConfig(name=name, lr=0.1, schedule="constant")
    optimizer = make_optimizer(config, make_schedule(config, 10))
    return Learner(tiny(NARROW), optimizer, mesh, LearnerOptions(4, offload=offload))


def batch():
    tokens, mask = np.arange(12, dtype=np.int32), np.arange(12) > 3
    return pack([Sample(tokens, mask, np.sin(tokens) * mask, -mask.astype(np.float32))], 12)


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
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("adamw", {"devices": 1}), ("muon", {"devices": 1}), ("adamw", {"fsdp": 4, "tensor": 2})],
)
def test_offloaded_moments_give_the_same_updates(name, sizes):
    """On a mesh, too: those of one device without offload."""
    states = {}
    for offload, mesh in ((False, single_device()), (True, mesh_of(**sizes))):
        learner = make_learner(name, offload, mesh)
        state = learner.init(init_params(learner.policy, mesh, 0))
        for number in range(2):
            expected = {"params": {"device"}, "opt_state": {"pinned_host" if offload else "device"}}
            assert kinds(state) == kinds(learner.abstract_state) == expected
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
@pytest.mark.parametrize("offload", [False, True], ids=["to_device", "to_host"])
def test_checkpoint_restores_with_or_without_offload(tmp_path, offload):
    """Saved by one, restored by the other or the same, and trained further."""
    mesh = single_device()
    first, then = make_learner("adamw", True, mesh), make_learner("adamw", offload, mesh)
    state = first.init(init_params(first.policy, mesh, 0))
    state, _ = first.update(state, [batch()], LOSS)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(1, state, {})
    restored, _ = store.restore(1, then.abstract_state)
    store.close()
    assert kinds(restored)["opt_state"] == {"pinned_host" if offload else "device"}
    expected, _ = step(first, state, 1)
    continued, _ = step(then, restored, 1)
    jax.tree.map(close_in_norm, continued, expected)


def test_part_brings_moments_of_its_parameters_only():
    """Every leaf is given to one part to change; what lies on the host is given to no other."""
    learner = make_learner("adamw", True, single_device())
    leaves, step = jax.tree.leaves(learner.abstract_state), learner._apply
    on_device = {index for index, leaf in enumerate(leaves) if leaf.sharding.memory_kind == "device"}
    changed, near = zip(*(step._divide_leaves(leaves, names) for names, _ in step._programs), strict=True)
    assert sorted(index for mine in changed for index in mine) == list(range(len(leaves)))
    assert len(changed) > 2
    for mine, others in zip(changed, near, strict=True):
        assert others.keys() == on_device - mine.keys()


def test_parts_are_bounded_by_largest_parameter_or_quarter():
    assert parameter_groups({"a": 3, "b": 10, "c": 7, "d": 4}) == [["b"], ["c", "a"], ["d"]]
    assert parameter_groups({"a": 1}) == [["a"]]
    equal = {str(number): 1 for number in range(8)}
    assert parameter_groups(equal) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
