"""Generalised advantage estimation (GAE): a score set against what a critic expected, token by token.

Only sampled tokens count: after the last one of a turn comes the first one of the next turn, whatever the
environment showed in between. The score stands at the last sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.credit import ByToken
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory

_VARIANCE = 1e-8  # added to the variance


def gae(groups: Sequence[Group], config: AdvantageConfig) -> list[list[ByToken]]:
    """Advantages of the sampled tokens, whitened over those of the step.

    Raises:
        UserError: the critic's values of a trajectory are not known.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    found = iter(whitened([estimate(one, config)[0] for one in trajectories]))
    return [[_by_turn(one, next(found)) for one in group.trajectories] for group in groups]


def estimate(trajectory: Trajectory, config: AdvantageConfig) -> tuple[np.ndarray, np.ndarray]:
    """Advantages before whitening, and the returns that the critic learns: both float64 [n].

    Raises:
        UserError: the critic's values are not known.
    """
    values = values_of(trajectory).astype(np.float64)
    rewards = np.zeros(len(values))
    rewards[-1:] = trajectory.answer_score
    advantages = token_advantages(rewards, values, config.discount, config.gae_lambda)
    return advantages, advantages + values


def values_of(trajectory: Trajectory) -> np.ndarray:
    """The critic's values before the sampled tokens, float32 [n].

    Raises:
        UserError: they are not known.
    """
    known = [turn.values for turn in trajectory.turns if turn.values is not None]
    if len(known) < len(trajectory.turns):
        raise UserError(
            f"question {trajectory.question.id!r}: no values of a critic were kept, and gae cannot"
            " do without: only a run with advantage.name=gae, or advantage.base=gae, has a critic; choose"
            " another advantage.name"
        )
    return np.concatenate([np.zeros(0, np.float32), *known])


def token_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Each token's surprise, and the discounted ones of the tokens after it: float64 [n].

    Args:
        rewards: float64 [n], after each sampled token.
        values: float64 [n], before each of them; after the last one nothing is expected.
        decay: lambda.
    """
    found = np.zeros(len(values))
    later = following = 0.0
    for index in reversed(range(len(values))):
        surprise = rewards[index] + discount * following - values[index]
        later = found[index] = surprise + discount * decay * later
        following = values[index]
    return found


def whitened(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(value - mean) / sqrt(variance + 1e-8) over all tokens; 0 where all are equal."""
    values = np.concatenate([np.zeros(0), *advantages])
    if len(values) == 0 or values.min() == values.max():
        return [np.zeros(len(one)) for one in advantages]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((values - mean) ** 2) / (len(values) - 1)
    return [(one - mean) / math.sqrt(variance + _VARIANCE) for one in advantages]


def _by_turn(trajectory: Trajectory, advantages: np.ndarray) -> ByToken:
    ends = np.cumsum([len(turn.token_ids) for turn in trajectory.turns])[:-1]
    return ByToken(np.split(advantages, ends) if trajectory.turns else [])
