"""Registries of the parts that a config key names: losses, estimators and rewards of answers.

Each entry stands here once, with the address of its function and its needs, so that the config knows the
names and keys without importing a module that computes: JAX must not be imported before the command line
has set its environment. A part that is added is a function and an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.user_functions import load_function

# --- Losses ---

_CLIP = ("clip_low", "clip_high")


@dataclass(frozen=True)
class LossEntry:
    """A loss, and what it needs beside the tokens of a microbatch.

    Attributes:
        address: ``module:function`` of the formula, a `learner.losses.TokenLoss`.
        summary: Printed at the start of a run.
        batch_factor: ``module:function`` that computes `Tokens.factors`; empty: the loss has none.
        needs_logprobs: Whether `batch_factor` reads the current policy's log-probabilities, which costs one
            more forward pass for each update.
        every_sample: Whether samples without advantage change the loss.
        keys: Keys of the section `loss` that it reads and some other losses do not.
        is_sequence_mean: Whether the loss is a mean over trajectories.
    """

    address: str
    summary: str
    batch_factor: str = ""
    needs_logprobs: bool = False
    every_sample: bool = False
    keys: tuple[str, ...] = ()
    is_sequence_mean: bool = False


# Values of loss.name. The formulas are in docs/losses.md and in the functions.
LOSSES: dict[str, LossEntry] = {
    "vanilla": LossEntry(
        "calibadv_jax.learner.losses:vanilla",
        "PPO's clipped ratio, token by token",
        keys=(*_CLIP, "dual_clip"),
    ),
    "cispo": LossEntry(
        "calibadv_jax.learner.losses:cispo",
        "REINFORCE weighted by the clipped ratio: clipped tokens keep their gradient",
        keys=(*_CLIP, "drop_above"),
    ),
    "gspo": LossEntry(
        "calibadv_jax.learner.losses:gspo",
        "PPO with one ratio a trajectory; its widths are of the order of 0.0003",
        keys=_CLIP,
        is_sequence_mean=True,
    ),
    "gmpo": LossEntry(
        "calibadv_jax.learner.losses:gmpo",
        "geometric mean of a trajectory's ratios; clip_low and clip_high bound logarithms",
        keys=_CLIP,
        is_sequence_mean=True,
    ),
    "gpg": LossEntry(
        "calibadv_jax.learner.losses:gpg",
        "REINFORCE: no ratio and no clip",
    ),
    "clip_cov": LossEntry(
        "calibadv_jax.learner.losses:scaled_vanilla",
        "PPO without a few tokens of large covariance of advantage and log-probability",
        batch_factor="calibadv_jax.learner.batch_factors:clip_cov_factor",
        needs_logprobs=True,
        every_sample=True,
        keys=(*_CLIP, "cov_share", "cov_low", "cov_high"),
    ),
    "kl_cov": LossEntry(
        "calibadv_jax.learner.losses:kl_cov",
        "no clip; tokens of largest covariance of advantage and log-probability are held near the old policy",
        batch_factor="calibadv_jax.learner.batch_factors:kl_cov_factor",
        needs_logprobs=True,
        every_sample=True,
        keys=("cov_share", "cov_kl_coef"),
    ),
    "lld": LossEntry(
        "calibadv_jax.learner.losses:lld",
        "PPO, and a penalty on falling tokens of positive advantage",
        batch_factor="calibadv_jax.learner.batch_factors:positive_mean_factor",
        keys=(*_CLIP, "dual_clip", "lld_coef", "lld_gating"),
    ),
    "balance": LossEntry(
        "calibadv_jax.learner.losses:scaled_vanilla",
        "as published: no gradient for negative advantages, and tokens of positive advantage are pushed down"
        " where loss.balance_ratio is above 1; loss.name=balance_detached does what was meant",
        batch_factor="calibadv_jax.learner.batch_factors:balance_factor",
        keys=(*_CLIP, "balance_ratio"),
    ),
    "balance_detached": LossEntry(
        "calibadv_jax.learner.losses:scaled_vanilla",
        "PPO with the terms of negative advantages rescaled to balance_ratio times those of positive ones",
        batch_factor="calibadv_jax.learner.batch_factors:balance_detached_factor",
        needs_logprobs=True,
        keys=(*_CLIP, "balance_ratio"),
    ),
    "sapo": LossEntry(
        "calibadv_jax.learner.losses:sapo",
        "a smooth gate in place of PPO's clip",
        keys=("tau_positive", "tau_negative"),
        is_sequence_mean=True,
    ),
    "dppo_tv": LossEntry(
        "calibadv_jax.learner.losses:dppo_tv",
        "REINFORCE weighted by the ratio; no gradient for probabilities moved too far",
        keys=(*_CLIP, "ratio_cap"),
    ),
    "dppo_kl": LossEntry(
        "calibadv_jax.learner.losses:dppo_kl",
        "as dppo_tv, with a KL divergence in place of the difference",
        keys=(*_CLIP, "ratio_cap"),
    ),
    "dro": LossEntry(
        "calibadv_jax.learner.losses:dro",
        "REINFORCE with a quadratic penalty on moving from the old policy",
        every_sample=True,
        keys=("dro_beta",),
    ),
}

# --- Estimators ---

# Parts of the formulas below.
_NEAR_MISSES = "{scaled}; below the mean but at least {config.score_threshold:g}: "
_TURN_REWARD = "{scaled}, + {config.turn_weight:g} × of each turn: "
_WHITENED = "whitened over the sampled tokens of the step"


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages, and its description.

    Attributes:
        address: ``module:function``, an `advantages.baselines.EstimateFunction`.
        template: What follows "advantage = " in a description. {config} is the section `advantage`;
            {scaled} is `centred`, divided by a standard deviation if the config says so.
        turn_description: How turns get advantages of their own; empty: they share their trajectory's.
        needs: What trajectories must hold. "critic": `values`; "current" or "initial": `golden_logprobs`
            under the policy of that name; empty: nothing more.
        judges_searches: Whether searches get a correctness by silver documents.
        centred: What is divided by the standard deviation.
    """

    address: str
    template: str
    turn_description: str = ""
    needs: str = ""
    judges_searches: bool = False
    centred: str = "score - mean"

    @property
    def function(self) -> Callable[..., Any]:
        """The function that estimates the advantages of groups."""
        return load_function(self.address)

    @property
    def token_description(self) -> str:
        """Which advantage a token of a trajectory gets, in words."""
        return (
            self.turn_description or "every sampled token of a trajectory carries the trajectory's advantage"
        )

    def formula(self, config: Any) -> str:
        """Return the right side of "advantage = " with the settings of the section `advantage`.

        Args:
            config: The section `advantage`; the template names the keys that are read.

        Returns:
            The formula in one line.
        """
        scaled = self.centred
        if config.normalize_std:
            std = "std" if config.std_over == "group" else "std of the step's scores"
            scaled = f"({self.centred}) / ({std} + 1e-6)"
        return self.template.format(scaled=scaled, config=config)


# Values of advantage.base, and of advantage.name beside CALIBRATED.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator("calibadv_jax.advantages.score_estimators:grpo", "{scaled}"),
    "dr_grpo": Estimator("calibadv_jax.advantages.score_estimators:dr_grpo", "score - mean"),
    "grpo_neutral": Estimator(
        "calibadv_jax.advantages.score_estimators:grpo_neutral", f"{_NEAR_MISSES}as if the score were 0"
    ),
    "grpo_acceptable": Estimator(
        "calibadv_jax.advantages.score_estimators:grpo_acceptable", f"{_NEAR_MISSES}0"
    ),
    "grpo_passk": Estimator(
        "calibadv_jax.advantages.score_estimators:grpo_passk",
        "{scaled} for the best trajectory, 0 for the others",
        centred="best score - second best",
    ),
    "rloo": Estimator("calibadv_jax.advantages.score_estimators:rloo", "score - mean of the others"),
    "opo": Estimator(
        "calibadv_jax.advantages.score_estimators:opo", "score - mean weighted by sampled tokens"
    ),
    "gpg": Estimator(
        "calibadv_jax.advantages.score_estimators:gpg", "(score - mean) / share of nonzero scores"
    ),
    "reinforce_plus_plus": Estimator(
        "calibadv_jax.advantages.score_estimators:reinforce_plus_plus", f"score, {_WHITENED}"
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "calibadv_jax.advantages.score_estimators:reinforce_plus_plus_baseline", f"score - mean, {_WHITENED}"
    ),
    "querygroup": Estimator(
        "calibadv_jax.advantages.turn_rewards:querygroup",
        "{scaled}; a judged search: 0.7 × its correctness, standardised in the group, + 0.3 × that",
        turn_description=(
            "searches are compared with each other, the other turns carry their trajectory's advantage"
        ),
        judges_searches=True,
    ),
    "gigpo": Estimator(
        "calibadv_jax.advantages.turn_rewards:gigpo",
        _TURN_REWARD
        + "the score × discount^(turns to the end), compared where the last observation is the same",
        turn_description=(
            "turns before which the environment showed the same are compared with each other too"
        ),
    ),
    "mt_grpo": Estimator(
        "calibadv_jax.advantages.turn_rewards:mt_grpo",
        _TURN_REWARD + "whether it shows a golden answer, compared among turns of one number",
        turn_description="turns that show a golden answer get more",
    ),
    "stepsearch": Estimator(
        "calibadv_jax.advantages.turn_rewards:stepsearch",
        _TURN_REWARD
        + "new less repeated target documents, of later turns too, compared among turns of one number",
        turn_description=(
            "searches that show new target documents (the question's passages, or else silver ones) get more"
        ),
    ),
    "igpo": Estimator(
        "calibadv_jax.contrib.turn_estimators:igpo",
        "{scaled}, summed over the turns from it on; the last gain is the score, another's the rise of the"
        " golden answer's probability; mean and std are over all turns of the group",
        turn_description="turns are paid by how much they raise the golden answer's probability",
        needs="current",
        centred="gain - mean",
    ),
    "a2tgpo": Estimator(
        "calibadv_jax.contrib.turn_estimators:a2tgpo",
        _TURN_REWARD
        + "how much it raises the golden answer's probability, compared among turns of one number, summed"
        " over the turns from it on / root of their number",
        turn_description="turns that raise the golden answer's probability get more",
        needs="current",
    ),
    "tips": Estimator(
        "calibadv_jax.contrib.turn_estimators:tips",
        _TURN_REWARD
        + "how much it and later turns raise the golden answer's log-probability under the initial policy,"
        " compared among turns of one number",
        turn_description=(
            "turns that raise the initial policy's log-probability of the golden answer get more"
        ),
        needs="initial",
    ),
    "gae": Estimator(
        "calibadv_jax.advantages.gae:gae",
        "GAE: the score less the critic's value before the token, with gamma {config.discount:g} and lambda"
        f" {{config.gae_lambda:g}}, {_WHITENED}",
        turn_description=(
            "PPO with a critic; every sampled token has an advantage of its own; a turn shows the mean"
        ),
        needs="critic",
    ),
}

# --- Rewards of answers ---

# Values of reward.answer, and of NAME in metrics reward/NAME: the address of a function that gives a score in
# [0, 1], given the prediction and the golden answers.
ANSWER_REWARDS = {
    "em": "calibadv_jax.rewards.score:exact_match",
    "f1": "calibadv_jax.rewards.score:f1",
    "cover_em": "calibadv_jax.rewards.score:cover_em",
}
