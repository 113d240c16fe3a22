"""Generalised advantage estimation: a score compared with a critic's values, token by token.

Only sampled tokens count: the last one of a turn is followed by the first one of the next turn, whatever the
environment showed in between. The score is the reward of the last sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.baselines import whiten
from calibadv_jax.advantages.credit import ByToken
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig


def gae(groups: Sequence[Group], config: AdvantageConfig) -> list[list[ByToken]]:
    """Return GAE's advantages, whitened over the sampled tokens of the step.

    A_t = δ_t + γλ A_(t+1) with δ_t = r_t + γ V_(t+1) - V_t over the sampled tokens, where r_t is the score at
    the last one and 0 before it, V the critic's value, γ `advantage.discount` and λ `advantage.gae_lambda`.
    arXiv 1506.02438, as PPO (arXiv 1707.06347) uses it.

    Args:
        groups: the scored groups of the step, whose turns have `values`.
        config: the section `advantage`.

    Returns:
        For each group and trajectory the advantages of its sampled tokens.

    Raises:
        UserError: if a turn has no values.
    """
    advantages = []  # of each trajectory of the step, float64 [n]
    for group in groups:
        for trajectory in group.trajectories:
            trajectory_advantages, _ = gae_and_returns(trajectory, config)
            advantages.append(trajectory_advantages)
    counts = [np.ones(len(tokens), int) for tokens in advantages]  # each token counts once
    whitened = whiten(advantages, counts)
    estimate = []
    start = 0
    for group in groups:
        end = start + len(group.trajectories)
        pairs = zip(group.trajectories, whitened[start:end], strict=True)
        estimate.append([_split_by_turn(trajectory, tokens) for trajectory, tokens in pairs])
        start = end
    return estimate


def _split_by_turn(trajectory: Trajectory, advantages: np.ndarray) -> ByToken:
    """Split the advantages of all sampled tokens, float64 [n], into those of each turn."""
    ends = np.cumsum([len(turn.token_ids) for turn in trajectory.turns])
    *turns, _ = np.split(advantages, ends)  # what follows the last turn is empty
    return ByToken(turns)


def gae_and_returns(trajectory: Trajectory, config: AdvantageConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages of a trajectory before whitening, and the returns that the critic learns.

    Args:
        trajectory: a scored trajectory with n sampled tokens, whose turns have `values`.
        config: the section `advantage`.

    Returns:
        A_t and A_t + V_t, both float64 [n].

    Raises:
        UserError: if a turn has no values.
    """
    values = critic_values(trajectory).astype(np.float64)
    rewards = np.zeros(len(values))
    if len(values):
        rewards[-1] = trajectory.answer_score
    advantages = gae_advantages(rewards, values, config.discount, config.gae_lambda)
    return advantages, advantages + values


def critic_values(trajectory: Trajectory) -> np.ndarray:
    """Return the critic's value before each sampled token of a trajectory.

    Args:
        trajectory: a trajectory with n sampled tokens, whose turns have `values`.

    Returns:
        float32 [n]; empty for a trajectory without turns.

    Raises:
        UserError: if a turn has no values.
    """
    values = [turn.values for turn in trajectory.turns if turn.values is not None]
    if len(values) < len(trajectory.turns):
        raise UserError(
            f"question {trajectory.question.id!r}: no values of a critic were kept, which gae needs:"
            " only a run with advantage.name=gae or advantage.base=gae has a critic; choose another one"
        )
    return np.concatenate([np.zeros(0, np.float32), *values])


def gae_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Return A_t = δ_t + γλ A_(t+1) with δ_t = r_t + γ V_(t+1) - V_t; A and V are 0 after the last token.

    Args:
        rewards: float64 [n], the reward after each sampled token.
        values: float64 [n], the critic's value before each sampled token.
        discount: γ, in (0, 1].
        decay: λ, in [0, 1].

    Returns:
        float64 [n], A_t for each sampled token, not whitened.
    """
    advantages = np.zeros(len(values))
    next_advantage = 0.0
    next_value = 0.0
    for index in reversed(range(len(values))):
        difference = rewards[index] + discount * next_value - values[index]
        advantages[index] = difference + discount * decay * next_advantage
        next_advantage = advantages[index]
        next_value = values[index]
    return advantages
