"""Loss, optimizer and the training steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark
from calibadv_jax.core.own_function import is_address

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"]

_CLIP = ("clip_low", "clip_high")
# The losses, each with the keys that it reads among those that not all read. An own loss may read any.
# Their formulas are `learner.losses.LOSSES`.
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "vanilla": (*_CLIP, "dual_clip"),
    "cispo": (*_CLIP, "drop_above"),
    "gspo": _CLIP,
    "gmpo": _CLIP,
    "gpg": (),
    "clip_cov": (*_CLIP, "cov_share", "cov_low", "cov_high"),
    "kl_cov": ("cov_share", "cov_kl_coef"),
    "lld": (*_CLIP, "dual_clip", "lld_coef", "lld_gating"),
    "balance": (*_CLIP, "balance_ratio"),
    "balance_detached": (*_CLIP, "balance_ratio"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo_tv": (*_CLIP, "ratio_cap"),
    "dppo_kl": (*_CLIP, "ratio_cap"),
    "dro": ("dro_beta",),
}
BY_SEQUENCE = ("gspo", "gmpo", "sapo")


@dataclass(frozen=True, config=SECTION)
class LossConfig:
    name: str = "vanilla"
    """Loss of the policy: vanilla (PPO), cispo, gspo, gmpo, gpg, clip_cov, kl_cov, lld, balance,
    balance_detached, sapo, dppo_tv, dppo_kl or dro (docs/losses.md), or a function of your own as
    package.module:function."""
    clip_low: NonNegativeFloat = 0.2
    """PPO clip: lower bound 1 - clip_low of the probability ratio. gmpo: of its logarithm, -clip_low.
    dppo_tv, dppo_kl: how far a blamed token may have moved, as a distance of probabilities."""
    clip_high: NonNegativeFloat = 0.2
    """PPO clip: upper bound 1 + clip_high. gmpo: of the logarithm, clip_high. dppo_tv, dppo_kl: how far a
    praised token may have moved."""
    dual_clip: NonNegativeFloat = 0.0
    """vanilla and lld: the term of a token with a negative advantage grows up to this ratio, which is above
    1; 0: no such end."""
    ratio_cap: PositiveFloat = 20.0
    """dppo_tv, dppo_kl: largest weight of a token by its ratio."""
    tau_positive: PositiveFloat = 1.0
    """sapo: how steeply the weight of a praised token falls with its distance from ratio 1."""
    tau_negative: PositiveFloat = 1.05
    """sapo: the same of a blamed token."""
    dro_beta: PositiveFloat = 0.1
    """dro: weight of half the squared logarithm of the ratio."""
    drop_above: NonNegativeFloat = 0.0
    """cispo: tokens with a positive advantage and a ratio above this get no gradient (the authors: 101);
    0: none."""
    lld_coef: NonNegativeFloat = 0.1
    """lld: weight of the penalty on praised tokens that have become less likely."""
    lld_gating: bool = False
    """lld: trajectories in which no praised token has become less likely get no gradient of the penalty."""
    balance_ratio: NonNegativeFloat = 1.0
    """balance: the blamed tokens' terms become this many times those of the praised ones."""
    cov_share: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov and kl_cov: share of a mini-batch's trained tokens that are chosen, at least one token."""
    cov_low: float = 1.0
    """clip_cov: chosen tokens have a covariance above this."""
    cov_high: float = 5.0
    """clip_cov: and below this."""
    cov_kl_coef: NonNegativeFloat = 1.0
    """kl_cov: weight of the chosen tokens' distance |log ratio|."""
    aggregation: Aggregation = "token_mean"
    """Mean over the trained tokens of the mini-batch; sequence_mean: over its trajectories, of each one's
    token mean; sequence_sum: over its trajectories, of each one's sum; sequence_sum_norm: the same, divided
    by length_norm (Dr. GRPO)."""
    length_norm: NonNegativeInt = 0
    """sequence_sum_norm: tokens by which each trajectory's sum is divided, such as rollout.max_length."""
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
    importance_level: Literal["token", "sequence", "sequence_geometric"] = "token"
    """What gets a weight of its own. token: each token; sequence: each trajectory, the product of its tokens'
    weights; sequence_geometric: each trajectory, the geometric mean of them."""
    reject_by: Literal["none", "k2", "k3"] = "none"
    """Measure of how far apart learner and sampler are, by which tokens or trajectories are masked, and count
    in the mean as 0. d = log of learner / sampler; k2: d² / 2; k3: exp(d) - 1 - d."""
    reject_over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """reject_by: whose measure is compared with reject_above: a token's, or the sum, mean or largest of a
    trajectory's tokens."""
    reject_above: NonNegativeFloat = 0.0
    """reject_by: largest measure that stays."""
    importance_low: float = Field(default=0.0, ge=0, lt=1)
    """Tokens (or trajectories) with a weight below this are masked, and count in the mean as 0; 0: none."""
    importance_high: NonNegativeFloat = 0.0
    """The same for weights above this, which is above 1; 0: none."""

    @property
    def masks_by_mismatch(self) -> bool:
        return self.importance_low > 0 or self.importance_high > 0 or self.reject_by != "none"

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the sampler's own log-probabilities enter the loss."""
        return self.importance_cap > 0 or self.masks_by_mismatch or self.old_logprobs == "sampler"

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether samples of another policy than the learner's are weighted for it."""
        # With old_logprobs=sampler the ratio is already that of learner to sampler; gpg has no ratio.
        return self.importance_cap > 0 or (self.old_logprobs == "sampler" and self.name != "gpg")

    @model_validator(mode="after")
    def _name_is_known(self) -> LossConfig:
        if self.name not in LOSS_KEYS and not is_address(self.name):
            raise ValueError(
                f"loss.name is {self.name}: it must be one of {', '.join(LOSS_KEYS)}, or a function of your"
                " own as package.module:function"
            )
        return self

    @model_validator(mode="after")
    def _loss_reads_what_is_set(self) -> LossConfig:
        if is_address(self.name):
            return self
        specific = {key for keys in LOSS_KEYS.values() for key in keys} - set(LOSS_KEYS[self.name])
        for key, default in _defaults(LossConfig).items():
            value = getattr(self, key)
            if key in specific and value != default:
                raise ValueError(
                    f"loss.{key} is {value}, but loss.name={self.name} does not read it: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _values_fit_together(self) -> LossConfig:
        if self.name in BY_SEQUENCE and self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss.name={self.name} is a mean over trajectories, but loss.aggregation is"
                f" {self.aggregation}: set loss.aggregation=sequence_mean"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"loss.dual_clip is {self.dual_clip}: it must be above 1, or 0 for none")
        if 0 < self.drop_above < 1 + self.clip_high:
            raise ValueError(
                f"loss.drop_above is {self.drop_above}, below the clip at {1 + self.clip_high}: set it above,"
                " or 0 for none"
            )
        if self.cov_low >= self.cov_high:
            raise ValueError(
                f"loss.cov_low is {self.cov_low}, but must be below loss.cov_high = {self.cov_high}"
            )
        is_normed = self.aggregation == "sequence_sum_norm"
        if is_normed and not self.length_norm:
            raise ValueError(
                "loss.aggregation=sequence_sum_norm divides by loss.length_norm, which is 0: set it to the"
                " longest response, in tokens"
            )
        if self.length_norm and not is_normed:
            raise ValueError(
                f"loss.length_norm is {self.length_norm}, but loss.aggregation={self.aggregation} does not"
                " read it: leave it out, or set loss.aggregation=sequence_sum_norm"
            )
        return self

    @model_validator(mode="after")
    def _correction_acts(self) -> LossConfig:
        if 0 < self.importance_high <= 1:
            raise ValueError(
                f"loss.importance_high is {self.importance_high}: it must be above 1, or 0 for none"
            )
        if self.masks_by_mismatch and self.old_logprobs == "sampler":
            raise ValueError(
                "loss.importance_low, importance_high and reject_by compare the sampler with"
                " loss.old_logprobs, which are the sampler's own: set loss.old_logprobs=recompute, or leave"
                " them out"
            )
        weighs = self.importance_cap > 0 or self.importance_low > 0 or self.importance_high > 0
        if self.importance_level != "token" and not weighs:
            raise ValueError(
                f"loss.importance_level={self.importance_level} says how loss.importance_cap, importance_low"
                " and importance_high weigh, but none is set: set one, or leave it out"
            )
        if (self.reject_by == "none") != (self.reject_above == 0):
            raise ValueError(
                f"loss.reject_by is {self.reject_by}, and loss.reject_above is {self.reject_above:g}: set"
                " both, or leave both out"
            )
        if self.reject_by == "none" and self.reject_over != "token":
            raise ValueError(
                f"loss.reject_over={self.reject_over} says what loss.reject_by measures, which is none: set"
                " it, or leave reject_over out"
            )
        return self


def _defaults(section: Any) -> dict[str, Any]:
    return {key: field.default for key, field in section.__pydantic_fields__.items()}


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
    shuffle: Literal["trajectories", "groups"] = "trajectories"
    """What is shuffled before mini-batches are cut. groups: those of a question stay next to each other, so
    that an update has few questions, most of them whole; with share_prefixes it computes far less."""
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
    share_prefixes: Annotated[bool, Mark.UNLEARNED] = False
    """Whether what trajectories of a group begin with (the prompt, often also a search and its documents) is
    computed once in the updates. The loss stays the same. Only with policy.attention xla or cudnn."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer of the training steps."""


@dataclass(frozen=True, config=SECTION)
class CriticConfig:
    clip: NonNegativeFloat = 0.5
    """A value counts with what it was before the step plus or minus this, where its error is then larger;
    0: no such clip."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps that train the critic only. The policy stays as it is until then."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="constant"))
    """Optimizer of the critic."""
