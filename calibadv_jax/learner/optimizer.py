"""Optimizers and learning-rate schedules, all optax."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from calibadv_jax.config import LearnerConfig, OptimizerConfig
from calibadv_jax.policy.adapters import LORA_A, LORA_B
from calibadv_jax.policy.sharding import constrain

STACKED_MATRICES = ("kernel", LORA_A, LORA_B)  # last names of the layers' matrices


def total_updates(learner: LearnerConfig, trajectories: int) -> int:
    """Optimizer updates of a run.

    Args:
        trajectories: of a step.
    """
    return learner.steps * learner.epochs * -(-trajectories // (learner.minibatch_size or trajectories))


def make_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by optimizer update: linear warm-up, then constant, cosine or linear to 0."""
    decay = max(1, (config.decay_updates or total_updates) - config.warmup_steps)
    main = {
        "constant": lambda: optax.constant_schedule(config.lr),
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, decay),
        "linear": lambda: optax.linear_schedule(config.lr, 0.0, decay),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return main
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    return optax.join_schedules([warmup, main], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clips the global gradient norm, then AdamW or Muon.

    Muon orthogonalises the stacked layer matrices, each device those of some layers; embeddings, head, norms
    and biases get AdamW.
    """
    if config.name == "muon":
        ratio = config.adam_lr / config.lr if config.adam_lr else 1.0
        orthogonalise = muon(
            schedule,
            beta=config.beta1,
            eps=config.eps,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_learning_rate=lambda count: ratio * schedule(count),
            weight_decay=config.weight_decay,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_muon_dimensions,
        )
        rule = optax.GradientTransformation(
            orthogonalise.init,
            lambda updates, *more: orthogonalise.update(_by_layers(updates), *more),
        )
    else:
        rule = optax.adamw(
            schedule,
            config.beta1,
            config.beta2,
            config.eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def _is_matrix(path: Any) -> bool:
    return path[0].key == "layers" and path[-1].key in STACKED_MATRICES


def _by_layers(gradients: Any) -> Any:
    """Stacked matrices are split by layers over the devices, which would all compute the same otherwise."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: constrain(leaf, "stack") if _is_matrix(path) else leaf, gradients
    )


def _muon_dimensions(params: Any) -> Any:
    """Stacked matrices [L, in, out] are L independent matrices; everything else is None (AdamW)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: MuonDimensionNumbers(1, 2) if _is_matrix(path) else None, params
    )


def _decayed(params: Any) -> Any:
    """Weight decay acts on matrices only."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in (*STACKED_MATRICES, "embedding"), params
    )
