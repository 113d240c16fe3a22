"""Scores of trajectories: answer reward times format validity, less a penalty on length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.config.sections.credit import JUDGE, JUDGE_AGREEMENT
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.own_function import failure, is_address, own_function
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.rewards.answer import ANSWER_REWARDS
from calibadv_jax.rewards.format import is_trajectory_valid

# What is logged as reward/NAME already.
TAKEN = (
    *(*ANSWER_REWARDS, JUDGE, JUDGE_AGREEMENT, "format", "format_valid", "overlong_penalty"),
    *("mean", "max", "min"),
)


def score_trajectory(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """The trajectory with `format_valid`, `answer_score` and the metrics of ANSWER_REWARDS and format.

    A function of the user's own that pays has a metric of its name; what the judge said is a metric already.
    With `config.overlong_penalty` the score is less by what the metric of that name says. The other metrics
    are the raw scores, not multiplied by format validity. A trajectory without an answer turn scores 0
    everywhere.

    Raises:
        ValueError: the question has no golden answers.
        UserError: a function of the user's cannot be loaded or gives no number, or nobody has judged.
    """
    golden_answers = trajectory.question.golden_answers
    if not golden_answers:
        raise ValueError(f"question {trajectory.question.id!r} has no golden answers")
    answer = trajectory.answer
    scores = {
        name: 0.0 if answer is None else reward(answer, golden_answers)
        for name, reward in ANSWER_REWARDS.items()
    }
    scores |= {metric_name(name): own_score(name, trajectory) for name in config.weights if is_address(name)}
    is_valid = is_trajectory_valid(trajectory)
    score = _paid(trajectory, scores, config) if is_valid or not config.format else 0.0
    if config.overlong_penalty:
        scores["overlong_penalty"] = overlong_penalty(int(trajectory.mask.sum()), config)
        score -= scores["overlong_penalty"]
    metrics = trajectory.metrics | scores | {"format": float(is_valid)}
    return replace(
        trajectory,
        format_valid=is_valid,
        answer_score=score,
        max_score=config.max_score,
        metrics=metrics,
    )


def metric_name(reward: str) -> str:
    """As the reward is logged, behind reward/."""
    return reward.partition(":")[2] or reward


def own_score(address: str, trajectory: Trajectory) -> float:
    """What a function of the user's own says of a finished trajectory.

    Raises:
        UserError: it cannot be loaded, fails, or gives no finite number.
    """
    function = own_function(address, "reward.answer", ("trajectory",), "reward(trajectory) -> float")
    try:
        score = float(function(trajectory))
    except Exception as error:  # a function of the user's own may raise anything
        raise UserError(
            f"reward.answer: {address} failed on an answer to question {trajectory.question.id!r}:"
            f" {failure(error)}; it must return a number for every trajectory"
        ) from error
    if not math.isfinite(score):
        raise UserError(
            f"reward.answer: {address} gave {score} for an answer to question {trajectory.question.id!r}; it"
            " must return a finite number"
        )
    return score


def _paid(trajectory: Trajectory, scores: Mapping[str, float], config: RewardConfig) -> float:
    """The weighted sum of what pays."""
    if JUDGE in config.weights and trajectory.answer is not None and JUDGE not in trajectory.metrics:
        raise UserError(
            "reward.answer names judge, but nobody has judged these trajectories: only a run with"
            " reward.judge.url asks, while it samples"
        )
    known = {JUDGE: trajectory.metrics.get(JUDGE, 0.0), **scores}
    if isinstance(config.answer, str):
        return known[metric_name(config.answer)]
    return math.fsum(weight * known[metric_name(name)] for name, weight in config.answer.items())


def check_reward(config: RewardConfig) -> list[str]:
    """What pays, in words; nothing where it is one of the built-in comparisons.

    Raises:
        UserError: a function of the user's cannot be loaded, or two rewards have the same name.
    """
    names = [metric_name(name) for name in config.weights]
    for name in config.weights:
        if not is_address(name):
            continue
        own_function(name, "reward.answer", ("trajectory",), "reward(trajectory) -> float")
        if metric_name(name) in TAKEN or names.count(metric_name(name)) > 1:
            raise UserError(
                f"reward.answer: {name} would be logged as reward/{metric_name(name)}, which is another"
                " metric's name; rename the function"
            )
    lines = []
    if config.judge.url:
        lines.append(f"judge ON: {config.judge.model} at {config.judge.url} is asked about every answer")
    if not isinstance(config.answer, str) or config.answer not in ANSWER_REWARDS:
        terms = " + ".join(f"{weight:g} × {name}" for name, weight in config.weights.items())
        lines.append(f"reward of an answer: {terms}")
    return lines


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
