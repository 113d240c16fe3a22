"""Scores of trajectories: answer reward times format validity, less a penalty on length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.rewards.answer import ANSWER_REWARDS
from calibadv_jax.rewards.format import is_trajectory_valid


def score_trajectory(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """The trajectory with `format_valid`, `answer_score` and the metrics of ANSWER_REWARDS and format.

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
    is_valid = is_trajectory_valid(trajectory)
    score = scores[config.answer] if is_valid or not config.format else 0.0
    if config.overlong_penalty:
        scores["overlong_penalty"] = overlong_penalty(int(trajectory.mask.sum()), config)
        score -= scores["overlong_penalty"]
    metrics = trajectory.metrics | scores | {"format": float(is_valid)}
    return replace(trajectory, format_valid=is_valid, answer_score=score, metrics=metrics)


def overlong_penalty(sampled: int, config: RewardConfig) -> float:
    """What a trajectory of so many sampled tokens loses: 0 up to one length, all from another one on."""
    share = (sampled - config.overlong_from) / (config.overlong_until - config.overlong_from)
    return config.overlong_penalty * min(1.0, max(0.0, share))


def text_scores(trajectory: Trajectory) -> dict[str, float]:
    """Scores of the answer or, where none is marked, of all that was written."""
    text = trajectory.answer or " ".join(turn.text for turn in trajectory.turns)
    names = ("f1", "cover_em")
    return {f"text_{name}": ANSWER_REWARDS[name](text, trajectory.question.golden_answers) for name in names}


def trajectory_scores(group: Group, config: RewardConfig) -> list[float]:
    """The score of each trajectory of a group by itself, before `config.shuffle`."""
    return [score_trajectory(one, config).answer_score for one in group.trajectories]


def score_groups(groups: Sequence[Group], config: RewardConfig, rng: np.random.Generator) -> list[Group]:
    """The groups with every trajectory scored, but not those that failed.

    With `config.shuffle`, a control experiment, the pairs (answer_score, format_valid) are then
    permuted with `rng` over all trajectories of the step; the metrics stay true. Otherwise `rng` is
    not drawn from.

    Raises:
        ValueError: a question has no golden answers.
    """
    scored = [score_trajectory(one, config) for group in groups for one in group.trajectories]
    if config.shuffle:
        sources = [scored[source] for source in rng.permutation(len(scored))]
        scored = [
            replace(one, answer_score=source.answer_score, format_valid=source.format_valid)
            for one, source in zip(scored, sources, strict=True)
        ]
    remaining = iter(scored)
    return [replace(group, trajectories=[next(remaining) for _ in group.trajectories]) for group in groups]
