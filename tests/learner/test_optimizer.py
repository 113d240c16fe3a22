"""Clipping, moments, decay and schedules, against a few lines of numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from rounding import close_in_norm

from calibadv_jax.config import MeshConfig, OptimizerConfig
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.sharding import make_mesh, replicated

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


def after(config, gradients, total=10):
    optimizer = make_optimizer(config, make_schedule(config, total))
    params = tree(0)
    state = optimizer.init(params)
    for gradient in gradients:
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]


def adamw(config, gradients, rates):
    """AdamW over leaves, with the gradient scaled down to the global norm first."""
    params = [leaf.astype(np.float64) for leaf in jax.tree.leaves(tree(0))]
    first, second = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        leaves = [leaf.astype(np.float64) for leaf in jax.tree.leaves(gradient)]
        norm = np.sqrt(sum((leaf**2).sum() for leaf in leaves))
        scale = min(1.0, config.max_grad_norm / norm)
        for index, leaf in enumerate(leaves):
            clipped = scale * leaf
            first[index] = config.beta1 * first[index] + (1 - config.beta1) * clipped
            second[index] = config.beta2 * second[index] + (1 - config.beta2) * clipped**2
            mean = first[index] / (1 - config.beta1**step)
            deviation = np.sqrt(second[index] / (1 - config.beta2**step))
            decay = config.weight_decay * params[index] * DECAYED[index]
            params[index] = params[index] - rate * (mean / (deviation + 1e-8) + decay)
    return params


GRADIENTS = [tree(1, 100.0), tree(2, 0.01), tree(3, 1.0)]  # far above, below and near the norm


@pytest.mark.parametrize(("warmup_steps", "rates"), [(0, [0.1] * 3), (2, [0, 0.05, 0.1])])
def test_adamw_clips_decays_matrices_and_keeps_its_moments(warmup_steps, rates):
    keys = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.05, "max_grad_norm": 2.0}
    config = OptimizerConfig(lr=0.1, schedule="constant", warmup_steps=warmup_steps, **keys)
    expected = adamw(config, GRADIENTS, rates)
    for actual, target in zip(after(config, GRADIENTS), expected, strict=True):
        np.testing.assert_allclose(actual, target, atol=1e-5)


@pytest.mark.medium
def test_muon_treats_layers_as_separate_matrices():
    config = OptimizerConfig(name="muon", lr=0.1, schedule="constant", max_grad_norm=1e9)
    changed = jax.tree.map(np.copy, tree(1))
    changed["layers"]["mlp"]["kernel"][0] = tree(2)["layers"]["mlp"]["kernel"][0]
    first, other = after(config, [tree(1)])[1], after(config, [changed])[1]
    np.testing.assert_allclose(first[1], other[1], atol=1e-5)
    assert np.abs(first[0] - other[0]).max() > 1e-3


@pytest.mark.parametrize("sizes", [MeshConfig(8, 1, 1), MeshConfig(2, 2, 2)], ids=str)
def test_devices_share_muons_layers(sizes):
    """By the floating-point operations that XLA counts for one device; the result is the same."""
    optimizer = make_optimizer(OptimizerConfig(name="muon"), optax.constant_schedule(0.1))
    rng = np.random.default_rng(0)
    gradients = {"layers": {"kernel": rng.normal(size=(16, 32, 64)).astype(np.float32)}}

    def of_one_device(devices):
        mesh = make_mesh(devices, jax.devices()[: devices.data * devices.fsdp * devices.tensor])
        placed = jax.device_put(gradients, replicated(mesh))

        def update(gradients):
            return optimizer.update(gradients, optimizer.init(gradients), gradients)[0]

        with jax.set_mesh(mesh):
            compiled = jax.jit(update, out_shardings=replicated(mesh)).lower(placed).compile()
            return compiled.cost_analysis()["flops"], compiled(placed)["layers"]["kernel"]

    whole, expected = of_one_device(MeshConfig(1, 1, 1))
    part, actual = of_one_device(sizes)
    assert part < whole / 6
    close_in_norm(actual, expected, 1e-4)  # five products one after the other, each rounding the last


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_huge_gradient_is_clipped_to_the_norm(name):
    """Adam alone would forget the size of the first gradient, so the second one shows it."""
    config = OptimizerConfig(name=name, lr=0.1, schedule="constant", max_grad_norm=1.0)
    direction = tree(1)
    norm = float(optax.tree.norm(direction))
    small = tree(2, 0.1)

    def scaled(size):
        return [jax.tree.map(lambda leaf: leaf * np.float32(size / norm), direction), small]

    at_the_limit, beyond, below = (after(config, scaled(size)) for size in (1.0, 1000.0, 0.1))
    for leaf, other in zip(at_the_limit, beyond, strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)
    assert max(np.abs(leaf - other).max() for leaf, other in zip(at_the_limit, below, strict=True)) > 1e-3


def test_muon_moves_other_parameters_by_adams_rate():
    config = OptimizerConfig(name="muon", lr=0.1, adam_lr=0.01, schedule="constant")
    before = [leaf.astype(np.float64) for leaf in jax.tree.leaves(tree(0))]
    embedding, kernel, scale, bias = (
        now - then for now, then in zip(after(config, [tree(1)]), before, strict=True)
    )
    # The first step of Adam with Nesterov's momentum is the same for every gradient.
    first = 0.01 * (1 + 0.9 * 0.1 / (1 - 0.9**2))
    for change in (embedding, scale, bias):
        np.testing.assert_allclose(np.abs(change), first, rtol=1e-3)
    for matrix in kernel:  # each layer is a matrix of its own, nearly orthogonal
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert singular.min() > 0.05 and singular.max() < 0.2


@pytest.mark.parametrize("own_rate", [0.0, 0.02], ids=["muon's rate", "a rate of its own"])
def test_muons_two_groups_follow_the_schedule(own_rate):
    """Of a warm-up over two updates the first moves nothing, the second half as much as the peak would."""
    config = OptimizerConfig(name="muon", lr=0.1, adam_lr=own_rate, schedule="constant", weight_decay=0.0)
    warmed = replace(config, warmup_steps=2)
    before = [leaf.astype(np.float64) for leaf in jax.tree.leaves(tree(0))]
    for actual, target in zip(after(warmed, [tree(1)]), before, strict=True):
        np.testing.assert_array_equal(actual, target)
    # The first update leaves the same moments, at whatever rate.
    first, both = after(config, [tree(1)]), after(config, [tree(1), tree(2)])
    for actual, start, once, two in zip(after(warmed, [tree(1), tree(2)]), before, first, both, strict=True):
        np.testing.assert_allclose(actual - start, (two - once) / 2, atol=1e-5)
        assert np.abs(actual - start).max() > 1e-3


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 1, 2, 2, 2, 2]),
        ("linear", [0, 1, 2, 1.5, 1, 0]),
        ("cosine", [0, 1, 2, 1 + np.sqrt(0.5), 1, 0]),
    ],
)
def test_schedules_peak_and_end_with_the_run(schedule, expected):
    rate = make_schedule(OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=4), total_updates=12)
    assert [float(rate(count)) for count in (0, 2, 4, 6, 8, 12)] == pytest.approx(expected, abs=1e-6)
    own = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=4, decay_updates=12)
    shorter = make_schedule(own, total_updates=6)  # the run ends on the way
    assert [float(shorter(count)) for count in (0, 2, 4, 6)] == pytest.approx(expected[:4], abs=1e-6)
    without = make_schedule(OptimizerConfig(lr=2.0, schedule=schedule), total_updates=8)
    assert [float(without(count)) for count in (0, 2, 4, 8)] == pytest.approx(expected[2:], abs=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_eps_is_added_to_the_denominator(name):
    """A first step is gradient / (|gradient| + eps) of the rate; muon's on what is no layer matrix."""
    plain, damped = (
        after(OptimizerConfig(name=name, lr=0.1, schedule="constant", eps=eps), [tree(1, 1e-3)])
        for eps in (1e-8, 1.0)
    )
    before = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree(0))]
    for place in (0, 2, 3):
        first, second = (np.abs(leaves[place] - before[place]).max() for leaves in (plain, damped))
        assert first > 0.05 and second < 1e-3
