"""Variants of CalibAdv's calibration, from the authors' code.

Used where a key is not the paper's: `advantage.softening`, `rebalance_over`, `rebalance_within`,
`rebalance_by`, `rebalance_excess` and `adjust: clip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.credit import (
    GroupCredit,
    last_sampled_turn,
    search_turns,
    side_factors,
    two_sides,
)

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


@dataclass(frozen=True)
class _Place:
    """A turn of a step."""

    group: int
    position: int  # of its trajectory in the group
    index: int
    tokens: int  # sampled


def rebalance_variant(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Bring each set of turns that are balanced together to the target ratio."""
    turns = [[advantages.copy() for advantages in credit.turns] for credit in credits]
    for places in _balanced_together(credits, config):
        values = [float(turns[at.group][at.position][at.index]) for at in places]
        balanced = _balanced(values, [at.tokens for at in places], config)
        for at, value in zip(places, balanced, strict=True):
            turns[at.group][at.position][at.index] = value
    return [replace(credit, turns=of_group) for credit, of_group in zip(credits, turns, strict=True)]


def _balanced_together(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[list[_Place]]:
    """Return the sets of turns of which each is brought to the target ratio."""
    sets: dict[tuple[int, int], list[_Place]] = {}
    for group, credit in enumerate(credits):
        for position, trajectory in enumerate(credit.group.trajectories):
            last = last_sampled_turn(trajectory)
            if last is None:
                continue
            numbers = {
                "answer": {last: 0},
                "turn": {last: -1} | {i: number for number, i in enumerate(search_turns(trajectory))},
                "all": dict.fromkeys(range(last + 1), 0),
            }[config.rebalance_over]
            for index, number in numbers.items():
                key = (group if config.rebalance_within == "group" else 0, number)
                tokens = len(trajectory.turns[index].token_ids)
                sets.setdefault(key, []).append(_Place(group, position, index, tokens))
    return list(sets.values())


def _balanced(values: Sequence[float], tokens: Sequence[int], config: AdvantageConfig) -> list[float]:
    """Rescale one side of the advantages of turns with these numbers of tokens, or clip them."""

    def sides(values: Sequence[float]) -> tuple[float, float]:
        return two_sides([value * count for value, count in zip(values, tokens, strict=True)])

    positive, negative = sides(values)
    if config.adjust == "clip":
        return _clipped(values, tokens, positive, config.target_ratio)
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return list(values)
    if config.rebalance_by == "tokens" and positive and negative:
        positive, negative = sides(np.sign(values).tolist())
    factors = side_factors(positive, negative, config)
    return [value * factors[0 if value > 0 else 1] for value in values]


def _clipped(
    values: Sequence[float], tokens: Sequence[int], positive: float, target_ratio: float
) -> list[float]:
    """Cut at -target_ratio × the mean positive advantage; unchanged where none is positive."""
    count = sum(count for value, count in zip(values, tokens, strict=True) if value > 0)
    return [max(value, -target_ratio * positive / count) if count else value for value in values]
