"""Estimators that give every sampled token of a trajectory the same advantage, computed from scores.

In the formulas s is a trajectory's score, n its number of sampled tokens, mean and std the statistics of its
group's scores, std with Bessel's correction. `advantage.normalize_std: false` drops the division by
std + 1e-6, and `advantage.std_over: step` takes std over all scores of the step.

Each estimator takes the scored groups of the step, each with a trajectory or more, and the section
`advantage`. It returns for each group float64 [G] with one advantage for each trajectory, and raises
ValueError if a score is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibadv_jax.advantages.baselines import (
    GroupValues,
    best_minus_second,
    divide_by_nonzero_share,
    estimate_from_scores,
    group_mean_baseline,
    leave_one_out_baseline,
    length_weighted_mean_baseline,
    near_misses_as_mean,
    near_misses_as_wrong,
    no_baseline,
    normalize_by_std,
    whiten_over_tokens,
)
from calibadv_jax.core.trajectory import Group

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig


def grpo(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return GRPO's advantages: A = (s - mean) / (std + 1e-6).

    DeepSeekMath, arXiv 2402.03300. A group of one keeps its score (mean 0, std 1).

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `normalize_std` and `std_over` are read.

    Returns:
        For each group float64 [G]; exactly 0 for equal scores.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, group_mean_baseline, normalize_by_std)


def dr_grpo(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return Dr. GRPO's advantages: A = s - mean.

    arXiv 2503.20783. The same as `grpo` with `advantage.normalize_std: false`.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]; exactly 0 for equal scores, and the score itself in a group of one.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, group_mean_baseline)


def grpo_neutral(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return GRPO's advantages, where near misses count as wrong: A = (s' - mean) / (std + 1e-6).

    s' is 0 for a near miss (s < mean, and s at least `advantage.score_threshold` of the largest answer
    reward), else s. By CalibAdv's authors (github.com/wujwyi/CalibAdv, key `neutral` of `algorithm`).

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `score_threshold`, `normalize_std` and `std_over` are read.

    Returns:
        For each group float64 [G]; mean and std are those of the true scores s.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, near_misses_as_wrong, normalize_by_std)


def grpo_acceptable(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return GRPO's advantages, and 0 for near misses: A = (s' - mean) / (std + 1e-6).

    s' is the mean for a near miss (as in `grpo_neutral`), else s. By CalibAdv's authors
    (github.com/wujwyi/CalibAdv, key `acceptable_mask` of `algorithm`).

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `score_threshold`, `normalize_std` and `std_over` are read.

    Returns:
        For each group float64 [G]; mean and std are those of the true scores s.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, near_misses_as_mean, normalize_by_std)


def grpo_passk(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return pass@k advantages: A = (best - second best) / (std + 1e-6) for the best trajectory, else 0.

    verl, `grpo_passk` in `verl/trainer/ppo/core_algos`, which raises for a group of one; here it gets 0.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `normalize_std` and `std_over` are read.

    Returns:
        For each group float64 [G], with at most one number that is not 0.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, best_minus_second, normalize_by_std)


def rloo(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return RLOO's advantages: A = s - mean of the group's other trajectories.

    arXiv 2402.14740. A group of one keeps its score.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]; exactly 0 for equal scores.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, leave_one_out_baseline)


def opo(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return OPO's advantages: A = s - Σ n s / Σ n, with sums over the group.

    arXiv 2505.23585. A group of one keeps its score; without sampled tokens A = 0.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]; exactly 0 for equal scores.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, length_weighted_mean_baseline)


def gpg(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return GPG's advantages: A = (s - mean) / share of the step's scores that are not 0.

    arXiv 2504.02546.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]; all 0 if all scores of the step are 0.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, group_mean_baseline, divide_by_nonzero_share)


def reinforce_plus_plus(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return REINFORCE++'s advantages: A = s, whitened over the sampled tokens of the step.

    arXiv 2501.03262. Whitened is (x - mean of the step) / sqrt(variance of the step + 1e-8).

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]; all 0 if the scores of all trajectories with sampled tokens are equal.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, no_baseline, whiten_over_tokens)


def reinforce_plus_plus_baseline(groups: Sequence[Group], config: AdvantageConfig) -> GroupValues:
    """Return REINFORCE++-baseline's advantages: A = s - mean, whitened as in `reinforce_plus_plus`.

    arXiv 2501.03262.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`, of which nothing is read.

    Returns:
        For each group float64 [G]. Since the step's mean is subtracted, a group of equal scores need not get
        0.

    Raises:
        ValueError: if a score is not finite.
    """
    return estimate_from_scores(groups, config, group_mean_baseline, whiten_over_tokens)
