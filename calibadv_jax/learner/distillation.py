"""The teacher's part of a sample: its log-probabilities, and where it guides (docs/distillation.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.config import TeacherConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.learner.batching import Sample


def is_guided(trajectory: Trajectory, config: TeacherConfig) -> bool:
    """Return whether the teacher may guide a token of a trajectory.

    Args:
        trajectory: a scored trajectory.
        config: section `teacher`.

    Returns:
        With `config.guides` "failed", whether the trajectory's score, as a share of the largest one, is below
        `config.failed_below`. True otherwise.
    """
    if trajectory.is_demonstration:
        return False  # its tokens say nothing of the divergence of the policy, which did not sample them
    if config.guides == "failed":
        return trajectory.relative_score < config.failed_below
    return True


def guided_samples(
    samples: Sequence[Sample], trajectories: Sequence[Trajectory], config: TeacherConfig, coef: float
) -> list[Sample]:
    """Return copies of the samples with the teacher's part.

    A token that the teacher guides has the weight `coef`, every other one 0. Guided are the sampled tokens of
    `is_guided` trajectories whose turns have `teacher_logprobs`; with `config.guides` "negative" only those
    with an advantage below 0.

    Args:
        samples: from `step.make_sample`, one for each trajectory, with T tokens each.
        trajectories: scored trajectories.
        config: section `teacher`. Advantages are multiplied by `reward_weight`.
        coef: the teacher's weight in this step.

    Returns:
        The copies, with `teacher_logprobs` and `teacher_weights`, float32 [T].
    """
    guided = []
    for sample, trajectory in zip(samples, trajectories, strict=True):
        logprobs = np.zeros(len(sample.tokens), np.float32)
        weights = np.zeros(len(sample.tokens), np.float32)
        sampled_logprobs = teacher_logprobs(trajectory)
        if sampled_logprobs is not None and is_guided(trajectory, config):
            is_sampled = np.concatenate([np.zeros(len(trajectory.prompt_ids), bool), trajectory.mask])
            logprobs[is_sampled] = sampled_logprobs
            weights[sample.mask] = coef
            if config.guides == "negative":
                weights[sample.advantages >= 0] = 0.0
        advantages = (sample.advantages * config.reward_weight).astype(np.float32)
        guided.append(
            replace(sample, advantages=advantages, teacher_logprobs=logprobs, teacher_weights=weights)
        )
    return guided


def teacher_logprobs(trajectory: Trajectory) -> np.ndarray | None:
    """Return the teacher's log-probabilities of all sampled tokens of a trajectory, in nats.

    Args:
        trajectory: its turns have `teacher_logprobs`, or none of them has.

    Returns:
        float32 [sampled tokens]; None without them.
    """
    arrays = []
    for turn in trajectory.turns:
        if turn.teacher_logprobs is None:
            return None
        arrays.append(turn.teacher_logprobs)
    if not arrays:
        return None
    return np.concatenate(arrays).astype(np.float32)
