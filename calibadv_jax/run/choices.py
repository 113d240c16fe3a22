"""Describe the choices of a config: rewards, credit, loss, questions, actions, processes."""

from __future__ import annotations

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config, LoraConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts.joining import describe_processes
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.rewards.score import check_reward
from calibadv_jax.run.actions import describe_actions


def describe_choices(config: Config) -> list[str]:
    """Return lines for the terminal; optional features appear only if they are on.

    Raises UserError if a user's function cannot be loaded or called; or nothing could be learned.
    """
    _check_something_is_learned(config)
    return [
        *describe(config.advantage),
        *_critic(config),
        *check_loss(config.loss),
        *describe_actions(config),
        *check_reward(config.reward),
        *_options(config),
        *describe_processes(config),
    ]


def _check_something_is_learned(config: Config) -> None:
    """Refuse choices that are sound alone, but together teach nothing."""
    rollout, credit = config.rollout, config.advantage
    if config.reward.format and not rollout.max_searches:
        fault = "the format asks for a search, so that every trajectory would score 0 and nothing be learned"
        keys, advice = "rollout.max_searches is 0 and reward.format is true", "set reward.format=false"
        raise UserError(f"{keys}: {fault}; {advice}, or allow searches")
    if rollout.group_size > 1:
        return
    if rollout.replace_tied:
        raise UserError(
            "rollout.group_size is 1, so that every group is tied, and"
            f" rollout.replace_tied={rollout.replace_tied} of them would be thrown away in every step;"
            " set rollout.replace_tied=0, or raise rollout.group_size"
        )
    balances = credit.rebalance and credit.rebalance_within == "group" and not credit.rebalance_excess
    if credit.is_calibrated and balances and credit.adjust != "clip":
        raise UserError(
            "rollout.group_size is 1, but advantage.name=calibadv balances the trajectories of a question:"
            " every answer would have the advantage 0; set rollout.group_size to 2 or more, or advantage.name"
            " to an estimator that compares none, such as gae"
        )


def _critic(config: Config) -> list[str]:
    critic, credit = config.critic, config.advantage
    if not credit.has_critic:
        return []
    lines = [
        "critic ON: a second model of the policy's size, with an optimizer of its own (learning rate"
        f" {critic.optimizer.lr:g}), is trained in every step, and asked for its values before every update"
    ]
    if critic.warmup_steps:
        lines.append(f"  in the first {critic.warmup_steps} steps the critic alone is trained")
    if credit.is_calibrated:
        lines.append(
            "  an advantage of a turn is the mean of its tokens'; the calibration moves all of them by its"
            " change of the mean"
        )
    return lines


def describe_adapters(lora: LoraConfig) -> list[str]:
    """Return a line on the adapters that are trained; none without adapters."""
    if not lora.rank:
        return []
    begun = f", which begin as those of {lora.init_from}" if lora.init_from else ""
    return [
        f"adapters ON: rank {lora.rank}, alpha {lora.alpha:g} at {', '.join(lora.targets)}{begun};"
        f" the base stays as it is, in {lora.base_dtype}"
    ]


def _options(config: Config) -> list[str]:
    reward, data, replace_tied = config.reward, config.data, config.rollout.replace_tied
    lines = describe_adapters(config.policy.lora)
    if config.learner.share_prefixes:
        lines.append(
            "shared prefixes ON: a common beginning of a group's trajectories is computed once per update"
        )
    if reward.overlong_penalty:
        lines.append(
            f"overlong penalty ON: from {reward.overlong_from} sampled tokens the score falls evenly, by"
            f" {reward.overlong_penalty:g} at {reward.overlong_until} and beyond"
        )
    if replace_tied:
        lines.append(
            f"dynamic sampling ON: a step asks up to {replace_tied} further questions in place of those"
            " whose trajectories all have the same score"
        )
    if data.has_curriculum:
        lines.append(
            "curriculum ON: a question is left out once after its trajectories had a mean score below"
            f" {data.rest_below:g} or above {data.rest_above:g}"
        )
    return lines
