"""Scores of trajectories: answer reward times format validity, less a penalty on length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.rewards.answer import ANSWER_REWARDS
from calibadv_jax.rewards.format import is_trajectory_valid


def score_trajectory(trajectory: Trajectory, config: RewardConfig, prepend_think: bool) -> Trajectory:
    """Sets `format_valid`, `answer_score` and the metrics of ANSWER_REWARDS and format; returns the argument.

    With `config.overlong_penalty` the score is less by what the metric of that name says. The other metrics
    are the raw scores, not multiplied by format validity. A trajectory without an answer turn scores 0
    everywhere.

    Raises:
        ValueError: the question has no golden answers.
    """
    golden_answers = trajectory.question.golden_answers
    if not golden_answers:
        raise ValueError(f"question {trajectory.question.id!r} has no golden answers")
    answer = trajectory.answer
    scores = {
        name: 0.0 if answer is None else reward(answer, golden_answers)
        for name, reward in ANSWER_REWARDS.items()
    }
    trajectory.format_valid = is_trajectory_valid(trajectory, prepend_think)
    is_paid = trajectory.format_valid or not config.format
    trajectory.answer_score = scores[config.answer] if is_paid else 0.0
    trajectory.metrics |= scores | {"format": float(trajectory.format_valid)}
    if config.overlong_penalty:
        penalty = overlong_penalty(int(trajectory.mask.sum()), config)
        trajectory.answer_score -= penalty
        trajectory.metrics["overlong_penalty"] = penalty
    return trajectory


def overlong_penalty(sampled: int, config: RewardConfig) -> float:
    """What a trajectory of so many sampled tokens loses: 0 up to one length, all from another one on."""
    share = (sampled - config.overlong_from) / (config.overlong_until - config.overlong_from)
    return config.overlong_penalty * min(1.0, max(0.0, share))


def trajectory_scores(group: Group, config: RewardConfig, prepend_think: bool) -> list[float]:
    """The score of each trajectory of a group by itself, before `config.shuffle`."""
    return [score_trajectory(one, config, prepend_think).answer_score for one in group.trajectories]


def score_groups(
    groups: Sequence[Group], config: RewardConfig, prepend_think: bool, rng: np.random.Generator
) -> None:
    """Scores every trajectory in place, but not those that failed.

    With `config.shuffle`, a control experiment, the pairs (answer_score, format_valid) are then
    permuted with `rng` over all trajectories of the step; the metrics stay true. Otherwise `rng` is
    not drawn from.

    Raises:
        ValueError: a question has no golden answers.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        score_trajectory(trajectory, config, prepend_think)
    if not config.shuffle:
        return
    earned = [(trajectory.answer_score, trajectory.format_valid) for trajectory in trajectories]
    for trajectory, source in zip(trajectories, rng.permutation(len(earned)), strict=True):
        trajectory.answer_score, trajectory.format_valid = earned[source]
