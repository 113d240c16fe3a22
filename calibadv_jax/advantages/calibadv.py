"""CalibAdv: advantages of an estimator, by default GRPO, calibrated turn by turn (arXiv 2604.18235).

Soft penalty: a losing trajectory's search turn that found silver documents gets a smaller penalty.
Rebalance: within a group, the positive and negative advantage of the answer turns is brought to a
given ratio. An answer turn is a trajectory's last sampled turn, whatever its kind. The two never touch
the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit, last_sampled_turn, search_turns, two_sides
from calibadv_jax.advantages.silver import judge_turns, silver_documents
from calibadv_jax.config import AdvantageConfig

_ENOUGH = 1 / 3  # correctness from which `aggressive` forgives everything


def judge(credit: GroupCredit, config: AdvantageConfig) -> None:
    """Fills in the group's silver documents, and how correct each search is by them."""
    credit.silver = silver_documents(credit.group, config.silver_threshold)
    judged = [judge_turns(one, credit.silver, config.correctness) for one in credit.group.trajectories]
    credit.correctness = [np.array([one.correctness for one in turns], np.float64) for turns in judged]
    credit.repeated = [[one.repeated for one in turns] for turns in judged]
    credit.found_silver = [[one.found_silver for one in turns] for turns in judged]


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> None:
    """The steps that are switched on, for the judged credit of a step."""
    if config.soft_penalty:
        for credit in credits:
            _soften(credit, config)
    if config.rebalance:
        for places in _balanced_together(credits, config):
            _rebalance(places, config)


def _soften(credit: GroupCredit, config: AdvantageConfig) -> None:
    """Makes negative advantages of search turns smaller by their correctness; answer turns keep theirs."""
    best = max((float(turns.max()) for turns in credit.before if len(turns)), default=0.0)
    for trajectory, turns, correctness in zip(
        credit.group.trajectories, credit.turns, credit.correctness, strict=True
    ):
        searches = slice(last_sampled_turn(trajectory) or 0)  # correctness is 0 where the kind is another
        found, given = turns[searches], correctness[searches]
        softened = np.zeros(len(turns), bool)
        softened[searches] = (found < 0) & (given > 0)
        credit.softened.append(softened)
        if config.softening == "upper_limit":
            found += (best - found) * given * (found < 0)
        else:
            found *= 1 - given * (found < 0)
        if config.softening == "aggressive":
            found[(found < 0) & (given >= _ENOUGH)] = 0
    if config.softening == "reset":
        _reset_what_all_can_do(credit)


def _reset_what_all_can_do(credit: GroupCredit) -> None:
    """The k-th searches that were judged are all wholly correct: nobody is praised for them."""
    valid = [
        position for position, trajectory in enumerate(credit.group.trajectories) if trajectory.format_valid
    ]
    by_number: dict[int, list[tuple[int, int]]] = {}
    for position in valid if credit.silver else []:
        for number, index in enumerate(search_turns(credit.group.trajectories[position])):
            by_number.setdefault(number, []).append((position, index))
    for places in by_number.values():
        if all(credit.correctness[position][index] == 1 for position, index in places):
            for position, index in places:
                credit.turns[position][index] = min(0.0, credit.turns[position][index])


Place = tuple[
    np.ndarray, int, int
]  # the advantages of a trajectory's turns, a turn's index, its sampled tokens


def _balanced_together(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[list[Place]]:
    """The sets of turns of which each is brought to the target ratio."""
    sets: dict[tuple[int, int], list[Place]] = {}
    for group, credit in enumerate(credits):
        for trajectory, turns in zip(credit.group.trajectories, credit.turns, strict=True):
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
                sets.setdefault(key, []).append((turns, index, len(trajectory.turns[index].token_ids)))
    return list(sets.values())


def _rebalance(places: Sequence[Place], config: AdvantageConfig) -> None:
    """Rescales one side so that |negative sum| / positive sum is the target over the places' tokens.

    Where a side is empty nothing can balance it: all become 0, turns elsewhere stay. The factor is unbounded,
    as upstream.
    """
    positive, negative = two_sides([float(turns[index]) * tokens for turns, index, tokens in places])
    factors = {"positive": 1.0, "negative": 1.0}
    if config.adjust == "clip":
        _clip(places, positive, config.target_ratio)
        return
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return
    if positive == 0 or negative == 0:
        factors = {"positive": 0.0, "negative": 0.0}
    else:
        if config.rebalance_by == "tokens":
            signed = [float(np.sign(turns[index])) * tokens for turns, index, tokens in places]
            positive, negative = two_sides(signed)
        if config.adjust == "positive":
            factors["positive"] = negative / (positive * config.target_ratio)
        else:
            factors["negative"] = config.target_ratio * positive / negative
    for turns, index, _ in places:
        turns[index] *= factors["positive" if turns[index] > 0 else "negative"]


def _clip(places: Sequence[Place], positive: float, target_ratio: float) -> None:
    """Raises advantages below -target_ratio × the mean positive one; none where nobody is praised."""
    praised = sum(tokens for turns, index, tokens in places if turns[index] > 0)
    if praised:
        for turns, index, _ in places:
            turns[index] = max(turns[index], -target_ratio * positive / praised)


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
            f" is at least {config.silver_threshold:g}",
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
