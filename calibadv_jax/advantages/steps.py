"""The small steps of which estimators are composed: score less baseline, then spread; rewards by turn.

A baseline looks at one group, a spread at all groups of the step. All is float64 on the host, and every sum
is exact to one rounding, so that the order of trajectories and groups does not matter. A value of a
trajectory's turns is float64 [n]: n turns up to the last sampled one, or fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.credit import ByToken
from calibadv_jax.core.trajectory import Group

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

EPSILON = 1e-6  # added to a standard deviation
_VARIANCE = 1e-8  # added to a variance, where advantages are whitened


@dataclass(frozen=True)
class ScoredGroup:
    """Scores and lengths of a group of G trajectories, at least one."""

    scores: np.ndarray  # float64 [G]
    tokens: np.ndarray  # int64 [G]: sampled ones
    max_score: float = 1.0  # largest answer reward


OfGroup = Sequence[float | np.ndarray | ByToken] | np.ndarray  # by trajectory: one number, or float64 [K]
Estimate = Sequence[OfGroup]
ByTurn = list[np.ndarray]  # by trajectory: float64 [n]
Baseline = Callable[[ScoredGroup, "AdvantageConfig"], np.ndarray]  # -> float64 [G]: scores less a baseline
Spread = Callable[[Sequence[ScoredGroup], Sequence[np.ndarray], "AdvantageConfig"], Sequence[np.ndarray]]
EstimateFunction = Callable[[Sequence[Group], "AdvantageConfig"], Estimate]  # of groups that are not empty
TurnRewards = Callable[[Group, "AdvantageConfig"], ByTurn]


def compose(baseline: Baseline, spread: Spread) -> EstimateFunction:
    """Return the estimator that takes these two steps."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        scored = [scored_group(group) for group in groups]
        return spread(scored, [baseline(group, config) for group in scored], config)

    return estimate


def scored_group(group: Group) -> ScoredGroup:
    """Return scores and numbers of sampled tokens.

    Raises:
        ValueError: a score is not finite.
    """
    scores = np.array([trajectory.answer_score for trajectory in group.trajectories], np.float64)
    if not np.isfinite(scores).all():
        raise ValueError(f"question {group.question.id!r}: answer scores {scores.tolist()} are not finite")
    tokens = [sum(len(turn.token_ids) for turn in trajectory.turns) for trajectory in group.trajectories]
    return ScoredGroup(scores, np.array(tokens, np.int64), group.trajectories[0].max_score)


def is_tied(values: np.ndarray) -> bool:
    """Return whether two or more values are all equal.

    The rounded mean of equal values may differ from them by one ulp, which a division would enlarge.
    """
    return len(values) > 1 and bool(values.min() == values.max())


def mean_and_std(scores: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation, with Bessel's correction.

    Of one score: 0 and 1, as upstream; of equal scores: their value and 0.
    """
    if len(scores) == 1:
        return 0.0, 1.0
    if is_tied(scores):
        return float(scores[0]), 0.0
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((scores - mean) ** 2) / (len(scores) - 1))


def whiten(values: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return (value - mean) / sqrt(variance + 1e-8), where a value counts so often; 0 where all are equal."""
    joined, weights = np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, int), *counts])
    total, present = int(weights.sum()), joined[weights > 0]
    if len(present) == 0 or present.min() == present.max():
        return [np.zeros(len(part)) for part in values]
    mean = math.fsum(weights * joined) / total
    variance = math.fsum(weights * (joined - mean) ** 2) / (total - 1)
    return [(part - mean) / math.sqrt(variance + _VARIANCE) for part in values]


# Baselines


def no_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return the scores."""
    return group.scores


def less_mean(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the mean of the group; equal scores give exactly 0, a group of one keeps its score."""
    return group.scores - mean_and_std(group.scores)[0]


def less_others(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the mean of the other trajectories of the group; a group of one keeps its score."""
    size = len(group.scores)
    return less_mean(group, config) * (size / (size - 1) if size > 1 else 1.0)


def less_mean_by_length(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the group's mean weighted by sampled tokens; a group of one keeps its score.

    Where nothing was sampled there is no such mean: 0.
    """
    total = int(group.tokens.sum())
    if len(group.scores) == 1:
        return group.scores
    if is_tied(group.scores) or total == 0:
        return np.zeros(len(group.scores))
    return group.scores - math.fsum(group.tokens * group.scores) / total


def best_less_second(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Give the best trajectory its score less the second best, the others 0; 0 in a group of one."""
    advantages = np.zeros(len(group.scores))
    if len(group.scores) > 1:
        second, best = np.sort(group.scores)[-2:]
        advantages[np.argmax(group.scores)] = best - second
    return advantages


def neutral(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Apply `less_mean`, where a loser of at least advantage.score_threshold counts as if it scored 0."""
    centred = less_mean(group, config)
    mean = mean_and_std(group.scores)[0]
    return np.where(_nearly_right(group, centred, config), 0.0 - mean, centred)


def acceptable(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Apply `less_mean`, where a loser of at least advantage.score_threshold gets 0."""
    centred = less_mean(group, config)
    return np.where(_nearly_right(group, centred, config), 0.0, centred)


def _nearly_right(group: ScoredGroup, centred: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    return (centred < 0) & (group.scores / group.max_score >= config.score_threshold)


# Spreads


def unscaled(
    groups: Sequence[ScoredGroup], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Return the values."""
    return centred


def over_std(
    groups: Sequence[ScoredGroup], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Divide by the standard deviation of the group's or the step's scores, if advantage.normalize_std."""
    if not config.normalize_std:
        return centred
    if config.std_over == "group":
        stds = [mean_and_std(group.scores)[1] for group in groups]
    else:
        scores = np.concatenate([group.scores for group in groups])
        # Groups of one, which keep their score, would be divided by next to nothing where all are equal.
        stds = [1.0 if is_tied(scores) else mean_and_std(scores)[1]] * len(groups)
    return [values / (std + EPSILON) for values, std in zip(centred, stds, strict=True)]


def whitened(
    groups: Sequence[ScoredGroup], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Whiten over all sampled tokens of the step."""
    return whiten(centred, [group.tokens for group in groups])


def over_share_of_scores(
    groups: Sequence[ScoredGroup], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Divide by the share of the step's trajectories whose score is not 0."""
    scores = np.concatenate([group.scores for group in groups])
    factor = len(scores) / max(1, int(np.count_nonzero(scores)))
    return [values * factor for values in centred]


grpo = compose(less_mean, over_std)


# Rewards by turn


def to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return each turn's reward plus the discounted ones of the turns after it."""
    sums = rewards.astype(np.float64)
    for index in reversed(range(len(sums) - 1)):
        sums[index] += discount * sums[index + 1]
    return sums


def standardised(values: ByTurn, labels: Sequence[Sequence[Hashable]], config: AdvantageConfig) -> ByTurn:
    """Return (value - mean) / (std + 1e-6) among the turns of a group with the same label.

    Without advantage.normalize_std only less the mean. 0 for a turn that is alone, and among equal values.
    """
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for position, of_trajectory in enumerate(labels):
        for index, label in enumerate(of_trajectory):
            places.setdefault(label, []).append((position, index))
    results = [np.zeros(len(turns)) for turns in values]
    for together in places.values():
        members = np.array([values[position][index] for position, index in together])
        if len(members) < 2 or is_tied(members):
            continue
        mean, std = mean_and_std(members)
        divisor = std + EPSILON if config.normalize_std else 1.0
        for position, index in together:
            results[position][index] = (values[position][index] - mean) / divisor
    return results


def by_number(values: ByTurn, config: AdvantageConfig) -> ByTurn:
    """Standardise among the first turns, the second ones, and so on."""
    return standardised(values, [range(len(turns)) for turns in values], config)


def beside_grpo(turn_rewards: TurnRewards) -> EstimateFunction:
    """Return the estimator that adds advantage.turn_weight × these rewards to GRPO's advantage."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        advantages = []
        for group, whole in zip(groups, grpo(groups, config), strict=True):
            turns = each_turn(group, whole)
            for values, own in zip(turns, turn_rewards(group, config), strict=True):
                values[: len(own)] += config.turn_weight * own
            advantages.append(turns)
        return advantages

    return estimate


def each_turn(group: Group, whole: OfGroup) -> ByTurn:
    """Give each turn its trajectory's advantage: float64 [K] for each trajectory."""
    return [
        np.full(len(trajectory.turns), value)
        for trajectory, value in zip(group.trajectories, whole, strict=True)
    ]
