"""Entry of the advantage stage: estimates, calibrates, lays the credit over tokens, sums it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.advantages import calibadv
from calibadv_jax.advantages.credit import GroupCredit, credit_of, no_credit, spread
from calibadv_jax.advantages.diagnostics import summarise
from calibadv_jax.advantages.named import Named, find
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.own_function import failure
from calibadv_jax.core.trajectory import Group


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of a step, in the order of its groups and their trajectories."""

    advantages: list[list[np.ndarray]]
    """Float32 [T] a trajectory, aligned with `Trajectory.response_ids`; 0 on observation tokens."""
    credits: list[GroupCredit]
    """The same by turn, with correctness and silver documents."""
    metrics: dict[str, float]
    """See `diagnostics.summarise`."""


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> AdvantageResult:
    """Advantages of scored groups; statistics in float64 on the host.

    A trajectory without a sampled token gets 0 everywhere, but its score counts in its group. A group is as
    if it did not have those that failed. One that is left alone has nothing to be compared with and gets 0;
    its score does not count in statistics of the step.

    Raises:
        ValueError: a group mixes questions, or an answer score is not finite.
        UserError: a function of the user's cannot be loaded, or does not give advantages of the right shape.
    """
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.question.id != group.question.id:
                raise ValueError(
                    f"a trajectory of question {trajectory.question.id!r} is in the group"
                    f" of {group.question.id!r}"
                )
    compared = [len(group.trajectories) > (1 if group.failed else 0) for group in groups]
    estimated = iter(_estimate([group for group, some in zip(groups, compared, strict=True) if some], config))
    credits = [
        next(estimated) if some else no_credit(group) for group, some in zip(groups, compared, strict=True)
    ]
    return AdvantageResult([spread(credit) for credit in credits], credits, summarise(credits))


def _estimate(groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    """Credit of groups of which each has something to be compared with."""
    if not groups:
        return []
    credits = _credits(find(config), groups, config)
    if judges(config):
        credits = [calibadv.judge(credit, config) for credit in credits]
    return calibadv.calibrate(credits, config) if config.is_calibrated else credits


def _credits(named: Named, groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    try:
        estimate = named.estimate(groups, config)
    except Exception as error:  # a function of the user's own may raise anything
        if not named.is_own:
            raise
        raise UserError(f"advantages: {config.estimator} failed: {failure(error)}; correct it") from error
    try:
        return [credit_of(group, values) for group, values in zip(groups, estimate, strict=True)]
    except (TypeError, ValueError) as error:
        if not named.is_own:
            raise
        raise UserError(
            f"{config.estimator}: {error}; it must return one list for each group, with one number (or one"
            f" array of a number a turn) for each trajectory, as in examples/own_advantage.py"
        ) from error


def judges(config: AdvantageConfig) -> bool:
    """Whether searches get a correctness."""
    return config.is_calibrated or find(config).judges


def describe(config: AdvantageConfig) -> list[str]:
    """Lines for people: what the choice does, which calibration switches are active, what each means.

    Raises:
        UserError: a function of the user's cannot be loaded, or takes other parameters.
    """
    named = find(config)
    formula = f"advantage = {named.formula(config)}"
    probed = [
        "golden answers: a forward pass over every trajectory up to every turn computes, in every step, their"
        f" log-probabilities under the {one} policy"
        for one in config.probed
    ]
    if config.is_calibrated:
        base = "GRPO" if config.base == "grpo" else config.base
        return [
            f"advantage calibadv: {base} calibrated by turn",
            formula,
            *calibadv.describe(config),
            *probed,
        ]
    return [
        f"advantage {config.name}: {named.carried}",
        formula,
        "soft penalty OFF, rebalance OFF: no CalibAdv calibration; its keys have no effect under"
        f" {config.name} (advantage.name=calibadv advantage.base={config.name} calibrates it)",
        *probed,
    ]
