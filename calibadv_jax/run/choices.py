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
        *_describe_critic(config),
        *check_loss(config.loss),
        *describe_actions(config),
        *check_reward(config.reward),
        *describe_adapters(config.policy.lora),
        *describe_processes(config),
    ]


def _check_something_is_learned(config: Config) -> None:
    """Refuse choices that are sound alone, but together teach nothing."""
    rollout, credit = config.rollout, config.advantage
    if config.reward.format and not rollout.max_searches:
        fault = "the format asks for a search, so that every trajectory would score 0 and nothing be learned"
        keys, advice = "rollout.max_searches is 0 and reward.format is true", "set reward.format=false"
        raise UserError(f"{keys}: {fault}; {advice}, or allow searches")
    balances = credit.rebalance and credit.rebalance_within == "group" and not credit.rebalance_excess
    if rollout.group_size == 1 and credit.is_calibrated and balances and credit.adjust != "clip":
        raise UserError(
            "rollout.group_size is 1, but advantage.name=calibadv balances the trajectories of a question:"
            " every answer would have the advantage 0; set rollout.group_size to 2 or more, or advantage.name"
            " to an estimator that compares none, such as gae"
        )


def _describe_critic(config: Config) -> list[str]:
    if not config.advantage.has_critic:
        return []
    rate = config.critic.optimizer.lr
    return [
        "critic ON: a second model of the policy's size, with an optimizer of its own (learning rate"
        f" {rate:g}), is trained in every step, and asked for its values before every update"
    ]


def describe_adapters(lora: LoraConfig) -> list[str]:
    """Return a line on the adapters that are trained; none without adapters."""
    if not lora.rank:
        return []
    begun = f", which begin as those of {lora.init_from}" if lora.init_from else ""
    return [
        f"adapters ON: rank {lora.rank}, alpha {lora.alpha:g} at {', '.join(lora.targets)}{begun};"
        f" the base stays as it is, in {lora.base_dtype}"
    ]
