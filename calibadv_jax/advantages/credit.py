"""Credit of a group: an advantage for each turn of each trajectory, and its expansion to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.core.trajectory import Group, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig


@dataclass(frozen=True)
class ByToken:
    """Advantages of a trajectory in which every sampled token has its own."""

    turns: list[np.ndarray]  # for each of the K turns: float64 [N], one number for each sampled token


@dataclass(frozen=True)
class GroupCredit:
    """Credit of one group of G trajectories, where trajectory i has K_i turns.

    The lists `softened`, `repeated` and `found_silver` explain `turns`. They are empty if the algorithm does
    not judge turns.
    """

    group: Group
    # float64 [G]: advantage of each trajectory before any calibration. If its turns differ, that of its last
    # sampled turn.
    raw: np.ndarray
    before: list[np.ndarray]  # G × float64 [K_i]: advantage of each turn before any calibration
    # G × float64 [K_i]: advantage of the sampled tokens of each turn; their mean, if they differ.
    turns: list[np.ndarray]
    correctness: list[np.ndarray]  # G × float64 [K_i] in [0, 1]; 0 for a turn that was not judged
    silver: dict[str, float] = field(default_factory=dict)  # document id -> weight in (0, 1]
    # G × bool [K_i]: whether the turn's correctness made its negative advantage smaller.
    softened: list[np.ndarray] = field(default_factory=list)
    # G × [K_i]: which part of an earlier turn the turn repeats, see `calibadv.Judgement`.
    repeated: list[list[str | None]] = field(default_factory=list)
    # G × [K_i]: ids of the silver documents that the turn showed and no earlier turn of its trajectory.
    found_silver: list[list[tuple[str, ...]]] = field(default_factory=list)
    # G × [K_i] × float64 [N]: advantage of each sampled token less that of its turn. Empty if all tokens of a
    # turn have the same advantage.
    offsets: list[list[np.ndarray]] = field(default_factory=list)

    def answer_advantages(self) -> list[float]:
        """Return the advantage of each trajectory's last sampled turn.

        Returns:
            G numbers; 0 for a trajectory without a sampled token.
        """
        advantages = []
        for trajectory, turns in zip(self.group.trajectories, self.turns, strict=True):
            last = last_sampled_turn(trajectory)
            advantages.append(0.0 if last is None else float(turns[last]))
        return advantages


def uncalibrated_credit(
    group: Group, estimate: Sequence[float | np.ndarray | ByToken] | np.ndarray
) -> GroupCredit:
    """Return the uncalibrated credit of a group, given an estimator's result.

    Args:
        group: a group of G trajectories, where trajectory i has K_i turns.
        estimate: G entries. Each is one number for the whole trajectory, float64 [K_i] with one number for
            each turn, or a `ByToken`.

    Returns:
        Credit whose correctness is 0 for every turn.

    Raises:
        ValueError: if the number of entries or of their values is wrong, or a value is not finite.
    """
    trajectories = group.trajectories
    if len(estimate) != len(trajectories):
        raise ValueError(f"{len(estimate)} advantages for {len(trajectories)} trajectories")
    raw = np.zeros(len(estimate))  # float64 [G]
    before = []
    offsets = []
    pairs = zip(trajectories, estimate, strict=True)
    for position, (trajectory, advantage) in enumerate(pairs):
        values = _checked_values(trajectory, advantage)
        if isinstance(advantage, ByToken):
            turns = zip(advantage.turns, values, strict=True)
            offsets.append([tokens - mean for tokens, mean in turns])
        before.append(np.full(len(trajectory.turns), values))
        last = last_sampled_turn(trajectory)
        if values.ndim == 0:
            raw[position] = values
        elif last is not None:
            raw[position] = values[last]
    return GroupCredit(
        group=group,
        raw=raw,
        before=before,
        turns=[advantages.copy() for advantages in before],
        correctness=[np.zeros(len(advantages)) for advantages in before],
        offsets=offsets,
    )


def _checked_values(trajectory: Trajectory, advantage: float | np.ndarray | ByToken) -> np.ndarray:
    """Return a trajectory's advantage as float64 [] or, with one number for each turn, float64 [K]."""
    values = _values(advantage)
    num_turns = len(trajectory.turns)
    if values.shape not in ((), (num_turns,)):
        raise ValueError(f"advantages of shape {values.shape} for a trajectory of {num_turns} turns")
    if not np.isfinite(values).all():
        raise ValueError(f"advantage {values.tolist()} is not finite")
    return values


def _values(advantage: float | np.ndarray | ByToken) -> np.ndarray:
    if not isinstance(advantage, ByToken):
        return np.asarray(advantage, np.float64)
    means = []  # of the tokens of each turn; 0 for a turn without tokens
    for tokens in advantage.turns:
        means.append(math.fsum(tokens) / max(1, len(tokens)))
    return np.array(means)


def merge_continued_turns(credit: GroupCredit) -> GroupCredit:
    """Give a turn that several trajectories go through the mean of their advantages, once.

    A trajectory and those that continue it share turns. Their tokens are trained in the first one only, with
    the mean over all of them: the gradient is the same as if each trained them with its own advantage and an
    equal share of the weight. So a right continuation rewards the search that made it possible. Other turns
    that are context are not trained, and get 0.

    Args:
        credit: the calibrated credit of a group.

    Returns:
        Credit with new `turns` and `offsets`; the same object if no turn of the group is context.
    """
    trajectories = credit.group.trajectories
    if not any(turn.is_context for trajectory in trajectories for turn in trajectory.turns):
        return credit
    turns = [advantages.copy() for advantages in credit.turns]
    offsets = [list(of_turns) for of_turns in credit.offsets]
    positions = {trajectory.index: position for position, trajectory in enumerate(trajectories)}
    # (position of the first trajectory, turn) -> positions of the others that go through the turn.
    continued_by: dict[tuple[int, int], list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        source = None if trajectory.continues is None else positions.get(trajectory.continues)
        for index, turn in enumerate(trajectory.turns):
            if not turn.is_context:
                continue
            turns[position][index] = 0.0
            if offsets:
                offsets[position][index] = np.zeros(len(turn.token_ids))
            if source is not None:
                continued_by.setdefault((source, index), []).append(position)
    for (source, index), others in continued_by.items():
        members = [source, *others]
        turns[source][index] = np.mean([credit.turns[position][index] for position in members])
        if offsets:
            offsets[source][index] = np.mean(
                [credit.offsets[position][index] for position in members], axis=0
            )
    return replace(credit, turns=turns, offsets=offsets)


# --- Turns ---


def last_sampled_turn(trajectory: Trajectory) -> int | None:
    """Return the index of CalibAdv's answer turn: the last turn with sampled tokens, whatever its kind.

    Args:
        trajectory: a trajectory, whose turns may have no sampled tokens.

    Returns:
        The index into `trajectory.turns`, or None if no token of the trajectory was sampled.
    """
    return last_non_empty([turn.token_ids for turn in trajectory.turns])


def last_non_empty(token_ids: Sequence[Sequence[int] | np.ndarray]) -> int | None:
    """Return the index of the last entry that is not empty.

    Args:
        token_ids: the sampled tokens of each turn: K lists, or K arrays int32 [N].

    Returns:
        The index, or None if all entries are empty.
    """
    for index in reversed(range(len(token_ids))):
        if len(token_ids[index]):
            return index
    return None


def sampled_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns up to and including the last sampled one.

    Args:
        trajectory: a trajectory, whose turns may have no sampled tokens.

    Returns:
        The turns themselves, in order; an empty list if no token of the trajectory was sampled.
    """
    last = last_sampled_turn(trajectory)
    if last is None:
        return []
    return trajectory.turns[: last + 1]


def search_turns(trajectory: Trajectory) -> list[int]:
    """Return the indices of the searches, and of other actions, before the last sampled turn.

    Args:
        trajectory: a trajectory, whose turns may have no sampled tokens.

    Returns:
        Indices into `trajectory.turns`, ascending; empty if there is no such turn.
    """
    last = last_sampled_turn(trajectory)
    if last is None:
        return []
    return [index for index in range(last) if trajectory.turns[index].is_action]


# --- Tokens ---


def broadcast_to_tokens(credit: GroupCredit) -> list[np.ndarray]:
    """Expand the credit of turns to the tokens of each trajectory.

    Args:
        credit: the credit of a group.

    Returns:
        For each trajectory float32 [T], parallel to its `response_ids`; 0 on observation tokens.
    """
    advantages = []
    pairs = zip(credit.group.trajectories, credit.turns, strict=True)
    for position, (trajectory, turns) in enumerate(pairs):
        segments = [np.zeros(0)]  # sampled tokens and observation of each turn, in order
        for index, turn in enumerate(trajectory.turns):
            sampled = np.full(len(turn.token_ids), turns[index])
            # The sum with 0.0 turns -0.0 into 0.0.
            offset = credit.offsets[position][index] if credit.offsets else 0.0
            segments.append(sampled + offset)
            segments.append(np.zeros(len(turn.observation_ids)))
        advantages.append(np.concatenate(segments).astype(np.float32))
    return advantages


# --- Sums over tokens, and their balance ---


def answer_turn_sums(group: Group, advantages: Sequence[float]) -> tuple[float, float]:
    """Return `positive_negative_sums` over the tokens of the last sampled turns of a group.

    Args:
        group: a group of G trajectories.
        advantages: G numbers, the advantage of each trajectory's last sampled turn.

    Returns:
        Sum of the positive products advantage × tokens, and magnitude of the sum of the negative ones. A
        trajectory without a sampled token does not count.
    """
    token_sums = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        last = last_sampled_turn(trajectory)
        if last is not None:
            num_tokens = len(trajectory.turns[last].token_ids)
            token_sums.append(advantage * num_tokens)
    return positive_negative_sums(token_sums)


def positive_negative_sums(values: Sequence[float]) -> tuple[float, float]:
    """Return the sum of the positive values and the magnitude of the sum of the negative ones.

    Each sum is exact to one rounding, so the order of the values does not matter.

    Args:
        values: finite numbers; may be empty.

    Returns:
        Two numbers, each 0 or more. Without negative values the second may be -0.0.
    """
    positive = math.fsum(value for value in values if value > 0)
    negative = -math.fsum(value for value in values if value < 0)
    return positive, negative


def rebalance_factors(positive: float, negative: float, config: AdvantageConfig) -> tuple[float, float]:
    """Return the factors of positive and negative advantages that bring negative / positive to λ.

    λ is `config.target_ratio`; `config.adjust` names the side whose factor is not 1.

    Args:
        positive: sum of the positive advantages.
        negative: magnitude of the sum of the negative advantages.
        config: the section `advantage`.

    Returns:
        Factor of the positive advantages and factor of the negative ones; (0, 0) if either sum is 0.
    """
    if positive == 0 or negative == 0:
        return 0.0, 0.0
    if config.adjust == "positive":
        return negative / (positive * config.target_ratio), 1.0
    return 1.0, config.target_ratio * positive / negative
