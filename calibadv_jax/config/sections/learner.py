"""Loss, optimizer and the training steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark


@dataclass(frozen=True, config=SECTION)
class LossConfig:
    clip_low: NonNegativeFloat = 0.2
    """Lower bound of PPO's clip: below 1 - clip_low the probability ratio is cut."""
    clip_high: NonNegativeFloat = 0.2
    """Upper bound of PPO's clip: above 1 + clip_high the probability ratio is cut."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How the loss is averaged. token_mean: over the trained tokens of the mini-batch; sequence_mean: over
    the tokens of each trajectory, then over the trajectories."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term to the initial policy; 0: no reference policy is kept."""
    kl_estimator: Literal["low_var_kl", "kl", "abs", "mse"] = "low_var_kl"
    """Estimator of the KL divergence per token."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: off."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the probability ratio. recompute: log-probabilities that the learner computes before the
    first update; sampler: what the sampler reported."""
    importance_cap: NonNegativeFloat = 0.0
    """Largest weight of the truncated importance sampling between sampler and learner; 0: off."""


@dataclass(frozen=True, config=SECTION)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: orthogonalised momentum on matrices, AdamW on the rest."""
    lr: PositiveFloat = 5e-7
    """Peak learning rate."""
    adam_lr: NonNegativeFloat = 0.0
    """muon: peak learning rate of the parameters that are not layer matrices; 0: the same as lr."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer updates in which the learning rate rises linearly to lr."""
    decay_updates: NonNegativeInt = 0
    """Number of optimizer updates over which cosine and linear fall to 0, warm-up included; 0: all updates of
    the run. With a number here the run may end earlier, or be made longer later."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; with AdamW it acts on matrices and embeddings."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to Adam's denominator, and to muon's."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest global norm of a gradient; larger gradients are scaled down to it."""
    offload: Annotated[Literal["none", "host"], Mark.UNLEARNED] = "none"
    """Where the optimizer's moments lie. host: in host memory. A quarter of them, or the moments of the
    largest parameter, are on the devices at once while they are updated. On GPU and TPU that saves their
    memory and costs two copies of the moments an update; on the CPU it saves nothing."""


@dataclass(frozen=True, config=SECTION)
class LearnerConfig:
    steps: PositiveInt = 410
    """Number of training steps; one step is one batch of rollouts."""
    minibatch_size: NonNegativeInt = 0
    """Trajectories per optimizer update; 0: all trajectories of the step in one update."""
    epochs: PositiveInt = 1
    """Number of passes over the step's trajectories."""
    row_length: Annotated[PositiveInt, Mark.UNLEARNED] = 16384
    """Tokens of a packed row; at least rollout.max_length."""
    row_widths: Annotated[int, Mark.UNLEARNED] = Field(default=3, ge=1, le=5)
    """Number of widths that rows may have, each compiled when it is first used: row_length, then 1/2, 3/4,
    1/4 and 3/8 of it. Short trajectories in narrow rows cost less attention. 1: row_length only."""
    microbatch_rows: Annotated[PositiveInt, Mark.UNLEARNED] = 8
    """Packed rows of row_length per forward/backward pass; of narrower rows there are more, with as many
    tokens."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer of the training steps."""
