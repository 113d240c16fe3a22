"""Losses of the policy: a sum of `Batch.weights` times a term of each token. `registry` names them."""

from calibadv_jax.learner.losses.objective import (
    KL_ESTIMATORS,
    TOKEN_METRICS,
    LossFunction,
    Metrics,
    PolicyLoss,
    negative_log_likelihood,
    policy_gradient,
)
from calibadv_jax.learner.losses.registry import LOSSES, Loss, check_loss, find_loss
from calibadv_jax.learner.losses.tokens import Tokens, segment_means, segment_sums

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "TOKEN_METRICS",
    "Loss",
    "LossFunction",
    "Metrics",
    "PolicyLoss",
    "Tokens",
    "check_loss",
    "find_loss",
    "negative_log_likelihood",
    "policy_gradient",
    "segment_means",
    "segment_sums",
]
