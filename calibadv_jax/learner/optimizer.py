"""Optimizers and learning-rate schedules, all optax, and the step with moments in host memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers, muon

from calibadv_jax.config import Config, LearnerConfig, OptimizerConfig
from calibadv_jax.learner.losses import Metrics
from calibadv_jax.policy.adapters import LORA_A, LORA_B
from calibadv_jax.policy.sharding import constrain
from calibadv_jax.policy.transformer import Params

State = dict[str, Any]
Step = Callable[[State, Params], tuple[State, Metrics]]
Leaves = dict[int, Any]  # some leaves of a state, by their index
STACKED_MATRICES = ("kernel", LORA_A, LORA_B)  # last names of the layers' matrices


def step_updates(learner: LearnerConfig, trajectories: int) -> int:
    """Return the number of optimizer updates of a step, given its trained trajectories."""
    return learner.epochs * -(-trajectories // (learner.minibatch_size or max(1, trajectories)))


def make_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Return the learning rate by optimizer update: linear warm-up, then constant, cosine or linear to 0."""
    decay = max(1, (config.decay_updates or total_updates) - config.warmup_updates)
    main = {
        "constant": optax.constant_schedule(config.lr),
        "cosine": optax.cosine_decay_schedule(config.lr, decay),
        "linear": optax.linear_schedule(config.lr, 0.0, decay),
    }[config.schedule]
    if config.warmup_updates == 0:
        return main
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_updates)
    return optax.join_schedules([warmup, main], [config.warmup_updates])


def schedule_of(config: Config, optimizer: OptimizerConfig) -> optax.Schedule:
    """Return the learning rate by update of a run, of the policy's or the critic's optimizer."""
    trajectories = config.rollout.questions_per_step * config.rollout.group_size
    return make_schedule(optimizer, config.learner.steps * step_updates(config.learner, trajectories))


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the clip of the global gradient norm, then AdamW or Muon.

    Muon orthogonalises stacked layer matrices [L, in, out] as L matrices, which the devices share: each would
    compute all of them otherwise. Embeddings, head, norms and biases get AdamW.
    """
    beta1, beta2, eps, weight_decay = config.beta1, config.beta2, config.eps, config.weight_decay
    if config.name == "muon":
        ratio = config.adam_lr / config.lr if config.adam_lr else 1.0
        orthogonalise = muon(
            schedule,
            beta=beta1,
            eps=eps,
            adam_b1=beta1,
            adam_b2=beta2,
            adam_learning_rate=lambda count: ratio * schedule(count),
            weight_decay=weight_decay,
            adam_weight_decay=weight_decay,
            muon_weight_dimension_numbers=_by_matrix(lambda _: MuonDimensionNumbers(1, 2), lambda _: None),
        )
        by_layers = _by_matrix(lambda gradient: constrain(gradient, "stack"), lambda gradient: gradient)
        rule = optax.GradientTransformation(
            orthogonalise.init, lambda updates, *more: orthogonalise.update(by_layers(updates), *more)
        )
    else:
        rule = optax.adamw(schedule, beta1, beta2, eps, weight_decay=weight_decay, mask=_decayed)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def _by_matrix(of_matrix: Callable[[Any], Any], of_others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def leaf(path: Any, leaf: Any) -> Any:
        is_matrix = path[0].key == "layers" and path[-1].key in STACKED_MATRICES
        return of_matrix(leaf) if is_matrix else of_others(leaf)

    return functools.partial(jax.tree_util.tree_map_with_path, leaf)


def _decayed(params: Any) -> Any:
    """Decay the weights of matrices only."""
    names = (*STACKED_MATRICES, "embedding")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


class SplitStep:
    """Applies a sum of gradients by several programs, each with the moments of some parameters.

    In a single program TPU's compiler would bring all moments at once. Every part traces the whole step, and
    the compiler drops all that belongs to other parameters.

    Args:
        step: the whole step, of a state on the devices.
        abstract: ShapeDtypeStructs of the state, with its shardings between the updates.
        placed: the shardings of its leaves in the step.
        owners: the parameter of each leaf; "" for leaves that all parameters share.
    """

    def __init__(self, step: Step, abstract: State, placed: Sequence[NamedSharding], owners: Sequence[str]):
        self._step, self._placed, self._owners = step, placed, owners
        self._abstract, self._tree = jax.tree.flatten(abstract)
        shapes = {name: leaf.shape for name, leaf in zip(owners, self._abstract, strict=True) if name}
        groups = parts({name: math.prod(shape) for name, shape in shapes.items()})
        groups[-1].append("")  # shared leaves are read by every part, and changed by the last
        self._parts = [(names, self._compiled(names)) for names in groups]

    def __call__(self, state: State, gradients: Params) -> tuple[State, Metrics]:
        """Return the new state and the metrics; the state is donated."""
        leaves, metrics = jax.tree.leaves(state), {}
        for names, part in self._parts:
            new, metrics = part(*self._divided(leaves, names), gradients)
            leaves = [new.get(index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(self._tree, leaves), metrics

    def lower(self, abstract: State, gradients: Params) -> jax.stages.Lowered:
        """Lower the largest part with all that lies on the devices meanwhile."""
        names, part = self._parts[0]
        return part.lower(*self._divided(jax.tree.leaves(abstract), names), gradients)

    def _divided(self, leaves: Sequence[Any], names: Sequence[str]) -> tuple[Leaves, Leaves]:
        """Return the leaves of these parameters, and of others that lie on the devices, by index."""
        own = {index: leaf for index, leaf in enumerate(leaves) if self._owners[index] in names}
        pairs = enumerate(zip(self._abstract, self._placed, strict=True))
        on_devices = [index for index, (leaf, place) in pairs if leaf.sharding == place]
        return own, {index: leaves[index] for index in on_devices if index not in own}

    def _compiled(self, names: Sequence[str]) -> jax.stages.Wrapped:
        shardings = {index: leaf.sharding for index, leaf in self._divided(self._abstract, names)[0].items()}
        # Unused arguments stay, so that the compiler's plan of the memory counts all parameters.
        return jax.jit(self._part, donate_argnums=0, keep_unused=True, out_shardings=(shardings, None))

    def _part(self, own: Leaves, other: Leaves, gradients: Params) -> tuple[Leaves, Metrics]:
        present = other | {index: jax.device_put(leaf, self._placed[index]) for index, leaf in own.items()}
        leaves = [
            present[index] if index in present else jnp.zeros(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(self._abstract)
        ]
        state, metrics = self._step(jax.tree.unflatten(self._tree, leaves), gradients)
        new = jax.tree.leaves(state)
        return {index: new[index] for index in own}, metrics


def most_at_once(sizes: Collection[int]) -> float:
    """Return the peak number of elements on the devices: of the largest parameter, or a quarter of all."""
    return max(max(sizes), sum(sizes) / 4)


def parts(sizes: dict[str, int]) -> list[list[str]]:
    """Divide names into groups of at most `most_at_once` elements, the largest first."""
    most = most_at_once(sizes.values())
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        for group in groups:
            if sum(sizes[member] for member in group) + sizes[name] <= most:
                group.append(name)
                break
        else:
            groups.append([name])
    return sorted(groups, key=lambda group: -sum(sizes[name] for name in group))
