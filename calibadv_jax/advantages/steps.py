"""The small steps of which estimators are composed: score less baseline, then spread.

A baseline looks at one group, a spread at all groups of the step. All is float64 on the host, and every sum
is exact to one rounding, so that the order of trajectories and groups does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.advantages.credit import ByToken
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group

_EPSILON = 1e-6  # added to a standard deviation
_VARIANCE = 1e-8  # added to a variance, where advantages are whitened


@dataclass(frozen=True)
class Scored:
    """What the steps know of a group of G trajectories, at least one."""

    scores: np.ndarray  # float64 [G]
    tokens: np.ndarray  # int64 [G]: sampled ones
    max_score: float = 1.0  # largest answer reward


Baseline = Callable[[Scored, AdvantageConfig], np.ndarray]  # -> float64 [G]: scores less a baseline
Spread = Callable[[Sequence[Scored], Sequence[np.ndarray], AdvantageConfig], Sequence[np.ndarray]]
OfGroup = Sequence[float | np.ndarray | ByToken] | np.ndarray  # by trajectory: one number, or float64 [K]
Estimate = Sequence[OfGroup]
Estimator = Callable[[Sequence[Group], AdvantageConfig], Estimate]  # of groups with a trajectory or more


def compose(baseline: Baseline, spread: Spread) -> Estimator:
    """The estimator that takes these two steps."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        found = [scored(group) for group in groups]
        return spread(found, [baseline(one, config) for one in found], config)

    return estimate


def scored(group: Group) -> Scored:
    """Scores and numbers of sampled tokens.

    Raises:
        ValueError: a score is not finite.
    """
    scores = np.array([trajectory.answer_score for trajectory in group.trajectories], np.float64)
    if not np.isfinite(scores).all():
        raise ValueError(f"question {group.question.id!r}: answer scores {scores.tolist()} are not finite")
    tokens = [sum(len(turn.token_ids) for turn in one.turns) for one in group.trajectories]
    return Scored(scores, np.array(tokens, np.int64), group.trajectories[0].max_score)


def is_tied(values: np.ndarray) -> bool:
    """Whether two or more values are all equal.

    The rounded mean of equal values may differ from them by one ulp, which a division would enlarge.
    """
    return len(values) > 1 and bool(values.min() == values.max())


def mean_and_std(scores: np.ndarray) -> tuple[float, float]:
    """With Bessel's correction. Of one score: 0 and 1, as upstream; of equal scores: their value and 0."""
    if len(scores) == 1:
        return 0.0, 1.0
    if is_tied(scores):
        return float(scores[0]), 0.0
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((scores - mean) ** 2) / (len(scores) - 1))


def no_baseline(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """The scores."""
    return one.scores


def less_mean(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """Less the mean of the group; equal scores give exactly 0, a group of one keeps its score."""
    return one.scores - mean_and_std(one.scores)[0]


def less_others(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """Less the mean of the other trajectories of the group; a group of one keeps its score."""
    size = len(one.scores)
    return less_mean(one, config) * (size / (size - 1) if size > 1 else 1.0)


def less_mean_by_length(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """Less the group's mean weighted by sampled tokens; a group of one keeps its score.

    Where nothing was sampled there is no such mean: 0.
    """
    total = int(one.tokens.sum())
    if len(one.scores) == 1:
        return one.scores
    if is_tied(one.scores) or total == 0:
        return np.zeros(len(one.scores))
    return one.scores - math.fsum(one.tokens * one.scores) / total


def best_less_second(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """The group's best score less its second best, for the best trajectory alone; 0 in a group of one."""
    found = np.zeros(len(one.scores))
    if len(one.scores) > 1:
        second, best = np.sort(one.scores)[-2:]
        found[np.argmax(one.scores)] = best - second
    return found


def neutral(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """`less_mean`, where a loser of at least advantage.score_threshold counts as if it scored 0."""
    centred = less_mean(one, config)
    mean = mean_and_std(one.scores)[0]
    return np.where(_nearly_right(one, centred, config), 0.0 - mean, centred)


def acceptable(one: Scored, config: AdvantageConfig) -> np.ndarray:
    """`less_mean`, where a loser of at least advantage.score_threshold gets 0."""
    centred = less_mean(one, config)
    return np.where(_nearly_right(one, centred, config), 0.0, centred)


def _nearly_right(one: Scored, centred: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    return (centred < 0) & (one.scores / one.max_score >= config.score_threshold)


def as_it_is(
    found: Sequence[Scored], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """No spread."""
    return centred


def over_std(
    found: Sequence[Scored], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Over the standard deviation of the scores of the group or of the step, if advantage.normalize_std."""
    if not config.normalize_std:
        return centred
    if config.std_over == "group":
        stds = [mean_and_std(one.scores)[1] for one in found]
    else:
        scores = np.concatenate([one.scores for one in found])
        # Groups of one, which keep their score, would be divided by next to nothing where all are equal.
        stds = [1.0 if is_tied(scores) else mean_and_std(scores)[1]] * len(found)
    return [values / (std + _EPSILON) for values, std in zip(centred, stds, strict=True)]


def whitened(
    found: Sequence[Scored], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """(value - mean) / sqrt(variance + 1e-8) over all sampled tokens of the step; 0 where all are equal."""
    values, tokens = np.concatenate(centred), np.concatenate([one.tokens for one in found])
    total, sampled = int(tokens.sum()), values[tokens > 0]
    if len(sampled) == 0 or sampled.min() == sampled.max():
        return [np.zeros(len(one)) for one in centred]
    mean = math.fsum(tokens * values) / total
    variance = math.fsum(tokens * (values - mean) ** 2) / (total - 1)
    return [(one - mean) / math.sqrt(variance + _VARIANCE) for one in centred]


def over_share_of_scores(
    found: Sequence[Scored], centred: Sequence[np.ndarray], config: AdvantageConfig
) -> Sequence[np.ndarray]:
    """Over the share of the step's trajectories whose score is not 0."""
    scores = np.concatenate([one.scores for one in found])
    factor = len(scores) / max(1, int(np.count_nonzero(scores)))
    return [values * factor for values in centred]
