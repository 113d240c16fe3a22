"""CalibAdv: advantages of an estimator, by default GRPO, calibrated turn by turn (arXiv 2604.18235).

Soft penalty: a losing trajectory's search turn that found silver documents gets a smaller penalty.
Rebalance: within a group, the positive and negative advantage of the answer turns is brought to a
given ratio. An answer turn is a trajectory's last sampled turn, whatever its kind. The two never touch
the same turn. The variants of the authors' code stand in `calibadv_variants`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.calibadv_variants import (
    is_rebalance_variant,
    rebalance_variant,
    soften_variant,
)
from calibadv_jax.advantages.credit import GroupCredit, answer_mass, last_sampled_turn
from calibadv_jax.advantages.silver import judge_turns, silver_documents

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig


def judge(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Add the group's silver documents, and the correctness of each search by them."""
    silver = silver_documents(credit.group, config.silver_threshold)
    judged = [judge_turns(trajectory, silver, config.correctness) for trajectory in credit.group.trajectories]
    return replace(
        credit,
        silver=silver,
        correctness=[np.array([turn.correctness for turn in turns], np.float64) for turns in judged],
        repeated=[[turn.repeated for turn in turns] for turns in judged],
        found_silver=[[turn.found_silver for turn in turns] for turns in judged],
    )


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Apply the calibrations that are switched on to the judged credit of a step."""
    if config.soft_penalty:
        credits = [_soften(credit) for credit in credits]
        if config.softening != "plain":
            credits = [soften_variant(credit, config.softening) for credit in credits]
    if config.rebalance and is_rebalance_variant(config):
        return rebalance_variant(credits, config)
    return [_rebalance(credit, config) if config.rebalance else credit for credit in credits]


def _soften(credit: GroupCredit) -> GroupCredit:
    """Scale the negative advantages of search turns by 1 - correctness; answer turns keep theirs."""
    turns, softened = [], []
    for trajectory, advantages, correctness in zip(
        credit.group.trajectories, credit.turns, credit.correctness, strict=True
    ):
        before_answer = np.arange(len(advantages)) < (last_sampled_turn(trajectory) or 0)
        is_softened = before_answer & (advantages < 0) & (correctness > 0)  # 0 where the turn is no search
        turns.append(np.where(is_softened, advantages * (1 - correctness), advantages))
        softened.append(is_softened)
    return replace(credit, turns=turns, softened=softened)


def _rebalance(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Rescale one side of the answer turns: |negative| / positive sum over their tokens is target_ratio.

    Where a side is empty nothing can balance the other: all become 0. The factor is unbounded, as upstream.
    """
    positive, negative = answer_mass(credit.group, credit.answer_advantages())
    if positive == 0 or negative == 0:
        factors = 0.0, 0.0
    elif config.adjust == "positive":
        factors = negative / (positive * config.target_ratio), 1.0
    else:
        factors = 1.0, config.target_ratio * positive / negative
    turns = [advantages.copy() for advantages in credit.turns]
    for trajectory, advantages in zip(credit.group.trajectories, turns, strict=True):
        answer = last_sampled_turn(trajectory)
        if answer is not None:
            advantages[answer] *= factors[0 if advantages[answer] > 0 else 1]
    return replace(credit, turns=turns)


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
