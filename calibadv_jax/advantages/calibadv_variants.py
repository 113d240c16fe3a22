"""Variants of CalibAdv's calibration, from the authors' code, and descriptions of all calibrations.

Used where a key is not the paper's: `advantage.softening`, `rebalance_over`, `rebalance_within`,
`rebalance_by`, `rebalance_excess` and `adjust: clip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit, last_sampled_turn, search_turns, two_sides

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_PAPER = {
    "softening": "plain",
    "rebalance_over": "answer",
    "rebalance_within": "group",
    "rebalance_by": "advantage",
    "rebalance_excess": False,
}
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


def variant_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section `advantage` whose value is not the paper's; missing keys are."""
    keys = [key for key, value in _PAPER.items() if settings.get(key, value) != value]
    return keys + (["adjust"] if settings.get("adjust") == "clip" else [])


def is_rebalance_variant(config: AdvantageConfig) -> bool:
    """Return whether the rebalance is not the paper's, in which λ and the rescaled side are free."""
    return any(key != "softening" for key in variant_keys(vars(config)))


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


def side_factors(positive: float, negative: float, config: AdvantageConfig) -> tuple[float, float]:
    """Return the factors of positive and negative advantages that bring two masses to the target ratio.

    Nothing can balance an empty side: both are 0. The factor is unbounded, as upstream.
    """
    if positive == 0 or negative == 0:
        return 0.0, 0.0
    if config.adjust == "positive":
        return negative / (positive * config.target_ratio), 1.0
    return 1.0, config.target_ratio * positive / negative


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


_CORRECTNESS_WORDS = {
    "fraction": "number of its newly found silver documents / number of its documents",
    "max": "largest weight among its newly found silver documents",
    "mean": "sum of the weights of its newly found silver documents / number of its documents",
}
_SOFTENING_WORDS = {
    "plain": "a negative advantage of a search turn is scaled by 1 - correctness",
    "aggressive": "a negative advantage of a search turn is scaled by 1 - correctness, and 0 from 1/3",
    "upper_limit": "a negative advantage of a search turn moves towards the group's largest by correctness",
    "reset": "a negative advantage of a search turn is scaled by 1 - correctness, and a positive one is 0"
    " where all search turns of its number are correct",
}
_BALANCED_WORDS = {
    "answer": ("the answer turns", "answer turns of one-sided groups"),
    "turn": ("the answer turns, of the first search turns, of the second ones …", "one-sided ones"),
    "all": ("all turns", "those that are one-sided"),
}


def describe_calibration(config: AdvantageConfig) -> list[str]:
    """Describe the calibration of this configuration, a line a switch."""
    lines = []
    if config.soft_penalty:
        lines += [
            f"soft penalty ON: {_SOFTENING_WORDS[config.softening]};"
            " a turn's correctness is 0 if it repeats an earlier one",
            f"  correctness {config.correctness}: {_CORRECTNESS_WORDS[config.correctness]}",
            "  silver documents: those seen by the group's best format-valid trajectories, if their score"
            f" is at least {config.silver_threshold:g} of the largest reward",
        ]
    else:
        lines.append("soft penalty OFF: search turns keep their trajectory's whole advantage")
    if config.rebalance and config.adjust == "clip":
        lines.append(
            f"rebalance ON: within each {config.rebalance_within}, negative advantages are cut at"
            f" {config.target_ratio:g} (lambda) × the mean positive one over the tokens of"
            f" {_BALANCED_WORDS[config.rebalance_over][0]}"
        )
    elif config.rebalance:
        within = f"each {config.rebalance_within}" if config.rebalance_within == "group" else "the whole step"
        turns, alone = _BALANCED_WORDS[config.rebalance_over]
        measure = "sum" if config.rebalance_by == "advantage" else "number"
        only = ", where it is above that" if config.rebalance_excess else ""
        lines.append(
            f"rebalance ON: within {within} the {config.adjust} side is rescaled until |negative {measure}| /"
            f" positive {measure} = {config.target_ratio:g} (lambda) over the tokens of {turns}{only};"
            f" {alone} become 0"
        )
    else:
        lines.append("rebalance OFF: answer turns keep their trajectory's whole advantage")
    return lines
