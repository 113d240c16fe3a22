"""An advantage of one's own.

PYTHONPATH=. calibadv train --config FILE advantage.name=examples.own_advantage:by_rank

`advantage.name=calibadv advantage.base=examples.own_advantage:by_rank` puts CalibAdv's calibration behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax import Group
from calibadv_jax.config import AdvantageConfig


def by_rank(groups: Sequence[Group], config: AdvantageConfig) -> list[list[np.ndarray]]:
    """The share of the group that a trajectory beats, less the share that beats it; later turns count more.

    Args:
        groups: all groups of the step; each has a trajectory or more, with its `answer_score`.
        config: the section `advantage`.

    Returns:
        For each group a list, which has for each trajectory one number, or, as here, float64 [K] with one
        number for each of its K turns.
    """
    return [_of_group(group) for group in groups]


def _of_group(group: Group) -> list[np.ndarray]:
    scores = np.array([trajectory.answer_score for trajectory in group.trajectories])
    advantages = []
    for trajectory, score in zip(group.trajectories, scores, strict=True):
        rank = np.mean(scores < score) - np.mean(scores > score)
        place = np.arange(1, len(trajectory.turns) + 1) / max(1, len(trajectory.turns))
        advantages.append(rank * place)
    return advantages
