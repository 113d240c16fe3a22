"""Scores of trajectories: answer reward times format validity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.rewards.answer import ANSWER_REWARDS
from calibadv_jax.rewards.format import is_trajectory_valid


def score_trajectory(trajectory: Trajectory, config: RewardConfig, prepend_think: bool) -> Trajectory:
    """Sets `format_valid`, `answer_score` and the metrics of ANSWER_REWARDS and format; returns the argument.

    Metrics are the raw scores, not multiplied by format validity. A trajectory without an answer turn
    scores 0 everywhere.

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
    return trajectory


def text_scores(trajectory: Trajectory) -> dict[str, float]:
    """Scores of the answer or, where none is marked, of all that was written."""
    text = trajectory.answer or " ".join(turn.text for turn in trajectory.turns)
    names = ("f1", "cover_em")
    return {f"text_{name}": ANSWER_REWARDS[name](text, trajectory.question.golden_answers) for name in names}


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
