"""Entry of the advantage stage, and the registry of estimators.

`compute_advantages` estimates, calibrates, lays the credit over tokens and sums it up. `ESTIMATORS` holds
everything about an estimator that a config can name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages import calibadv, steps, turn_estimators
from calibadv_jax.advantages.credit import GroupCredit, credit_of, no_credit, spread
from calibadv_jax.advantages.diagnostics import summarise
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.own_function import failure, own_function
from calibadv_jax.core.trajectory import Group

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

OWN_PARAMETERS = ("groups", "config")
OWN_EXPECTED = (
    "def advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[list[float | np.ndarray]],"
    " as in examples/own_advantage.py"
)
Formula = Callable[["AdvantageConfig"], str]


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages with its description."""

    name: str
    estimate: steps.EstimateFunction
    formula: Formula  # right of "advantage = "
    source: str  # as docs/credit.md cites it
    by_turn: str = ""  # how turns get advantages of their own; empty: they share their trajectory's
    needs: str = ""  # a critic, or golden_logprobs under the policy "current" or "initial"; empty: neither
    judges: bool = False  # whether searches get a correctness by silver documents
    is_own: bool = False  # the user's

    @property
    def carried(self) -> str:
        """What a sampled token carries."""
        return self.by_turn or "every sampled token of a trajectory carries the trajectory's advantage"


def _over_std(centred: str, more: str = "") -> Formula:
    def formula(config: AdvantageConfig) -> str:
        if not config.normalize_std:
            return f"{centred}{' (Dr. GRPO)' if centred == 'score - mean' else ''}{more}"
        std = "std" if config.std_over == "group" else "std of the step's scores"
        return f"({centred}) / ({std} + 1e-6){more}"

    return formula


def _of_losers(replacement: str) -> Formula:
    plain = _over_std("score - mean")

    def formula(config: AdvantageConfig) -> str:
        return f"{plain(config)}; below the mean but at least {config.score_threshold:g}: {replacement}"

    return formula


def _fixed(text: str) -> Formula:
    return lambda config: text


def _beside(turn_rewards: str) -> Formula:
    plain = _over_std("score - mean")
    return lambda config: f"{plain(config)}, + {config.turn_weight:g} × of each turn: {turn_rewards}"


def _gae_formula(config: AdvantageConfig) -> str:
    return (
        "GAE: the score less the critic's value before the token, with gamma"
        f" {config.discount:g} and lambda {config.gae_lambda:g}, whitened over the step's sampled tokens"
    )


_ENTRIES = (
    Estimator(
        "grpo",
        steps.grpo,
        _over_std("score - mean"),
        "DeepSeekMath, arXiv 2402.03300",
    ),
    Estimator(
        "dr_grpo",
        steps.compose(steps.less_mean, steps.unscaled),
        _fixed("score - mean (Dr. GRPO)"),
        "arXiv 2503.20783",
    ),
    Estimator(
        "grpo_neutral",
        steps.compose(steps.neutral, steps.over_std),
        _of_losers("as if the score were 0"),
        "CalibAdv's authors, `neutral`",
    ),
    Estimator(
        "grpo_acceptable",
        steps.compose(steps.acceptable, steps.over_std),
        _of_losers("0"),
        "CalibAdv's authors, `acceptable_mask`",
    ),
    Estimator(
        "grpo_passk",
        steps.compose(steps.best_less_second, steps.over_std),
        _over_std("best score - second best", " for the best trajectory, 0 for the others"),
        "verl, `grpo_passk`",
    ),
    Estimator(
        "rloo",
        steps.compose(steps.less_others, steps.unscaled),
        _fixed("score - mean of the others"),
        "arXiv 2402.14740",
    ),
    Estimator(
        "opo",
        steps.compose(steps.less_mean_by_length, steps.unscaled),
        _fixed("score - mean weighted by sampled tokens"),
        "arXiv 2505.23585",
    ),
    Estimator(
        "gpg",
        steps.compose(steps.less_mean, steps.over_share_of_scores),
        _fixed("(score - mean) / share of the step's scores that are not 0"),
        "arXiv 2504.02546",
    ),
    Estimator(
        "reinforce_plus_plus",
        steps.compose(steps.no_baseline, steps.whitened),
        _fixed("score, whitened over the sampled tokens of the step"),
        "arXiv 2501.03262",
    ),
    Estimator(
        "reinforce_plus_plus_baseline",
        steps.compose(steps.less_mean, steps.whitened),
        _fixed("score - mean of the group, whitened over the sampled tokens of the step"),
        "the same",
    ),
    Estimator(
        "querygroup",
        turn_estimators.querygroup,
        _over_std(
            "score - mean",
            "; a judged search: 0.7 × its correctness, standardised in the group, + 0.3 × that",
        ),
        "CalibAdv's authors",
        by_turn="searches are compared with each other, the other turns carry their trajectory's advantage",
        judges=True,
    ),
    Estimator(
        "gigpo",
        turn_estimators.gigpo,
        _beside("the score × discount^(turns to the end), compared where the last observation is the same"),
        "GiGPO, arXiv 2505.10978",
        by_turn="turns before which the environment showed the same are compared with each other too",
    ),
    Estimator(
        "mt_grpo",
        turn_estimators.mt_grpo,
        _beside("whether the turn shows a golden answer, compared among turns of one number"),
        "MT-GRPO, arXiv 2505.11821",
        by_turn="turns that show a golden answer are praised besides",
    ),
    Estimator(
        "stepsearch",
        turn_estimators.stepsearch,
        _beside(
            "the wanted documents that it and later turns newly show, less those seen before, compared among"
            " turns of one number"
        ),
        "StepSearch, arXiv 2505.15107",
        by_turn="searches that show new wanted documents are praised besides: the passages that the question"
        " names, or else the silver documents",
    ),
    Estimator(
        "igpo",
        turn_estimators.igpo,
        _over_std(
            "gain - mean",
            ", summed over the turns from it on; the last turn's gain is the score, another's by how much it"
            " raises the golden answer's probability; mean and std are over all turns of the group",
        ),
        "IGPO, arXiv 2510.14967",
        by_turn="turns are paid by how much they raise the golden answer's probability",
        needs="current",
    ),
    Estimator(
        "a2tgpo",
        turn_estimators.a2tgpo,
        _beside(
            "by how much it raises the golden answer's probability, compared among turns of one number,"
            " summed over the turns from it on / root of their number"
        ),
        "A²TGPO, arXiv 2605.06200",
        by_turn="turns that raise the golden answer's probability are praised besides",
        needs="current",
    ),
    Estimator(
        "tips",
        turn_estimators.tips,
        _beside(
            "by how much it and later turns raise the golden answer's log-probability under the initial"
            " policy, compared among turns of one number"
        ),
        "TIPS, arXiv 2603.22293",
        by_turn="turns that raise the initial policy's log-probability of the golden answer are praised"
        " besides",
        needs="initial",
    ),
    Estimator(
        "gae",
        turn_estimators.gae,
        _gae_formula,
        "[PPO with a critic](#ppo-with-a-critic)",
        by_turn="PPO with a critic; every sampled token has an advantage of its own; a turn shows the mean",
        needs="critic",
    ),
)
ESTIMATORS = {entry.name: entry for entry in _ENTRIES}


def find_estimator(config: AdvantageConfig) -> Estimator:
    """Return the estimator of a config, a registered one or a user's own.

    Raises:
        UserError: a function of the user's cannot be loaded, or takes other parameters.
    """
    if config.estimator in ESTIMATORS:
        return ESTIMATORS[config.estimator]
    key = "advantage.base" if config.is_calibrated else "advantage.name"
    function = own_function(config.estimator, key, OWN_PARAMETERS, OWN_EXPECTED)
    summary = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return Estimator(
        config.estimator,
        function,
        _fixed(summary or "what that function gives"),
        source="",
        by_turn="a function of your own",
        is_own=True,
    )


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
    """Compute the advantages of scored groups; statistics in float64 on the host.

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
    """Estimate and calibrate groups of which each has something to be compared with."""
    if not groups:
        return []
    credits = _credits(find_estimator(config), groups, config)
    if judges(config):
        credits = [calibadv.judge(credit, config) for credit in credits]
    return calibadv.calibrate(credits, config) if config.is_calibrated else credits


def _credits(estimator: Estimator, groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    try:
        estimate = estimator.estimate(groups, config)
    except Exception as error:  # a function of the user's own may raise anything
        if not estimator.is_own:
            raise
        raise UserError(f"advantages: {config.estimator} failed: {failure(error)}; correct it") from error
    try:
        return [credit_of(group, values) for group, values in zip(groups, estimate, strict=True)]
    except (TypeError, ValueError) as error:
        if not estimator.is_own:
            raise
        raise UserError(
            f"{config.estimator}: {error}; it must return one list for each group, with one number (or one"
            f" array of a number a turn) for each trajectory, as in examples/own_advantage.py"
        ) from error


def judges(config: AdvantageConfig) -> bool:
    """Return whether searches get a correctness."""
    return config.is_calibrated or find_estimator(config).judges


def describe(config: AdvantageConfig) -> list[str]:
    """Describe the estimator, the calibration switches that are active, and their effect.

    Raises:
        UserError: a function of the user's cannot be loaded, or takes other parameters.
    """
    estimator = find_estimator(config)
    formula = f"advantage = {estimator.formula(config)}"
    probed = [
        "golden answers: a forward pass over every trajectory up to every turn computes, in every step, their"
        f" log-probabilities under the {policy} policy"
        for policy in config.probed
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
        f"advantage {config.name}: {estimator.carried}",
        formula,
        "soft penalty OFF, rebalance OFF: no CalibAdv calibration; its keys have no effect under"
        f" {config.name} (advantage.name=calibadv advantage.base={config.name} calibrates it)",
        *probed,
    ]
