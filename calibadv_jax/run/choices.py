"""Describe the choices of a config: rewards, credit, loss, actions, processes."""

from __future__ import annotations

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.joining import describe_processes
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.rewards.score import check_reward
from calibadv_jax.run.configured_actions import describe_actions


def describe_choices(config: Config) -> list[str]:
    """Describe the choices of a config for the terminal, and check them.

    Args:
        config: The run's config.

    Returns:
        Lines of text. Optional features appear only if they are on.

    Raises:
        UserError: A user's function cannot be loaded or called, or the choices together teach nothing.
    """
    _check_something_is_learned(config)
    teacher = load_optional("teacher").describe_teacher(config) if config.teacher.is_on else []
    demonstrations = []
    if config.demonstrations.is_on:
        demonstrations = load_optional("group_demonstrations").describe_demonstrations(config)
    continuations = []
    if config.continuations.is_on:
        continuations = load_optional("near_misses").describe_continuations(config)
    return [
        *describe(config.advantage),
        *check_loss(config.loss),
        *teacher,
        *demonstrations,
        *continuations,
        *describe_actions(config),
        *check_reward(config.reward),
        *describe_processes(config),
    ]


def _check_something_is_learned(config: Config) -> None:
    """Refuse choices that are valid alone, but together give no trajectory an advantage."""
    rollout = config.rollout
    credit = config.advantage
    learns_from_teacher = config.teacher.is_on and config.teacher.guides == "all"
    if config.reward.format and not rollout.max_searches and not learns_from_teacher:
        raise UserError(
            "rollout.max_searches is 0 and reward.format is true: the format asks for a search, so that every"
            " trajectory would score 0 and nothing be learned; set reward.format=false, or allow searches"
        )
    if rollout.group_size > 1:
        return
    if rollout.dynamic_sampling:
        raise UserError("rollout.group_size=1 ties every group; raise it, or set rollout.dynamic_sampling=0")
    if learns_from_teacher:
        return
    balances_groups = credit.rebalance and credit.rebalance_within == "group" and not credit.rebalance_excess
    if credit.is_calibrated and balances_groups and credit.adjust != "clip":
        raise UserError(
            "rollout.group_size is 1, but advantage.name=calibadv balances the trajectories of a question:"
            " every answer would have the advantage 0; set it to 2 or more, or advantage.name to an"
            " estimator that compares none, such as gae"
        )
