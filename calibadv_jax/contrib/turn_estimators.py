"""Estimators that reward turns by how they change the golden answer's probability, which `probe` computes.

s is a trajectory's score, T its last sampled turn, G its GRPO advantage, w `advantage.turn_weight` and γ
`advantage.discount`. p_t is exp(mean log-probability of the golden answer's tokens) after turn t; p_0 is that
before the first turn. z(x) = (x - mean) / (std + 1e-6) among the turns of the group that are compared, and 0
for a turn that is compared with no other one; `advantage.normalize_std: false` drops the division.

Each estimator takes the scored groups of the step, each with a trajectory or more, and the section
`advantage`. It returns for each group and trajectory float64 [K], one advantage for each turn. It raises
UserError if a turn has no `golden_logprobs` under the policy that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.baselines import Estimate, scored_group
from calibadv_jax.advantages.credit import sampled_turns
from calibadv_jax.advantages.turn_rewards import (
    ByTurn,
    add_to_grpo,
    discounted_returns,
    normalize_by_label,
    normalize_by_turn_index,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory


def igpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return IGPO's advantages: A_t = Σ_(k≥t) γ^(k-t) z(r_k), among all turns of the group.

    r_t = p_t - p_(t-1) under the policy before the step's update, and r_T = s. arXiv 2510.14967.
    """
    return [_igpo_advantages(group, config) for group in groups]


def _igpo_advantages(group: Group, config: AdvantageConfig) -> ByTurn:
    rewards = []
    for trajectory, score in zip(group.trajectories, scored_group(group).scores, strict=True):
        logprobs = _golden_logprobs(trajectory, "current")
        gains = np.diff(np.exp(logprobs))  # float64 [T - 1], of the turns before the last sampled one
        rewards.append(np.append(gains, score)[: len(logprobs)])  # empty if nothing was sampled
    same_label = [[0] * len(turns) for turns in rewards]
    normalized = normalize_by_label(rewards, same_label, config)
    advantages = []
    for trajectory, turns in zip(group.trajectories, normalized, strict=True):
        returns = discounted_returns(turns, config.discount)
        num_unsampled = len(trajectory.turns) - len(turns)
        advantages.append(np.pad(returns, (0, num_unsampled)))
    return advantages


def a2tgpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return A²TGPO's advantages: A_t = G + w Σ_(k≥t) γ^(k-t) z(r_k) / √(number of terms of the sum).

    r_t = p_t - p_(t-1) under the policy before the step's update. Turns of the same number are compared; the
    last sampled turn keeps G. arXiv 2605.06200.
    """
    return add_to_grpo(groups, config, _a2tgpo_rewards)


def _a2tgpo_rewards(group: Group, config: AdvantageConfig) -> ByTurn:
    logprobs = [_golden_logprobs(trajectory, "current") for trajectory in group.trajectories]
    gains = [np.diff(np.exp(trajectory_logprobs)) for trajectory_logprobs in logprobs]
    rewards = []
    for turns in normalize_by_turn_index(gains, config):
        num_terms = np.arange(len(turns), 0, -1)  # of the sum that begins at each turn
        rewards.append(discounted_returns(turns, config.discount) / np.sqrt(num_terms))
    return rewards


def tips(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return TIPS' advantages: A_t = G + w z(Σ_(k≥t) γ^(k-t) r_k), among turns of the same number.

    r_t = log p_t - log p_(t-1) under the run's first policy; the last sampled turn keeps G. arXiv 2603.22293.
    """
    return add_to_grpo(groups, config, _tips_rewards)


def _tips_rewards(group: Group, config: AdvantageConfig) -> ByTurn:
    returns = []
    for trajectory in group.trajectories:
        gains = np.diff(_golden_logprobs(trajectory, "initial"))
        returns.append(discounted_returns(gains, config.discount))
    return normalize_by_turn_index(returns, config)


def _golden_logprobs(trajectory: Trajectory, policy: str) -> np.ndarray:
    """Return the golden answer's log-probability before each turn up to the last sampled one, float64 [T]."""
    logprobs = [turn.golden_logprobs.get(policy) for turn in sampled_turns(trajectory)]
    if None in logprobs:
        raise UserError(
            f"question {trajectory.question.id!r}: the golden answer's log-probabilities under the {policy}"
            f" policy were not kept: train with advantage.probes='[{policy}]', or change advantage.name"
        )
    return np.array(logprobs, np.float64)
