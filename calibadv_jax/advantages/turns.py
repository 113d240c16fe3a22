"""Steps of estimators that give turns credit of their own: rewards by turn, their sums, their spread.

A value of a trajectory's turns is float64 [n]: n turns up to the last sampled one, or fewer. As in `steps`,
the order of trajectories does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from calibadv_jax.advantages.credit import last_sampled_turn
from calibadv_jax.advantages.steps import (
    Estimate,
    Estimator,
    compose,
    is_tied,
    less_mean,
    mean_and_std,
    over_std,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group, Trajectory, Turn

ByTurn = list[np.ndarray]  # by trajectory: float64 [n]
Part = Callable[[Group, AdvantageConfig], ByTurn]
_EPSILON = 1e-6

_grpo = compose(less_mean, over_std)


def sampled_turns(trajectory: Trajectory) -> list[Turn]:
    """Its turns up to the last sampled one, CalibAdv's answer turn; none where nothing was sampled."""
    last = last_sampled_turn(trajectory)
    return [] if last is None else trajectory.turns[: last + 1]


def to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Each turn's reward and the discounted ones of the turns after it."""
    found = rewards.astype(np.float64)
    for index in reversed(range(len(found) - 1)):
        found[index] += discount * found[index + 1]
    return found


def standardised(values: ByTurn, labels: Sequence[Sequence[Hashable]], config: AdvantageConfig) -> ByTurn:
    """(value - mean) / (std + 1e-6) among the turns of a group with the same label.

    Without advantage.normalize_std only less the mean. 0 for a turn that is alone, and among equal values.
    """
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for position, one in enumerate(labels):
        for index, label in enumerate(one):
            places.setdefault(label, []).append((position, index))
    found = [np.zeros(len(one)) for one in values]
    for together in places.values():
        members = np.array([values[position][index] for position, index in together])
        if len(members) < 2 or is_tied(members):
            continue
        mean, std = mean_and_std(members)
        divisor = std + _EPSILON if config.normalize_std else 1.0
        for position, index in together:
            found[position][index] = (values[position][index] - mean) / divisor
    return found


def by_number(values: ByTurn, config: AdvantageConfig) -> ByTurn:
    """`standardised` among the first turns, the second ones, and so on."""
    return standardised(values, [range(len(one)) for one in values], config)


def beside_grpo(part: Part) -> Estimator:
    """GRPO's advantage of the trajectory, and advantage.turn_weight × what `part` gives its first turns."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        found = []
        for group, whole in zip(groups, _grpo(groups, config), strict=True):
            turns = [
                np.full(len(one.turns), value) for one, value in zip(group.trajectories, whole, strict=True)
            ]
            for values, own in zip(turns, part(group, config), strict=True):
                values[: len(own)] += config.turn_weight * own
            found.append(turns)
        return found

    return estimate
