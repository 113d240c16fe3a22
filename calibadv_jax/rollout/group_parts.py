"""What a training run's groups hold beside trajectories from the prompt, as the runner sees it.

`run.wiring.group_parts` makes it from the config; `contrib.group_demonstrations` and `contrib.near_misses`
hold the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.core.trajectory import Question, Trajectory, Turn


@dataclass(frozen=True)
class Prefix:
    """The beginning of a trajectory that another one continues.

    Attributes:
        source: Index of the first one in the group.
        turns: Its first turns, each with an observation, as `is_context`.
    """

    source: int
    turns: tuple[Turn, ...]


def _no_demonstrations(question: Question, version: int, rng: np.random.Generator) -> list[Trajectory]:
    return []


def _no_near_misses(trajectories: Sequence[Trajectory], count: int) -> list[Prefix]:
    return []


@dataclass(frozen=True)
class GroupParts:
    """The parts of a group that are not sampled from the prompt.

    Attributes:
        demonstrations: Returns the demonstrations in a group, given its question, the version of the policy
            that begins it, and a generator that chooses among them. They are not scored.
        second_round: Trajectories that are sampled after the others of their group.
        near_misses: Returns at most so many prefixes for the second round, given the trajectories of the
            first one, failed ones included.
    """

    demonstrations: Callable[[Question, int, np.random.Generator], list[Trajectory]] = _no_demonstrations
    second_round: int = 0
    near_misses: Callable[[Sequence[Trajectory], int], list[Prefix]] = _no_near_misses


NO_PARTS = GroupParts()
