"""The estimators that a config names: what each one is composed of, and its formula in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calibadv_jax.advantages import rivals, steps
from calibadv_jax.advantages.gae import gae
from calibadv_jax.advantages.querygroup import querygroup
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.own_function import own_function

OWN_PARAMETERS = ("groups", "config")
OWN_EXPECTED = (
    "def advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[list[float | np.ndarray]],"
    " as in examples/own_advantage.py"
)


CARRIED = "every sampled token of a trajectory carries the trajectory's advantage"
Formula = Callable[[AdvantageConfig], str]


@dataclass(frozen=True)
class Named:
    """An estimator with what people want to know of it."""

    estimate: steps.Estimator
    formula: Formula  # right of "advantage = "
    judges: bool = False  # whether searches get a correctness by silver documents
    is_own: bool = False  # the user's
    carried: str = CARRIED


def _over_std(centred: str, more: str = "") -> Formula:
    def formula(config: AdvantageConfig) -> str:
        if not config.normalize_std:
            return f"{centred}{' (Dr. GRPO)' if centred == 'score - mean' else ''}{more}"
        std = "std" if config.std_over == "group" else "std of the step's scores"
        return f"({centred}) / ({std} + 1e-6){more}"

    return formula


def _of_losers(what: str) -> Formula:
    plain = _over_std("score - mean")

    def formula(config: AdvantageConfig) -> str:
        return f"{plain(config)}; below the mean but at least {config.score_threshold:g}: {what}"

    return formula


def _fixed(text: str) -> Formula:
    return lambda config: text


def _beside(part: str) -> Formula:
    plain = _over_std("score - mean")
    return lambda config: f"{plain(config)}, + {config.turn_weight:g} × of each turn: {part}"


ESTIMATORS: dict[str, Named] = {
    "grpo": Named(steps.compose(steps.less_mean, steps.over_std), _over_std("score - mean")),
    "dr_grpo": Named(steps.compose(steps.less_mean, steps.as_it_is), _fixed("score - mean (Dr. GRPO)")),
    "grpo_neutral": Named(steps.compose(steps.neutral, steps.over_std), _of_losers("as if the score were 0")),
    "grpo_acceptable": Named(steps.compose(steps.acceptable, steps.over_std), _of_losers("0")),
    "grpo_passk": Named(
        steps.compose(steps.best_less_second, steps.over_std),
        _over_std("best score - second best", " for the best trajectory, 0 for the others"),
    ),
    "rloo": Named(steps.compose(steps.less_others, steps.as_it_is), _fixed("score - mean of the others")),
    "opo": Named(
        steps.compose(steps.less_mean_by_length, steps.as_it_is),
        _fixed("score - mean weighted by sampled tokens"),
    ),
    "gpg": Named(
        steps.compose(steps.less_mean, steps.over_share_of_scores),
        _fixed("(score - mean) / share of the step's scores that are not 0"),
    ),
    "reinforce_plus_plus": Named(
        steps.compose(steps.no_baseline, steps.whitened),
        _fixed("score, whitened over the sampled tokens of the step"),
    ),
    "reinforce_plus_plus_baseline": Named(
        steps.compose(steps.less_mean, steps.whitened),
        _fixed("score - mean of the group, whitened over the sampled tokens of the step"),
    ),
    "querygroup": Named(
        querygroup,
        _over_std(
            "score - mean",
            "; a judged search: 0.7 × its correctness, standardised in the group, + 0.3 × that",
        ),
        judges=True,
        carried="searches are compared with each other, the other turns carry their trajectory's advantage",
    ),
    "gigpo": Named(
        rivals.gigpo,
        _beside("the score × discount^(turns to the end), compared where the last observation is the same"),
        carried="turns before which the environment showed the same are compared with each other too",
    ),
    "mt_grpo": Named(
        rivals.mt_grpo,
        _beside("whether the turn shows a golden answer, compared among turns of one number"),
        carried="turns that show a golden answer are praised besides",
    ),
    "stepsearch": Named(
        rivals.stepsearch,
        _beside(
            "the wanted documents that it and later turns newly show, less those seen before, compared among"
            " turns of one number"
        ),
        carried="searches that show new wanted documents are praised besides: the passages that the question"
        " names, or else the silver documents",
    ),
    "igpo": Named(
        rivals.igpo,
        _over_std(
            "gain - mean",
            ", summed over the turns from it on; the last turn's gain is the score, another's by how much it"
            " raises the golden answer's probability; mean and std are over all turns of the group",
        ),
        carried="turns are paid by how much they raise the golden answer's probability",
    ),
    "a2tgpo": Named(
        rivals.a2tgpo,
        _beside(
            "by how much it raises the golden answer's probability, compared among turns of one number,"
            " summed over the turns from it on / root of their number"
        ),
        carried="turns that raise the golden answer's probability are praised besides",
    ),
    "tips": Named(
        rivals.tips,
        _beside(
            "by how much it and later turns raise the golden answer's log-probability under the initial"
            " policy, compared among turns of one number"
        ),
        carried="turns that raise the initial policy's log-probability of the golden answer are praised"
        " besides",
    ),
    "gae": Named(
        gae,
        lambda config: (
            "GAE: the score less the critic's value before the token, with gamma"
            f" {config.discount:g} and lambda {config.gae_lambda:g}, whitened over the step's sampled tokens"
        ),
        carried="PPO with a critic; every sampled token has an advantage of its own; a turn shows the mean",
    ),
}


def find(config: AdvantageConfig) -> Named:
    """The estimator of a config, one of the above or a user's own.

    Raises:
        UserError: a function of the user's cannot be loaded, or takes other parameters.
    """
    if config.estimator in ESTIMATORS:
        return ESTIMATORS[config.estimator]
    key = "advantage.base" if config.is_calibrated else "advantage.name"
    function = own_function(config.estimator, key, OWN_PARAMETERS, OWN_EXPECTED)
    said = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return Named(
        function,
        _fixed(said or "what that function gives"),
        is_own=True,
        carried="a function of your own",
    )
