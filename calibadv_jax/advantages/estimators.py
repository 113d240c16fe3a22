"""The registry of estimators (`ESTIMATORS`), and the advantage stage (`compute_advantages`).

Formulas and sources: docs/credit.md, and the docstring of each estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.baselines import Estimate
from calibadv_jax.advantages.calibadv import calibrate, describe_calibration, judge
from calibadv_jax.advantages.credit import (
    GroupCredit,
    broadcast_to_tokens,
    merge_continued_turns,
    uncalibrated_credit,
)
from calibadv_jax.advantages.step_metrics import advantage_metrics
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS, Estimator
from calibadv_jax.core.trajectory import Group
from calibadv_jax.core.user_functions import describe_failure, import_user_function

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

# The signature of a user's own function, for messages.
_EXPECTED_FUNCTION = (
    "def advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[list[float | np.ndarray]],"
    " as in examples/own_advantage.py"
)


def find_estimator(config: AdvantageConfig) -> Estimator:
    """Return the estimator that the section `advantage` names: a registered one, or a user's own function.

    Args:
        config: the section `advantage`. With CalibAdv `base` names the estimator, otherwise `name`.

    Returns:
        An entry of ESTIMATORS, or a new one for the user's function, which the first line of its docstring
        describes.

    Raises:
        UserError: if the user's function cannot be imported, or does not take groups and config.
    """
    if config.estimator in ESTIMATORS:
        return ESTIMATORS[config.estimator]
    key = "advantage.base" if config.is_calibrated else "advantage.name"
    function = import_user_function(
        config.estimator, key, ("groups", "config"), _EXPECTED_FUNCTION, tuple(config.args)
    )
    docstring = (function.__doc__ or "the result of that function").strip()
    summary = docstring.partition("\n")[0]
    template = summary.replace("{", "{{").replace("}", "}}")  # `formula` formats it
    return Estimator(config.estimator, template, turn_description="a function of your own")


# --- The advantage stage ---


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of a step, in the order of its groups and their trajectories."""

    # For each group and trajectory float32 [T], parallel to its `response_ids`; 0 on observation tokens.
    advantages: list[list[np.ndarray]]
    credits: list[GroupCredit]  # the same by turn, with correctness and silver documents
    metrics: dict[str, float]  # see `step_metrics.advantage_metrics`


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> AdvantageResult:
    """Compute the advantages of the scored groups of a step; statistics in float64 on the host.

    A trajectory without a sampled token gets 0 everywhere, but its score counts in its group. Failed
    trajectories do not count. If they leave a single trajectory in a group, it has nothing to be compared
    with: it gets 0, and its score does not count in statistics of the step. Turns that trajectories share
    get the mean of their advantages, after any calibration (`credit.merge_continued_turns`).

    Args:
        groups: the groups of the step, scored by `rewards.score.score_groups`.
        config: the section `advantage`.

    Returns:
        Advantages by token and by turn, and metrics.

    Raises:
        ValueError: if a group mixes questions, or an answer score is not finite.
        UserError: if a user's own function cannot be used, or a trajectory lacks what the estimator needs.
    """
    for group in groups:
        _check_question(group)
    credits = [uncalibrated_credit(group, np.zeros(len(group.trajectories))) for group in groups]
    compared = [number for number, group in enumerate(groups) if _has_comparison(group)]
    if compared:
        compared_credits = _credit_groups([groups[number] for number in compared], config)
        for number, credit in zip(compared, compared_credits, strict=True):
            credits[number] = merge_continued_turns(credit)
    advantages = [broadcast_to_tokens(credit) for credit in credits]
    return AdvantageResult(advantages, credits, advantage_metrics(credits))


def _check_question(group: Group) -> None:
    expected = group.question.id
    for trajectory in group.trajectories:
        name = trajectory.question.id
        if name != expected:
            raise ValueError(f"a trajectory of question {name!r} is in the group of {expected!r}")


def _has_comparison(group: Group) -> bool:
    """Whether a group has trajectories to compare. A group of one counts, unless others of it have failed."""
    fewest = 2 if group.failed else 1
    return len(group.trajectories) >= fewest


def judges_searches(config: AdvantageConfig) -> bool:
    """Return whether searches get a correctness by silver documents.

    Args:
        config: the section `advantage`.

    Returns:
        True for CalibAdv over any base, and for estimators that use the correctness themselves.

    Raises:
        UserError: as `find_estimator`.
    """
    return config.is_calibrated or find_estimator(config).judges_searches


def _credit_groups(groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    """Estimate the credit of groups that are not empty, and calibrate it if the config says so."""
    estimator = find_estimator(config)
    credits = _estimate(estimator, groups, config)
    if judges_searches(config):
        credits = [judge(credit, config) for credit in credits]
    if config.is_calibrated:
        credits = calibrate(credits, config)
    return credits


def _estimate(estimator: Estimator, groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    if config.estimator in ESTIMATORS:
        return _estimated_credit(groups, estimator.function(groups, config))
    try:
        estimate = estimator.function(groups, config, **config.args)
    except Exception as error:  # a function of the user's own may raise anything
        raise UserError(
            f"advantages: {config.estimator} failed: {describe_failure(error)}; correct it"
        ) from error
    try:
        return _estimated_credit(groups, estimate)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.estimator}: {error}; it must return one list for each group, with one number (or one"
            " array of a number a turn) for each trajectory, as in examples/own_advantage.py"
        ) from error


def _estimated_credit(groups: Sequence[Group], estimate: Estimate) -> list[GroupCredit]:
    pairs = zip(groups, estimate, strict=True)
    return [uncalibrated_credit(group, advantages) for group, advantages in pairs]


# --- Description ---


def describe(config: AdvantageConfig) -> list[str]:
    """Describe the estimator and the calibration.

    Args:
        config: the section `advantage`.

    Returns:
        Lines of text: name, formula, calibration, and the cost of golden answers' probabilities.

    Raises:
        UserError: as `find_estimator`.
    """
    estimator = find_estimator(config)
    if config.is_calibrated:
        summary = f"{config.base} calibrated by turn"
        calibration = describe_calibration(config)
    else:
        summary = estimator.token_description
        calibration = ["no CalibAdv calibration: advantage.name is not calibadv"]
    lines = [f"advantage {config.name}: {summary}", f"advantage = {estimator.formula(config)}", *calibration]
    for policy in config.probed:
        lines.append(
            "golden answers: a forward pass over every trajectory up to every turn computes, in every step,"
            f" their log-probabilities under the {policy} policy"
        )
    return lines
