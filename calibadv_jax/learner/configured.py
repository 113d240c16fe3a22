"""The learners and the loss that a config asks for: what a run trains with, and what is planned or timed."""

from __future__ import annotations

import optax
from jax.sharding import Mesh

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.learner.critic import CriticLearner, critic_of
from calibadv_jax.learner.learner import Learner, on_policy_only
from calibadv_jax.learner.losses import PolicyLoss, policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule, total_updates
from calibadv_jax.policy.transformer import Policy


def schedule_of(config: Config, optimizer: OptimizerConfig) -> optax.Schedule:
    """The learning rate by update over the whole run: of the policy's optimizer or of the critic's."""
    trajectories = config.rollout.questions_per_step * config.rollout.group_size
    return make_schedule(optimizer, total_updates(config.learner, trajectories))


def policy_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> Learner:
    """The learner of the training steps.

    Raises:
        UserError: rows that do not divide over the mesh, or prefixes that the attention kernel cannot share.
    """
    settings = config.learner
    return Learner(
        policy,
        make_optimizer(settings.optimizer, schedule),
        mesh,
        settings.microbatch_rows,
        config.rollout.temperature or 1.0,
        config.policy.logprob_chunk,
        entropy_gradient=config.loss.entropy_coef != 0,
        row_length=settings.row_length,
        offload=settings.optimizer.offload == "host",
        shares_prefixes=settings.share_prefixes,
    )


def critic_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> CriticLearner:
    """The learner of the critic that belongs to a policy.

    Raises:
        UserError: as `policy_learner`.
    """
    settings, optimizer = config.learner, config.critic.optimizer
    return CriticLearner(
        critic_of(policy),
        make_optimizer(optimizer, schedule),
        mesh,
        settings.microbatch_rows,
        row_length=settings.row_length,
        offload=optimizer.offload == "host",
        shares_prefixes=settings.share_prefixes,
    )


def policy_loss(config: Config) -> PolicyLoss:
    """The loss of the training steps; simpler where every rollout gets one update."""
    settings = config.learner
    return policy_gradient(config.loss, on_policy_only(config.loss, settings.minibatch_size, settings.epochs))
