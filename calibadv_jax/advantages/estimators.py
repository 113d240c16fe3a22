"""Entry of the advantage stage: picks the algorithm, lays its credit over tokens, sums it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.advantages import calibadv, grpo
from calibadv_jax.advantages.credit import GroupCredit, no_credit, spread
from calibadv_jax.advantages.diagnostics import summarise
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group


@dataclass(frozen=True)
class Algorithm:
    """Credit of one group, and the lines that say what a configuration of it does."""

    assign: Callable[[Group, AdvantageConfig], GroupCredit]
    describe: Callable[[AdvantageConfig], list[str]]


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo.assign, grpo.describe),
    "calibadv": Algorithm(calibadv.assign, calibadv.describe),
}


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of a step, in the order of its groups and their trajectories."""

    advantages: list[list[np.ndarray]]
    """Float32 [T] a trajectory, aligned with `Trajectory.response_ids`; 0 on observation tokens."""
    credits: list[GroupCredit]
    """The same by turn, with correctness and silver documents."""
    metrics: dict[str, float]
    """See `diagnostics.summarise`."""


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> AdvantageResult:
    """Advantages of scored groups; group statistics in float64 on the host.

    A trajectory without a sampled token gets 0 everywhere, but its score counts in its group. A group is as
    if it did not have those that failed. One that is left alone has nothing to be compared with and gets 0.

    Raises:
        ValueError: a group mixes questions, or an answer score is not finite.
    """
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.question.id != group.question.id:
                raise ValueError(
                    f"a trajectory of question {trajectory.question.id!r} is in the group"
                    f" of {group.question.id!r}"
                )
    credits = [_assign(group, config) for group in groups]
    advantages = [
        [spread(turns, one) for turns, one in zip(credit.turns, group.trajectories, strict=True)]
        for group, credit in zip(groups, credits, strict=True)
    ]
    return AdvantageResult(advantages, credits, summarise(credits))


def _assign(group: Group, config: AdvantageConfig) -> GroupCredit:
    if len(group.trajectories) == 1 and group.failed:
        return no_credit(group)
    return ALGORITHMS[config.name].assign(group, config)


def describe(config: AdvantageConfig) -> list[str]:
    """Lines for people: which calibration switches are active, and what each means."""
    return ALGORITHMS[config.name].describe(config)
