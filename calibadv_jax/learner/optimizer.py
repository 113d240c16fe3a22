"""Optimizers and learning-rate schedules, all optax, and the step with moments in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers, muon

from calibadv_jax.config import Config, LearnerConfig, OptimizerConfig
from calibadv_jax.learner.objective import Metrics
from calibadv_jax.policy.adapters import LORA_A, LORA_B
from calibadv_jax.policy.sharding import constrain
from calibadv_jax.policy.transformer import Params

State = dict[str, Any]
Step = Callable[[State, Params], tuple[State, Metrics]]
Leaves = dict[int, Any]  # some leaves of a state, by their index
Program = jax.stages.Wrapped

STACKED_MATRICES = ("kernel", LORA_A, LORA_B)  # last names of the paths of the layers' matrices
DECAYED = (*STACKED_MATRICES, "embedding")  # last names of the paths of parameters with weight decay
SHARED_LEAVES = ""  # owner of the leaves of a state that belong to no single parameter


# --- Learning rate ---


def step_updates(learner: LearnerConfig, trajectories: int) -> int:
    """Return the number of optimizer updates of a step.

    Args:
        learner: section `learner`.
        trajectories: trained trajectories of the step.

    Returns:
        Updates of all epochs; 0 without a trajectory.
    """
    minibatch_size = learner.minibatch_size or max(1, trajectories)
    minibatches = -(-trajectories // minibatch_size)
    return learner.epochs * minibatches


def make_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Return the learning rate by optimizer update: a linear warm-up, then constant, or falling to 0.

    Args:
        config: `schedule`, `lr`, `warmup_updates` and `decay_updates` are read.
        total_updates: of the run, warm-up included; for a config without `decay_updates`.

    Returns:
        A function from the number of updates so far to the learning rate.
    """
    last_update = config.decay_updates or total_updates
    decay_updates = max(1, last_update - config.warmup_updates)
    after_warmup = {
        "constant": optax.constant_schedule(config.lr),
        "cosine": optax.cosine_decay_schedule(config.lr, decay_updates),
        "linear": optax.linear_schedule(config.lr, 0.0, decay_updates),
    }[config.schedule]
    if config.warmup_updates == 0:
        return after_warmup
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_updates)
    return optax.join_schedules([warmup, after_warmup], [config.warmup_updates])


def run_schedule(config: Config, optimizer: OptimizerConfig) -> optax.Schedule:
    """Return the learning rate of a run by optimizer update.

    Args:
        config: of the run.
        optimizer: the policy's or the critic's.

    Returns:
        A schedule, as `make_schedule`, that assumes the full number of trajectories in every step.
    """
    trajectories = config.rollout.questions_per_step * config.rollout.group_size
    total_updates = config.learner.steps * step_updates(config.learner, trajectories)
    return make_schedule(optimizer, total_updates)


# --- Optimizers ---


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the clip of the global gradient norm, followed by AdamW or Muon.

    Args:
        config: section `optimizer`.
        schedule: learning rate by update.

    Returns:
        A transformation of the sum of an update's gradients.
    """
    rule = _muon(config, schedule) if config.name == "muon" else _adamw(config, schedule)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def _adamw(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        config.beta1,
        config.beta2,
        config.eps,
        weight_decay=config.weight_decay,
        mask=_has_weight_decay,
    )


def _has_weight_decay(params: Any) -> Any:
    """Return whether each parameter decays: matrices only."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def _muon(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for the matrices of the layers, and AdamW for embeddings, head, norms and biases.

    Stacked matrices [L, in, out] are orthogonalised as L matrices, which the devices share. Otherwise every
    device would compute all of them.
    """
    adam_ratio = config.adam_lr / config.lr if config.adam_lr else 1.0

    def adam_schedule(count: Any) -> Any:
        """Return AdamW's learning rate, a fixed multiple of Muon's."""
        return adam_ratio * schedule(count)

    orthogonalise = muon(
        schedule,
        beta=config.beta1,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        adam_learning_rate=adam_schedule,
        weight_decay=config.weight_decay,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=_muon_dimensions,
    )

    def update(updates: Any, *more: Any) -> Any:
        """Return Muon's changes, with the layers of stacked gradients split over the devices."""
        return orthogonalise.update(_split_by_layer(updates), *more)

    return optax.GradientTransformation(orthogonalise.init, update)


def _is_stacked_matrix(path: Any) -> bool:
    return path[0].key == "layers" and path[-1].key in STACKED_MATRICES


def _muon_dimensions(params: Any) -> Any:
    """Return the matrix axes of each parameter that Muon trains, and None for the others."""

    def dimensions(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        """Return the axes of one parameter's matrices, or None."""
        return MuonDimensionNumbers(1, 2) if _is_stacked_matrix(path) else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _split_by_layer(gradients: Any) -> Any:
    """Split the layers of stacked matrices over all devices."""

    def split(path: Any, gradient: Any) -> Any:
        """Split one gradient by layer if it is that of stacked matrices."""
        return constrain(gradient, "stack") if _is_stacked_matrix(path) else gradient

    return jax.tree_util.tree_map_with_path(split, gradients)


# --- Moments in host memory ---


class SplitStep:
    """Applies a sum of gradients by several programs, each with the moments of some of the parameters.

    In a single program TPU's compiler would copy all moments to the devices at once. Each program traces the
    whole step, and the compiler drops everything that belongs to other parameters.

    Args:
        step: the whole step, for a state on the devices.
        abstract: ShapeDtypeStructs of the state, with its shardings between the updates.
        on_devices: shardings of its leaves in the step.
        owners: path of the parameter of each leaf; SHARED_LEAVES for leaves that all parameters share.
    """

    def __init__(
        self,
        step: Step,
        abstract: State,
        on_devices: Sequence[NamedSharding],
        owners: Sequence[str],
    ):
        self._step = step
        self._device_shardings = on_devices
        self._owners = owners
        self._abstract, self._tree = jax.tree.flatten(abstract)
        sizes: dict[str, int] = {}
        for owner, leaf in zip(owners, self._abstract, strict=True):
            if owner != SHARED_LEAVES:
                sizes[owner] = math.prod(leaf.shape)
        groups = parameter_groups(sizes)
        # Every program reads the shared leaves, and the last one changes them.
        groups[-1].append(SHARED_LEAVES)
        self._programs = [(names, self._compile(names)) for names in groups]

    def __call__(self, state: State, gradients: Params) -> tuple[State, Metrics]:
        """Apply a sum of gradients.

        Args:
            state: with moments in host memory; donated.
            gradients: the sum of gradients, nested as the trained parameters.

        Returns:
            The new state in the same shardings, and the metrics of the step.
        """
        leaves = jax.tree.leaves(state)
        metrics: Metrics = {}
        for names, program in self._programs:
            own, others = self._divide_leaves(leaves, names)
            changed, metrics = program(own, others, gradients)
            for index, leaf in changed.items():
                leaves[index] = leaf
        return jax.tree.unflatten(self._tree, leaves), metrics

    def lower(self, abstract: State, gradients: Params) -> jax.stages.Lowered:
        """Lower the largest program, with everything that is on the devices meanwhile.

        Args:
            abstract: ShapeDtypeStructs of the state.
            gradients: ShapeDtypeStructs of the sum of gradients.

        Returns:
            The program; the devices may be those of a topology.
        """
        names, program = self._programs[0]
        own, others = self._divide_leaves(jax.tree.leaves(abstract), names)
        return program.lower(own, others, gradients)

    def _divide_leaves(self, leaves: Sequence[Any], names: Sequence[str]) -> tuple[Leaves, Leaves]:
        """Return the leaves of these parameters, and other leaves that stay on the devices, by index."""
        own: Leaves = {}
        others: Leaves = {}
        for index, leaf in enumerate(leaves):
            stays_on_devices = self._abstract[index].sharding == self._device_shardings[index]
            if self._owners[index] in names:
                own[index] = leaf
            elif stays_on_devices:
                others[index] = leaf
        return own, others

    def _compile(self, names: Sequence[str]) -> Program:
        """Return the jitted program that changes the leaves of these parameters."""
        own, _ = self._divide_leaves(self._abstract, names)
        shardings = {index: leaf.sharding for index, leaf in own.items()}
        # Unused arguments stay, so that the compiler's plan of the memory counts all parameters.
        return jax.jit(
            self._change_leaves, donate_argnums=0, keep_unused=True, out_shardings=(shardings, None)
        )

    def _change_leaves(self, own: Leaves, others: Leaves, gradients: Params) -> tuple[Leaves, Metrics]:
        """Return the new values of some leaves, and the metrics of the step.

        Args:
            own: leaves to change, in host memory or on the devices.
            others: other leaves on the devices.
            gradients: the sum of gradients.
        """
        present = dict(others)
        for index, leaf in own.items():
            present[index] = jax.device_put(leaf, self._device_shardings[index])
        leaves = []
        for index, abstract in enumerate(self._abstract):
            if index in present:
                leaves.append(present[index])
            else:
                # Only read by computations that the compiler drops.
                leaves.append(jnp.zeros(abstract.shape, abstract.dtype))
        state, metrics = self._step(jax.tree.unflatten(self._tree, leaves), gradients)
        new_leaves = jax.tree.leaves(state)
        return {index: new_leaves[index] for index in own}, metrics


def peak_elements(sizes: Collection[int]) -> float:
    """Return the peak number of elements on the devices: of the largest parameter, or a quarter of all.

    Args:
        sizes: elements of each parameter; at least one.

    Returns:
        The larger of the two; a quarter may be a fraction.
    """
    return max(max(sizes), sum(sizes) / 4)


def parameter_groups(sizes: dict[str, int]) -> list[list[str]]:
    """Divide parameters into groups of at most `peak_elements` elements, first fit by falling size.

    Args:
        sizes: elements of each parameter, by name.

    Returns:
        Names of each group, the group with the most elements first.
    """
    most = peak_elements(sizes.values())

    def group_size(group: Sequence[str]) -> int:
        """Return the number of elements of a group."""
        return sum(sizes[name] for name in group)

    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        group = next((group for group in groups if group_size(group) + sizes[name] <= most), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return sorted(groups, key=lambda group: -group_size(group))
