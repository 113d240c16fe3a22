"""The optimizer's step where its moments lie in host memory: those of a few parameters on the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from calibadv_jax.learner.losses import Metrics
from calibadv_jax.policy.transformer import Params

State = dict[str, Any]
Step = Callable[[State, Params], tuple[State, Metrics]]


class SplitStep:
    """Applies a sum of gradients by several programs, each with the moments of some parameters.

    Within one program TPU's compiler brings all moments at once, whatever order the program asks for. Every
    part traces the whole step, and the compiler drops what is not of its parameters.

    Args:
        step: the whole step, of a state on the devices.
        abstract: ShapeDtypeStructs of the state, with the shardings that it is kept in.
        placed: the shardings of its leaves in the step.
        owners: of each leaf the parameter that it belongs to; "" for what all parameters share.
    """

    def __init__(
        self, step: Step, abstract: State, placed: Sequence[NamedSharding], owners: Sequence[str]
    ) -> None:
        self._step, self._placed, self._owners = step, placed, owners
        self._abstract, self._tree = jax.tree.flatten(abstract)
        sizes = {
            name: math.prod(leaf.shape) for name, leaf in zip(owners, self._abstract, strict=True) if name
        }
        groups = parts(sizes)
        groups[-1].append("")  # what all share is read by every part, and changed by the last
        self._parts = [(names, self._compiled(names)) for names in groups]

    def __call__(self, state: State, gradients: Params) -> tuple[State, Metrics]:
        """The new state, and the metrics. The state is donated."""
        leaves, metrics = jax.tree.leaves(state), {}
        for names, part in self._parts:
            new, metrics = part(*self._divided(leaves, names), gradients)
            leaves = [new.get(index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(self._tree, leaves), metrics

    def lower(self, gradients: Params) -> jax.stages.Lowered:
        """The largest part, to compile ahead of time, with all that lies on the devices meanwhile."""
        names, part = self._parts[0]
        return part.lower(*self._divided(self._abstract, names), gradients)

    def _divided(self, leaves: Sequence[Any], names: Sequence[str]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Leaves of these parameters, and those of others that lie on the devices; by their places."""
        mine = {index: leaf for index, leaf in enumerate(leaves) if self._owners[index] in names}
        near = (index for index, leaf in enumerate(self._abstract) if leaf.sharding == self._placed[index])
        return mine, {index: leaves[index] for index in near if index not in mine}

    def _compiled(self, names: Sequence[str]) -> jax.stages.Wrapped:
        kept = {index: leaf.sharding for index, leaf in self._divided(self._abstract, names)[0].items()}
        # Unused arguments stay, so that the compiler's plan of the memory counts all parameters.
        return jax.jit(self._part, donate_argnums=0, keep_unused=True, out_shardings=(kept, None))

    def _part(
        self, mine: dict[int, Any], others: dict[int, Any], gradients: Params
    ) -> tuple[dict[int, Any], Metrics]:
        moved = {index: jax.device_put(leaf, self._placed[index]) for index, leaf in mine.items()}
        known = others | moved
        leaves = [
            known[index] if index in known else jnp.zeros(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(self._abstract)
        ]
        state, metrics = self._step(jax.tree.unflatten(self._tree, leaves), gradients)
        new = jax.tree.leaves(state)
        return {index: new[index] for index in mine}, metrics


def most_at_once(sizes: Collection[int]) -> float:
    """Of so many elements a parameter, those that are on the devices together: the largest, or a quarter."""
    return max(max(sizes), sum(sizes) / 4)


def parts(sizes: dict[str, int]) -> list[list[str]]:
    """Names in groups, the largest first: each has at most `most_at_once`."""
    most = most_at_once(sizes.values())
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        room = (group for group in groups if sum(sizes[other] for other in group) + sizes[name] <= most)
        group = next(room, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return sorted(groups, key=lambda group: -sum(sizes[name] for name in group))
