"""Estimators that give each turn of a trajectory its own advantage, computed from rewards of turns.

s is a trajectory's score, T its last sampled turn, G its GRPO advantage, w `advantage.turn_weight` and γ
`advantage.discount`. z(x) = (x - mean) / (std + 1e-6) among the turns of the group that are compared, and 0
for a turn that is compared with no other one; `advantage.normalize_std: false` drops the division.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.baselines import EPSILON, Estimate, GroupEstimate, mean_and_std
from calibadv_jax.advantages.calibadv import judge_turns, silver_documents
from calibadv_jax.advantages.credit import sampled_turns, search_turns
from calibadv_jax.advantages.score_estimators import grpo
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_CORRECTNESS_SHARE = 0.7  # Weight of the correctness in querygroup's advantage of a search.
_MIN_CORRECTNESS = 1e-6  # Correctness in querygroup of a search that showed nothing new.

# For each trajectory of a group float64 [n]: a value for each of its first n turns, at most up to the last
# sampled one.
ByTurn = list[np.ndarray]
# Computes the rewards of a group's turns, already compared with each other.
TurnRewards = Callable[[Group, "AdvantageConfig"], ByTurn]


# --- Steps of the estimators ---


def discounted_returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return each turn's reward plus the discounted rewards of the turns after it.

    Args:
        rewards: numbers [n], the reward of each turn; n may be 0.
        discount: γ, in (0, 1].

    Returns:
        float64 [n]: R_t = Σ_(k≥t) γ^(k-t) r_k.
    """
    returns = rewards.astype(np.float64)
    for index in reversed(range(len(returns) - 1)):
        returns[index] += discount * returns[index + 1]
    return returns


def normalize_by_label(
    values: ByTurn, labels: Sequence[Sequence[Hashable]], config: AdvantageConfig
) -> ByTurn:
    """Return z(x) of each turn's value, among the turns of the group that have the same label.

    Args:
        values: for each trajectory of the group float64 [n].
        labels: for each trajectory n labels.
        config: the section `advantage`; with `normalize_std: false` values are only centred.

    Returns:
        For each trajectory float64 [n]; 0 for a turn whose label no other turn has.
    """
    joined = np.concatenate(values)  # the values of all turns of the group
    joined_labels = [label for trajectory_labels in labels for label in trajectory_labels]
    by_label: dict[Hashable, list[int]] = {}  # label -> indices into `joined`
    for index, label in enumerate(joined_labels):
        by_label.setdefault(label, []).append(index)
    normalized = np.zeros(len(joined))
    for indices in by_label.values():
        if len(indices) > 1:
            mean, std = mean_and_std(joined[indices])
            divisor = std + EPSILON if config.normalize_std else 1.0
            normalized[indices] = (joined[indices] - mean) / divisor
    ends = np.cumsum([len(turns) for turns in values])
    return np.split(normalized, ends[:-1])


def normalize_by_turn_index(values: ByTurn, config: AdvantageConfig) -> ByTurn:
    """Return z(x) of each turn's value: first turns are compared with first turns, second with second, ….

    Args:
        values: for each trajectory of the group float64 [n].
        config: the section `advantage`.

    Returns:
        For each trajectory float64 [n].
    """
    turn_numbers = [range(len(turns)) for turns in values]
    return normalize_by_label(values, turn_numbers, config)


def add_to_grpo(groups: Sequence[Group], config: AdvantageConfig, turn_rewards: TurnRewards) -> Estimate:
    """Return G + w × the turn's reward for each turn; turns without a reward get G.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`.
        turn_rewards: a function that returns the rewards of a group's turns.

    Returns:
        For each group and trajectory float64 [K], one advantage for each turn.

    Raises:
        ValueError: if a score is not finite.
    """
    estimate = []
    for group, group_advantages in zip(groups, grpo(groups, config), strict=True):
        advantages = _repeat_for_turns(group, group_advantages)
        for turns, rewards in zip(advantages, turn_rewards(group, config), strict=True):
            turns[: len(rewards)] += config.turn_weight * rewards
        estimate.append(advantages)
    return estimate


def _repeat_for_turns(group: Group, advantages: GroupEstimate) -> ByTurn:
    """Give each turn the advantage of its trajectory: for each trajectory float64 [K]."""
    turns = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        turns.append(np.full(len(trajectory.turns), advantage))
    return turns


# --- Estimators ---


def gigpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return GiGPO's advantages: A_t = G + w z(γ^(T-t) s), among turns after the same observation.

    arXiv 2505.10978. All first turns are compared with each other.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `turn_weight`, `discount`, `normalize_std` and `std_over` are read.

    Returns:
        For each group and trajectory float64 [K], one advantage for each turn.

    Raises:
        ValueError: if a score is not finite.
    """
    return add_to_grpo(groups, config, _gigpo_rewards)


def _gigpo_rewards(group: Group, config: AdvantageConfig) -> ByTurn:
    returns = []
    observations = []
    for trajectory in group.trajectories:
        turns = sampled_turns(trajectory)
        rewards = np.zeros(len(turns))
        if turns:
            rewards[-1] = trajectory.answer_score
        returns.append(discounted_returns(rewards, config.discount))
        observations.append(_observations_before(trajectory))
    return normalize_by_label(returns, observations, config)


def _observations_before(trajectory: Trajectory) -> list[bytes | None]:
    """Return the observation before each turn up to the last sampled one; None before the first turn."""
    observations: list[bytes | None] = []
    previous = None
    for turn in sampled_turns(trajectory):
        observations.append(previous)
        previous = turn.observation_ids.tobytes()
    return observations


def mt_grpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return MT-GRPO's advantages: A_t = G + w z(1 if the turn shows a golden answer, else 0).

    arXiv 2505.11821. Turns of the same number are compared; the last sampled turn keeps G.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `turn_weight`, `normalize_std` and `std_over` are read.

    Returns:
        For each group and trajectory float64 [K], one advantage for each turn.

    Raises:
        ValueError: if a score is not finite.
    """
    return add_to_grpo(groups, config, _mt_grpo_rewards)


def _mt_grpo_rewards(group: Group, config: AdvantageConfig) -> ByTurn:
    golden_answers = group.question.golden_answers
    rewards = []
    for trajectory in group.trajectories:
        shows_answer = []  # for each turn before the last sampled one
        for turn in sampled_turns(trajectory)[:-1]:
            texts = [f"{document.title}\n{document.text}" for document in turn.documents]
            shows_answer.append(any(holds_answer(text, golden_answers) for text in texts))
        rewards.append(np.array(shows_answer, np.float64))
    return normalize_by_turn_index(rewards, config)


def stepsearch(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return StepSearch's advantages: A_t = G + w z(Σ_(k≥t) γ^(k-t) r_k), among turns of the same number.

    arXiv 2505.15107. r is gain less redundancy. Gain: the share of the target documents (the question's
    `supporting_ids`, or else the silver documents) that the turn shows first. Redundancy: the share of the
    turn's documents that an earlier turn showed. The last sampled turn keeps G.

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `turn_weight`, `discount`, `silver_threshold`, `normalize_std` and
            `std_over` are read.

    Returns:
        For each group and trajectory float64 [K], one advantage for each turn.

    Raises:
        ValueError: if a score is not finite.
    """
    return add_to_grpo(groups, config, _stepsearch_rewards)


def _stepsearch_rewards(group: Group, config: AdvantageConfig) -> ByTurn:
    targets = set(group.question.supporting_ids or silver_documents(group, config.silver_threshold))
    returns = []
    for trajectory in group.trajectories:
        seen: set[str] = set()
        rewards = []
        for turn in sampled_turns(trajectory)[:-1]:
            shown = {document.id for document in turn.documents}
            new_targets = (shown - seen) & targets
            gain = len(new_targets) / max(1, len(targets))
            redundancy = len(shown & seen) / max(1, len(shown))
            rewards.append(gain - redundancy)
            seen |= shown
        returns.append(discounted_returns(np.array(rewards), config.discount))
    return normalize_by_turn_index(returns, config)


def querygroup(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Return querygroup's advantages: for a judged search 0.7 (q - mean q) / (std q + 1e-6) + 0.3 G, else G.

    q is the search's correctness by silver documents, 1e-6 where it is 0. Its mean and standard deviation are
    those of the judged searches of the group; a search that is judged alone has mean 0 and std 1. By
    CalibAdv's authors (github.com/wujwyi/CalibAdv, `segment_adv_type: querygroup`).

    Args:
        groups: the scored groups of the step, each with a trajectory or more.
        config: the section `advantage`; `silver_threshold`, `correctness`, `normalize_std` and `std_over` are
            read. `normalize_std` false affects G only.

    Returns:
        For each group and trajectory float64 [K], one advantage for each turn.

    Raises:
        ValueError: if a score is not finite.
    """
    estimate = []
    for group, group_advantages in zip(groups, grpo(groups, config), strict=True):
        advantages = _repeat_for_turns(group, group_advantages)
        correctness = _search_correctness(group, config)
        values = np.array(list(correctness.values()))
        mean, std = mean_and_std(values) if correctness else (0.0, 1.0)
        for (position, index), value in correctness.items():
            normalized = (value - mean) / (std + EPSILON)
            score_part = (1 - _CORRECTNESS_SHARE) * advantages[position][index]
            advantages[position][index] = _CORRECTNESS_SHARE * normalized + score_part
        estimate.append(advantages)
    return estimate


def _search_correctness(group: Group, config: AdvantageConfig) -> dict[tuple[int, int], float]:
    """Return the correctness of each judged search, by the trajectory's place in the group and the turn's."""
    silver = silver_documents(group, config.silver_threshold)
    correctness = {}
    for position, trajectory in enumerate(group.trajectories):
        if silver and trajectory.format_valid:
            judgements = judge_turns(trajectory, silver, config.correctness)
            for index in search_turns(trajectory):
                correctness[position, index] = judgements[index].correctness or _MIN_CORRECTNESS
    return correctness
