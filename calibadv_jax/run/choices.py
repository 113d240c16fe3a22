"""Describe the choices of a config: rewards, credit, loss, actions, processes."""

from __future__ import annotations

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.distributed.joining import describe_processes
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
        *check_loss(config.loss),
        *describe_actions(config),
        *check_reward(config.reward),
        *describe_processes(config),
    ]


def _check_something_is_learned(config: Config) -> None:
    """Refuse choices that are sound alone, but together teach nothing."""
    rollout, credit = config.rollout, config.advantage
    if config.reward.format and not rollout.max_searches:
        fault = "the format asks for a search, so that every trajectory would score 0 and nothing be learned"
        keys, advice = "rollout.max_searches is 0 and reward.format is true", "set reward.format=false"
        raise UserError(f"{keys}: {fault}; {advice}, or allow searches")
    if rollout.group_size == 1 and rollout.dynamic_sampling:
        raise UserError("rollout.group_size=1 ties every group; raise it, or set rollout.dynamic_sampling=0")
    balances = credit.rebalance and credit.rebalance_within == "group" and not credit.rebalance_excess
    if rollout.group_size == 1 and credit.is_calibrated and balances and credit.adjust != "clip":
        fault = "rollout.group_size is 1, but advantage.name=calibadv balances the trajectories of a question"
        way_out = "set it to 2 or more, or advantage.name to an estimator that compares none, such as gae"
        raise UserError(f"{fault}: every answer would have the advantage 0; {way_out}")
