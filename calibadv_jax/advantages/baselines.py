"""The two steps of estimators that compare scores: subtract a baseline from them, then normalize the result.

A baseline sees one group, a normalizer all groups of the step. Values are float64 on the host. Every sum is
exact to one rounding, so the order of trajectories and groups does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.credit import ByToken
from calibadv_jax.core.trajectory import Group

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

EPSILON = 1e-6  # Added to a standard deviation before a division.
_VARIANCE_EPSILON = 1e-8  # Added to the variance where advantages are whitened.


@dataclass(frozen=True)
class ScoredGroup:
    """Scores and lengths of a group of G trajectories, at least one."""

    scores: np.ndarray  # float64 [G]
    tokens: np.ndarray  # int64 [G]: number of sampled tokens
    max_score: float = 1.0  # largest answer reward of the config


# For each trajectory of a group: one number, float64 [K] with one for each turn, or one for each token.
GroupEstimate = Sequence[float | np.ndarray | ByToken] | np.ndarray
# For each group of the step: its estimate.
Estimate = Sequence[GroupEstimate]
# An estimator. The groups that it gets have a trajectory or more each.
EstimateFunction = Callable[[Sequence[Group], "AdvantageConfig"], Estimate]
# For each group of the step: float64 [G].
GroupValues = Sequence[np.ndarray]
# Scores of a group -> float64 [G]: the scores less a baseline.
Baseline = Callable[[ScoredGroup, "AdvantageConfig"], np.ndarray]
# Groups of the step, their scores less a baseline -> advantages.
Normalizer = Callable[[Sequence[ScoredGroup], GroupValues, "AdvantageConfig"], GroupValues]


def estimate_from_scores(
    groups: Sequence[Group],
    config: AdvantageConfig,
    baseline: Baseline,
    normalizer: Normalizer | None = None,
) -> GroupValues:
    """Subtract a baseline from the scores of each group, then normalize over the step.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`.
        baseline: the first step, applied to each group.
        normalizer: the second step, applied to all groups together; None: no second step.

    Returns:
        For each group float64 [G], one advantage for each trajectory.

    Raises:
        ValueError: if a score is not finite.
    """
    scored_groups = [scored_group(group) for group in groups]
    values = [baseline(group, config) for group in scored_groups]
    if normalizer is None:
        return values
    return normalizer(scored_groups, values, config)


def scored_group(group: Group) -> ScoredGroup:
    """Return the scores and the numbers of sampled tokens of a group.

    Args:
        group: a group with a trajectory or more.

    Returns:
        The group's scores and lengths, in the order of its trajectories.

    Raises:
        ValueError: if a score is not finite.
    """
    trajectories = group.trajectories
    scores = np.array([trajectory.answer_score for trajectory in trajectories], np.float64)
    if not np.isfinite(scores).all():
        raise ValueError(f"question {group.question.id!r}: answer scores {scores.tolist()} are not finite")
    num_tokens = []
    for trajectory in trajectories:
        num_tokens.append(sum(len(turn.token_ids) for turn in trajectory.turns))
    tokens = np.array(num_tokens, np.int64)
    return ScoredGroup(scores, tokens, trajectories[0].max_score)


# --- Statistics ---


def is_tied(values: np.ndarray) -> bool:
    """Return whether there are two or more values and all are equal.

    Ties are recognised by this function, since the rounded mean of equal values may differ from them by one
    unit in the last place.

    Args:
        values: float64 [n]; n may be 0.

    Returns:
        False for a single value, and for none.
    """
    return len(values) > 1 and bool(values.min() == values.max())


def mean_and_std(scores: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation, with Bessel's correction (n - 1).

    Args:
        scores: float64 [n], n at least 1.

    Returns:
        Mean and standard deviation. (0, 1) for a single score, which thus keeps its value when standardised;
        exactly (score, 0) for equal scores.
    """
    if len(scores) == 1:
        return 0.0, 1.0
    if is_tied(scores):
        return float(scores[0]), 0.0
    count = len(scores)
    mean = math.fsum(scores) / count
    squares = (scores - mean) ** 2
    variance = math.fsum(squares) / (count - 1)
    return mean, math.sqrt(variance)


def whiten(values: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return (value - mean) / sqrt(variance + 1e-8), where each value counts as often as given.

    Mean and variance (with Bessel's correction) are those of all arrays together.

    Args:
        values: arrays of float64 [n_i].
        counts: arrays of int64 [n_i], parallel to `values`: how often each value counts.

    Returns:
        Arrays of float64 [n_i]; all 0 if the values that count are equal, or fewer than two.
    """
    joined = np.concatenate([np.zeros(0), *values])  # float64 [n]
    weights = np.concatenate([np.zeros(0, int), *counts])  # int64 [n]
    total = int(weights.sum())
    distinct = set(joined[weights > 0])
    if len(distinct) < 2:
        return [np.zeros(len(array)) for array in values]
    mean = math.fsum(weights * joined) / total
    squares = weights * (joined - mean) ** 2
    variance = math.fsum(squares) / (total - 1)
    divisor = math.sqrt(variance + _VARIANCE_EPSILON)
    return [(array - mean) / divisor for array in values]


# --- Baselines ---


def no_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return the scores as they are: s.

    Args:
        group: the group.
        config: not read.

    Returns:
        float64 [G]; the group's own array, not a copy.
    """
    return group.scores


def group_mean_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return s - mean of the group's scores.

    Args:
        group: the group.
        config: not read.

    Returns:
        float64 [G]; exactly 0 for equal scores, the score itself in a group of one.
    """
    mean, _ = mean_and_std(group.scores)
    return group.scores - mean


def leave_one_out_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return s - mean of the scores of the group's other trajectories, which is (s - mean) G / (G - 1).

    Args:
        group: the group.
        config: not read.

    Returns:
        float64 [G]; exactly 0 for equal scores, the score itself in a group of one.
    """
    size = len(group.scores)
    factor = size / (size - 1) if size > 1 else 1.0
    return group_mean_baseline(group, config) * factor


def length_weighted_mean_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return s - Σ n s / Σ n, where n is a trajectory's number of sampled tokens.

    Args:
        group: the group, with the number of sampled tokens of each trajectory.
        config: not read.

    Returns:
        float64 [G]; the score itself in a group of one. In other groups exactly 0 for equal scores, and 0 if
        no token was sampled.
    """
    if len(group.scores) == 1:
        return group.scores
    total = int(group.tokens.sum())
    if is_tied(group.scores) or total == 0:
        return np.zeros(len(group.scores))
    return group.scores - math.fsum(group.tokens * group.scores) / total


def best_minus_second(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return the best score less the second best for the best trajectory, and 0 for the others.

    Args:
        group: the group.
        config: not read.

    Returns:
        float64 [G]; 0 in a group of one, and if several trajectories share the best score.
    """
    advantages = np.zeros(len(group.scores))
    if len(group.scores) > 1:
        second, best = np.sort(group.scores)[-2:]
        advantages[np.argmax(group.scores)] = best - second
    return advantages


def near_misses_as_wrong(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return s - mean, where near misses count as if they had scored 0.

    A near miss scores less than the group's mean, and at least `advantage.score_threshold` of the largest
    answer reward. The mean is that of the true scores.

    Args:
        group: the group.
        config: the section `advantage`; `score_threshold` is read.

    Returns:
        float64 [G]; -mean for a near miss. A group of one keeps its score.
    """
    centred = group_mean_baseline(group, config)
    mean, _ = mean_and_std(group.scores)
    return np.where(_is_near_miss(group, centred, config), 0.0 - mean, centred)


def near_misses_as_mean(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Return s - mean, where the near misses of `near_misses_as_wrong` get 0.

    Args:
        group: the group.
        config: the section `advantage`; `score_threshold` is read.

    Returns:
        float64 [G]; 0 for a near miss. A group of one keeps its score.
    """
    centred = group_mean_baseline(group, config)
    return np.where(_is_near_miss(group, centred, config), 0.0, centred)


def _is_near_miss(group: ScoredGroup, centred: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """Return bool [G], given the scores less the group's mean."""
    relative_scores = group.scores / group.max_score
    return (centred < 0) & (relative_scores >= config.score_threshold)


# --- Normalizers ---


def normalize_by_std(
    groups: Sequence[ScoredGroup], centred: GroupValues, config: AdvantageConfig
) -> GroupValues:
    """Divide by the standard deviation of the scores + 1e-6, unless `advantage.normalize_std` is false.

    Args:
        groups: the groups of the step.
        centred: for each group float64 [G], scores less a baseline.
        config: the section `advantage`; `std_over` says whether the standard deviation is that of each
            group's scores or that of all scores of the step.

    Returns:
        For each group float64 [G]; 0 stays 0, so tied groups get 0.
    """
    if not config.normalize_std:
        return centred
    if config.std_over == "group":
        stds = [mean_and_std(group.scores)[1] for group in groups]
    else:
        scores = np.concatenate([group.scores for group in groups])
        # If all scores of the step are equal, a division by almost 0 would blow up groups of one, which keep
        # their score.
        std = 1.0 if is_tied(scores) else mean_and_std(scores)[1]
        stds = [std] * len(groups)
    return [values / (std + EPSILON) for values, std in zip(centred, stds, strict=True)]


def divide_by_nonzero_share(
    groups: Sequence[ScoredGroup], centred: GroupValues, config: AdvantageConfig
) -> GroupValues:
    """Divide by the share of the step's trajectories whose score is not 0.

    Args:
        groups: the groups of the step, one or more.
        centred: for each group float64 [G], scores less a baseline.
        config: not read.

    Returns:
        For each group float64 [G]. If all scores are 0, the values are multiplied by the number of scores.
    """
    scores = np.concatenate([group.scores for group in groups])
    num_nonzero = int(np.count_nonzero(scores))
    factor = len(scores) / max(1, num_nonzero)
    return [values * factor for values in centred]


def whiten_over_tokens(
    groups: Sequence[ScoredGroup], centred: GroupValues, config: AdvantageConfig
) -> GroupValues:
    """Whiten over the sampled tokens of the step: a trajectory counts as often as it has such tokens.

    Args:
        groups: the groups of the step, with the number of sampled tokens of each trajectory.
        centred: for each group float64 [G], scores less a baseline.
        config: not read.

    Returns:
        For each group float64 [G], see `whiten`.
    """
    return whiten(centred, [group.tokens for group in groups])
