"""CalibAdv: advantages of an estimator, by default GRPO, calibrated turn by turn (arXiv 2604.18235).

Soft penalty: a losing trajectory's search turn that found silver documents gets a smaller penalty.
Rebalance: within a group, the positive and negative advantage of the answer turns is brought to a
given ratio. An answer turn is a trajectory's last sampled turn, whatever its kind. The two never touch
the same turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit, last_sampled_turn, search_turns, two_sides
from calibadv_jax.advantages.silver import judge_turns, silver_documents
from calibadv_jax.config import AdvantageConfig

_ENOUGH = 1 / 3  # correctness from which `aggressive` forgives everything


def judge(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """The credit with the group's silver documents, and how correct each search is by them."""
    silver = silver_documents(credit.group, config.silver_threshold)
    judged = [judge_turns(one, silver, config.correctness) for one in credit.group.trajectories]
    return replace(
        credit,
        silver=silver,
        correctness=[np.array([one.correctness for one in turns], np.float64) for turns in judged],
        repeated=[[one.repeated for one in turns] for turns in judged],
        found_silver=[[one.found_silver for one in turns] for turns in judged],
    )


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """The judged credit of a step after the calibrations that are switched on."""
    found = [_softened(credit, config) if config.soft_penalty else credit for credit in credits]
    return _rebalanced(found, config) if config.rebalance else found


def _softened(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """With smaller negative advantages of search turns by their correctness; answer turns keep theirs."""
    best = max((float(turns.max()) for turns in credit.before if len(turns)), default=0.0)
    eased, softened = [], []
    for trajectory, turns, correctness in zip(
        credit.group.trajectories, credit.turns, credit.correctness, strict=True
    ):
        before_answer = np.arange(len(turns)) < (last_sampled_turn(trajectory) or 0)
        forgiven = before_answer & (turns < 0) & (correctness > 0)  # which is 0 where the turn is no search
        if config.softening == "upper_limit":
            smaller = turns + (best - turns) * correctness
        else:
            smaller = turns * (1 - correctness)
        if config.softening == "aggressive":
            smaller[(smaller < 0) & (correctness >= _ENOUGH)] = 0
        eased.append(np.where(forgiven, smaller, turns))
        softened.append(forgiven)
    if config.softening == "reset":
        for position, index in _what_all_can_do(credit):
            eased[position][index] = min(0.0, eased[position][index])
    return replace(credit, turns=eased, softened=softened)


def _what_all_can_do(credit: GroupCredit) -> Iterator[tuple[int, int]]:
    """Trajectory and turn of the k-th searches that were judged, where all of them are wholly correct.

    Nobody is praised for these.
    """
    valid = [
        position for position, trajectory in enumerate(credit.group.trajectories) if trajectory.format_valid
    ]
    by_number: dict[int, list[tuple[int, int]]] = {}
    for position in valid if credit.silver else []:
        for number, index in enumerate(search_turns(credit.group.trajectories[position])):
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


def _rebalanced(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """With each set of turns that are balanced together brought to the target ratio."""
    turns = [[one.copy() for one in credit.turns] for credit in credits]
    for places in _balanced_together(credits, config):
        values = [float(turns[at.group][at.position][at.index]) for at in places]
        balanced = _balanced(values, [at.tokens for at in places], config)
        for at, value in zip(places, balanced, strict=True):
            turns[at.group][at.position][at.index] = value
    return [replace(credit, turns=of_group) for credit, of_group in zip(credits, turns, strict=True)]


def _balanced_together(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[list[_Place]]:
    """The sets of turns of which each is brought to the target ratio."""
    sets: dict[tuple[int, int], list[_Place]] = {}
    for group, credit in enumerate(credits):
        for position, trajectory in enumerate(credit.group.trajectories):
            last = last_sampled_turn(trajectory)
            if last is None:
                continue
            chosen = {
                "answer": {last: 0},
                "turn": {last: -1} | {i: number for number, i in enumerate(search_turns(trajectory))},
                "all": dict.fromkeys(range(last + 1), 0),
            }[config.rebalance_over]
            for index, number in chosen.items():
                key = (group if config.rebalance_within == "group" else 0, number)
                tokens = len(trajectory.turns[index].token_ids)
                sets.setdefault(key, []).append(_Place(group, position, index, tokens))
    return list(sets.values())


def _balanced(values: Sequence[float], tokens: Sequence[int], config: AdvantageConfig) -> list[float]:
    """The advantages of turns of so many tokens, one side rescaled: |negative| / positive sum is the target.

    Where a side is empty nothing can balance it: all become 0. The factor is unbounded, as upstream.
    """

    def sides(each: Sequence[float]) -> tuple[float, float]:
        return two_sides([value * count for value, count in zip(each, tokens, strict=True)])

    positive, negative = sides(values)
    if config.adjust == "clip":
        return _clipped(values, tokens, positive, config.target_ratio)
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return list(values)
    if positive == 0 or negative == 0:
        factors = 0.0, 0.0
    else:
        if config.rebalance_by == "tokens":
            positive, negative = sides(np.sign(values).tolist())
        if config.adjust == "positive":
            factors = negative / (positive * config.target_ratio), 1.0
        else:
            factors = 1.0, config.target_ratio * positive / negative
    return [value * factors[0 if value > 0 else 1] for value in values]


def _clipped(
    values: Sequence[float], tokens: Sequence[int], positive: float, target_ratio: float
) -> list[float]:
    """None below -target_ratio × the mean positive one; as they are where nobody is praised."""
    praised = sum(count for value, count in zip(values, tokens, strict=True) if value > 0)
    return [max(value, -target_ratio * positive / praised) if praised else value for value in values]


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


def describe(config: AdvantageConfig) -> list[str]:
    """What the calibration of this configuration does, a line a switch."""
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
