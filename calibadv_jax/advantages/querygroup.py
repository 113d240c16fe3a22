"""querygroup, of CalibAdv's authors: searches are compared with each other by what they found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.credit import search_turns
from calibadv_jax.advantages.silver import judge_turns, silver_documents
from calibadv_jax.advantages.steps import (
    Estimate,
    OfGroup,
    compose,
    is_tied,
    less_mean,
    mean_and_std,
    over_std,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group

_FOUND_SHARE = 0.7  # of a search's advantage; the rest is its trajectory's
_NOTHING_FOUND = 1e-6  # correctness of a search that found nothing new
_EPSILON = 1e-6

_grpo = compose(less_mean, over_std)


def querygroup(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """A judged search gets 0.7 × (correctness - mean) / (std + 1e-6) + 0.3 × its trajectory's advantage.

    Mean and standard deviation are over the judged searches of the group, where there are two or more.
    Other turns get their trajectory's advantage, which is GRPO's.
    """
    whole = _grpo(groups, config)
    return [_by_turn(group, values, config) for group, values in zip(groups, whole, strict=True)]


def _by_turn(group: Group, whole: OfGroup, config: AdvantageConfig) -> list[np.ndarray]:
    silver = silver_documents(group, config.silver_threshold)
    found = [np.full(len(one.turns), value) for one, value in zip(group.trajectories, whole, strict=True)]
    places: list[tuple[int, int]] = []
    correctness: list[float] = []
    for position, trajectory in enumerate(group.trajectories):
        if not silver or not trajectory.format_valid:
            continue
        judged = judge_turns(trajectory, silver, config.correctness)
        for index in search_turns(trajectory):
            places.append((position, index))
            correctness.append(judged[index].correctness or _NOTHING_FOUND)
    if places:
        values = np.array(correctness)
        mean, std = mean_and_std(values)
        for (position, index), value in zip(places, values, strict=True):
            gain = 0.0 if is_tied(values) else (value - mean) / (std + _EPSILON)
            turns = found[position]
            turns[index] = _FOUND_SHARE * gain + (1 - _FOUND_SHARE) * turns[index]
    return found
