"""Variants of CalibAdv's calibration, from the authors' code.

Used where a key is not the paper's: `advantage.softening`, `rebalance_over`, `rebalance_within`,
`rebalance_by`, `rebalance_excess` and `adjust: clip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.credit import (
    GroupCredit,
    last_sampled_turn,
    search_turns,
    side_factors,
    two_sides,
)
from calibadv_jax.core.trajectory import Trajectory

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_ENOUGH = 1 / 3  # correctness from which `aggressive` takes the whole penalty away


def soften_variant(credit: GroupCredit, softening: str) -> GroupCredit:
    """Change the plainly softened advantages of search turns as `softening` says.

    Args:
        credit: after the paper's soft penalty, which names the softened turns.
        softening: aggressive, upper_limit or reset.
    """
    turns = [advantages.copy() for advantages in credit.turns]
    best = max((float(advantages.max()) for advantages in credit.before if len(advantages)), default=0.0)
    for advantages, before, softened, correctness in zip(
        turns, credit.before, credit.softened, credit.correctness, strict=True
    ):
        if softening == "aggressive":
            advantages[softened & (advantages < 0) & (correctness >= _ENOUGH)] = 0
        elif softening == "upper_limit":
            advantages[softened] = (before + (best - before) * correctness)[softened]
    if softening == "reset":
        for position, index in _always_correct_searches(credit):
            turns[position][index] = min(0.0, turns[position][index])
    return replace(credit, turns=turns)


def _always_correct_searches(credit: GroupCredit) -> Iterator[tuple[int, int]]:
    """Yield trajectory and turn of the judged k-th searches, where all of them are wholly correct."""
    by_number: dict[int, list[tuple[int, int]]] = {}
    for position, trajectory in enumerate(credit.group.trajectories):
        if credit.silver and trajectory.format_valid:
            for number, index in enumerate(search_turns(trajectory)):
                by_number.setdefault(number, []).append((position, index))
    for places in by_number.values():
        if all(credit.correctness[position][index] == 1 for position, index in places):
            yield from places


def rebalance_variant(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Bring each set of turns that are balanced together to the target ratio."""
    turns = [[advantages.copy() for advantages in credit.turns] for credit in credits]
    # Group (0: the step) and number -> for each turn its trajectory's advantages, its index, its tokens.
    sets: dict[tuple[int, int], list[tuple[np.ndarray, int, int]]] = {}
    for number, (credit, of_group) in enumerate(zip(credits, turns, strict=True)):
        group = number if config.rebalance_within == "group" else 0
        for trajectory, advantages in zip(credit.group.trajectories, of_group, strict=True):
            for index, key in _numbers(trajectory, config.rebalance_over).items():
                place = advantages, index, len(trajectory.turns[index].token_ids)
                sets.setdefault((group, key), []).append(place)
    for places in sets.values():
        values = [float(advantages[index]) for advantages, index, _ in places]
        balanced = _balanced(values, [tokens for *_, tokens in places], config)
        for (advantages, index, _), value in zip(places, balanced, strict=True):
            advantages[index] = value
    return [replace(credit, turns=of_group) for credit, of_group in zip(credits, turns, strict=True)]


def _numbers(trajectory: Trajectory, over: str) -> dict[int, int]:
    """Return by turn the number of the set in which it is balanced; other turns keep their advantage."""
    last = last_sampled_turn(trajectory)
    if last is None:
        return {}
    if over == "turn":
        return {last: -1} | {index: number for number, index in enumerate(search_turns(trajectory))}
    return dict.fromkeys(range(last + 1) if over == "all" else [last], 0)


def _balanced(values: Sequence[float], tokens: Sequence[int], config: AdvantageConfig) -> list[float]:
    """Rescale one side of the advantages of turns with these numbers of tokens, or clip them."""

    def sides(values: Sequence[float]) -> tuple[float, float]:
        return two_sides([value * count for value, count in zip(values, tokens, strict=True)])

    positive, negative = sides(values)
    if config.adjust == "clip":  # at -target_ratio × the mean positive advantage, if one is positive
        count = sum(count for value, count in zip(values, tokens, strict=True) if value > 0)
        return [max(value, -config.target_ratio * positive / count) if count else value for value in values]
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return list(values)
    if config.rebalance_by == "tokens" and positive and negative:
        positive, negative = sides(np.sign(values).tolist())
    factors = side_factors(positive, negative, config)
    return [value * factors[0 if value > 0 else 1] for value in values]
