"""Estimators that pay turns by how they change the golden answer's probability, which `probe` computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages import estimators
from calibadv_jax.advantages.credit import sampled_turns
from calibadv_jax.advantages.estimators import (
    ByTurn,
    Estimate,
    add_to_grpo,
    discounted_returns,
    normalize_by_turn_index,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory


def igpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Standardise the gains of all turns and the scores of a group together; sum over later turns."""
    return [_igpo(group, config) for group in groups]


def _igpo(group: Group, config: AdvantageConfig) -> ByTurn:
    rewards = []
    for trajectory, score in zip(group.trajectories, estimators.scored_group(group).scores, strict=True):
        logprobs = _golden_logprobs(trajectory, "current")
        rewards.append(np.append(np.diff(np.exp(logprobs)), score)[: len(logprobs)])
    spread = estimators.standardised(rewards, [[0] * len(turns) for turns in rewards], config)
    return [
        np.pad(discounted_returns(gains, config.discount), (0, len(trajectory.turns) - len(gains)))
        for trajectory, gains in zip(group.trajectories, spread, strict=True)
    ]


@add_to_grpo
def a2tgpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare gains among turns of one number; divide sums over later turns by the root of their number."""
    logprobs = [_golden_logprobs(trajectory, "current") for trajectory in group.trajectories]
    gains = normalize_by_turn_index([np.diff(np.exp(turns)) for turns in logprobs], config)
    return [
        discounted_returns(turns, config.discount) / np.sqrt(np.arange(len(turns), 0, -1)) for turns in gains
    ]


@add_to_grpo
def tips(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare among turns of one number how much a turn and those after it raise the log-probability."""
    gains = [np.diff(_golden_logprobs(trajectory, "initial")) for trajectory in group.trajectories]
    return normalize_by_turn_index([discounted_returns(turns, config.discount) for turns in gains], config)


def _golden_logprobs(trajectory: Trajectory, policy: str) -> np.ndarray:
    """Return the golden answer's log-probability before each sampled turn, float64 [n]; up to 0."""
    logprobs = [turn.golden_logprobs.get(policy) for turn in sampled_turns(trajectory)]
    if None in logprobs:
        raise UserError(
            f"question {trajectory.question.id!r}: the golden answer's log-probabilities under the {policy}"
            f" policy were not kept: train with advantage.probes='[{policy}]', or change advantage.name"
        )
    return np.array(logprobs, np.float64)
