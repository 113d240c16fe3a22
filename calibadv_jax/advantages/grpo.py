"""GRPO: a trajectory's score relative to its group, the same for all of its sampled tokens."""

from __future__ import annotations

import math

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group

_EPSILON = 1e-6


def group_advantages(scores: np.ndarray, normalize_std: bool) -> np.ndarray:
    """(score - mean) / (std + 1e-6) with Bessel's correction, float64 [G] -> float64 [G].

    Equal scores give exactly 0. A group of one has mean 0 and standard deviation 1, as upstream.
    Without `normalize_std` the scores are centred only (Dr. GRPO).
    """
    size = len(scores)
    if size == 0:
        return np.zeros(0)
    if size == 1:
        centred, std = scores.astype(np.float64), 1.0
    elif scores.min() == scores.max():
        # The rounded mean of equal scores may differ from them by one ulp, which the division would enlarge.
        return np.zeros(size)
    else:
        mean, std = group_statistics(scores)
        centred = scores - mean
    return centred / (std + _EPSILON) if normalize_std else centred


def group_statistics(scores: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (Bessel's correction) of at least two scores, float64 [G]."""
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((scores - mean) ** 2) / (len(scores) - 1))


def assign(group: Group, config: AdvantageConfig) -> GroupCredit:
    """Every turn of a trajectory carries the trajectory's advantage.

    Raises:
        ValueError: a score is not finite.
    """
    scores = np.array([trajectory.answer_score for trajectory in group.trajectories], np.float64)
    if not np.isfinite(scores).all():
        raise ValueError(f"question {group.question.id!r}: answer scores {scores.tolist()} are not finite")
    raw = group_advantages(scores, config.normalize_std)
    lengths = [len(trajectory.turns) for trajectory in group.trajectories]
    return GroupCredit(
        group=group,
        raw=raw,
        turns=[np.full(length, advantage) for length, advantage in zip(lengths, raw, strict=True)],
        correctness=[np.zeros(length) for length in lengths],
    )


def describe_statistics(config: AdvantageConfig) -> str:
    """The line on group statistics, shared by all algorithms that start from GRPO."""
    formula = "(score - mean) / (std + 1e-6)" if config.normalize_std else "score - mean (Dr. GRPO)"
    return f"group statistics: advantage = {formula}; groups of equal scores give exactly 0"


def describe(config: AdvantageConfig) -> list[str]:
    """What this configuration does, a line a switch."""
    return [
        "advantage grpo: every sampled token of a trajectory carries the trajectory's advantage",
        describe_statistics(config),
        "soft penalty OFF, rebalance OFF: no CalibAdv calibration; its keys have no effect under grpo",
    ]
