"""CalibAdv: advantages of an estimator, by default GRPO, calibrated turn by turn (arXiv 2604.18235).

Soft penalty: a losing trajectory's search turn that found silver documents gets a smaller penalty.
Rebalance: within a group, the positive and negative advantage of the answer turns is brought to a
given ratio. An answer turn is a trajectory's last sampled turn, whatever its kind. The two never touch
the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit, answer_mass, last_sampled_turn
from calibadv_jax.advantages.silver import judge_turns, silver_documents
from calibadv_jax.config import AdvantageConfig


def judge(credit: GroupCredit, config: AdvantageConfig) -> None:
    """Fills in the group's silver documents, and how correct each search is by them."""
    credit.silver = silver_documents(credit.group, config.silver_threshold)
    judged = [judge_turns(one, credit.silver, config.correctness) for one in credit.group.trajectories]
    credit.correctness = [np.array([one.correctness for one in turns], np.float64) for turns in judged]
    credit.repeated = [[one.repeated for one in turns] for turns in judged]
    credit.found_silver = [[one.found_silver for one in turns] for turns in judged]


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> None:
    """The steps that are switched on, for judged credit."""
    for credit in credits:
        if config.soft_penalty:
            _soften(credit)
        if config.rebalance:
            _rebalance(credit, config)


def _soften(credit: GroupCredit) -> None:
    """Search turns with a negative advantage keep 1 - correctness of it; answer turns keep it all."""
    for trajectory, turns, correctness in zip(
        credit.group.trajectories, credit.turns, credit.correctness, strict=True
    ):
        searches = slice(last_sampled_turn(trajectory) or 0)  # correctness is 0 where the kind is another
        softened = np.zeros(len(turns), bool)
        softened[searches] = (turns[searches] < 0) & (correctness[searches] > 0)
        credit.softened.append(softened)
        turns[searches] *= 1 - correctness[searches] * (turns[searches] < 0)


def _rebalance(credit: GroupCredit, config: AdvantageConfig) -> None:
    """Rescales one side so that |negative sum| / positive sum is the target over answer-turn tokens.

    Where a side is empty nothing can balance it: the answer turns become 0, the other turns stay.
    The factor is unbounded, as upstream.
    """
    positive, negative = answer_mass(credit.group, credit.answer_advantages())
    factors = {"positive": 1.0, "negative": 1.0}
    if positive == 0 or negative == 0:
        factors = {"positive": 0.0, "negative": 0.0}
    elif config.adjust == "positive":
        factors["positive"] = negative / (positive * config.target_ratio)
    else:
        factors["negative"] = config.target_ratio * positive / negative
    for trajectory, turns in zip(credit.group.trajectories, credit.turns, strict=True):
        index = last_sampled_turn(trajectory)
        if index is not None:
            turns[index] *= factors["positive" if turns[index] > 0 else "negative"]


_CORRECTNESS_WORDS = {
    "fraction": "number of its newly found silver documents / number of its documents",
    "max": "largest weight among its newly found silver documents",
    "mean": "sum of the weights of its newly found silver documents / number of its documents",
}


def describe(config: AdvantageConfig) -> list[str]:
    """What the calibration of this configuration does, a line a switch."""
    lines = []
    if config.soft_penalty:
        lines += [
            "soft penalty ON: a negative advantage of a search turn is scaled by 1 - correctness;"
            " a turn's correctness is 0 if it repeats an earlier one",
            f"  correctness {config.correctness}: {_CORRECTNESS_WORDS[config.correctness]}",
            "  silver documents: those seen by the group's best format-valid trajectories, if their score"
            f" is at least {config.silver_threshold:g}",
        ]
    else:
        lines.append("soft penalty OFF: search turns keep their trajectory's whole advantage")
    if config.rebalance:
        lines.append(
            f"rebalance ON: within each group the {config.adjust} side is rescaled until |negative sum| /"
            f" positive sum = {config.target_ratio:g} (lambda) over the tokens of the answer turns;"
            " answer turns of one-sided groups become 0"
        )
    else:
        lines.append("rebalance OFF: answer turns keep their trajectory's whole advantage")
    return lines
