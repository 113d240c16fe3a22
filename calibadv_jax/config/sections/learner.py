"""Loss, optimizer, training steps, and the supervised cold start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section
from calibadv_jax.core.registry import LOSSES
from calibadv_jax.core.user_functions import is_address

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"]


@dataclass(frozen=True, config=SECTION)
class LossConfig(Section):
    """The loss of the policy, and its correction for the sampler."""

    name: str = "vanilla"
    """vanilla (PPO), cispo, gspo, gmpo, gpg, clip_cov, kl_cov, lld, balance, balance_detached, sapo, dppo_tv,
    dppo_kl or dro (docs/losses.md), or a function of your own as package.module:function."""
    # Without it in its hash, the section can still be a key of a cache.
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of your own function in `name`, by name."""
    clip_low: NonNegativeFloat = 0.2
    """PPO clip: lower bound 1 - clip_low of the importance ratio. gmpo: lower bound -clip_low of the ratio's
    logarithm. dppo_tv, dppo_kl: largest distance of probabilities for a token with a negative advantage."""
    clip_high: NonNegativeFloat = 0.2
    """PPO clip: upper bound 1 + clip_high of the importance ratio. gmpo: upper bound clip_high of the ratio's
    logarithm. dppo_tv, dppo_kl: largest distance of probabilities for a token with a positive advantage."""
    dual_clip: NonNegativeFloat = 0.0
    """vanilla, lld: largest ratio, above 1, of a token with a negative advantage; 0: no bound."""
    ratio_cap: PositiveFloat = 20.0
    """dppo_tv, dppo_kl: largest weight of a token by its ratio."""
    tau_positive: PositiveFloat = 1.0
    """sapo: decay of the weight with the distance from ratio 1, for a positive advantage."""
    tau_negative: PositiveFloat = 1.05
    """sapo: decay of the weight with the distance from ratio 1, for a negative advantage."""
    dro_beta: PositiveFloat = 0.1
    """dro: weight of half the squared logarithm of the ratio."""
    drop_above: NonNegativeFloat = 0.0
    """cispo: no gradient of tokens with a positive advantage and a ratio above this; 0: off."""
    lld_coef: NonNegativeFloat = 0.1
    """lld: weight of the penalty on tokens with a positive advantage that have become less likely."""
    lld_gating: bool = False
    """lld: no gradient of the penalty for trajectories without such a token."""
    balance_ratio: NonNegativeFloat = 1.0
    """balance: terms of the tokens with a negative advantage, as a multiple of the positive ones."""
    cov_share: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov, kl_cov: share of a mini-batch's trained tokens that are chosen, at least one token."""
    cov_low: float = 1.0
    """clip_cov: chosen tokens have a covariance above this."""
    cov_high: float = 5.0
    """clip_cov: chosen tokens have a covariance below this."""
    cov_kl_coef: NonNegativeFloat = 1.0
    """kl_cov: weight of the chosen tokens' distance |log ratio|."""
    aggregation: Aggregation = "token_mean"
    """token_mean: mean over the mini-batch's trained tokens; sequence_mean: over its trajectories, of their
    token means; sequence_sum: of their sums; sequence_sum_norm (Dr. GRPO): of sums divided by length_norm."""
    length_norm: NonNegativeInt = 0
    """sequence_sum_norm: divisor of each trajectory's sum, in tokens, such as rollout.max_length."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term to the initial policy; 0: no reference policy is kept."""
    kl_estimator: Literal["low_var_kl", "kl", "abs", "mse"] = "low_var_kl"
    """Estimator of the KL divergence per token."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0: off."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the importance ratio. recompute: the learner's, before its first update; or sampler."""
    importance_cap: NonNegativeFloat = 0.0
    """Largest weight of the truncated importance sampling between sampler and learner; 0: off."""
    importance_level: Literal["token", "sequence", "sequence_geometric"] = "token"
    """token: a weight for each token; sequence: for each trajectory, the product of its tokens' weights;
    sequence_geometric: their geometric mean."""
    reject_by: Literal["none", "k2", "k3"] = "none"
    """Distance of learner and sampler by which tokens or trajectories are masked; they count in the mean as
    0. With d = log(learner / sampler), k2: d² / 2; k3: exp(d) - 1 - d."""
    reject_over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """reject_by: compare a token's distance with reject_above, or a trajectory's sum, mean or largest."""
    reject_above: NonNegativeFloat = 0.0
    """reject_by: largest distance that is not masked."""
    importance_low: float = Field(default=0.0, ge=0, lt=1)
    """Mask tokens (or trajectories) with a weight below this; they count in the mean as 0. 0: none."""
    importance_high: NonNegativeFloat = 0.0
    """Mask tokens (or trajectories) with a weight above this, a number above 1; they count in the mean as 0.
    0: none."""

    @property
    def masks_by_mismatch(self) -> bool:
        """Whether tokens are masked where learner and sampler differ too much."""
        return self.importance_low > 0 or self.importance_high > 0 or self.reject_by != "none"

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the loss uses the sampler's own log-probabilities."""
        return self.importance_cap > 0 or self.masks_by_mismatch or self.old_logprobs == "sampler"

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether the loss weights samples that another policy than the learner's wrote."""
        # With old_logprobs=sampler the importance ratio is already that of learner to sampler. gpg has no
        # importance ratio.
        ratio_corrects = self.old_logprobs == "sampler" and self.name != "gpg"
        return self.importance_cap > 0 or ratio_corrects

    def _faults(self) -> Iterator[str]:
        if not is_address(self.name):
            yield from self._name_faults()
            if self.args:
                yield f"loss.args is set, but loss.name={self.name} is no function of your own: leave it out"
        if self.name in LOSSES and LOSSES[self.name].is_sequence_mean and self.aggregation != "sequence_mean":
            yield f"loss.name={self.name} is a mean over trajectories: set loss.aggregation=sequence_mean"
        for key in ("dual_clip", "importance_high"):
            bound = getattr(self, key)
            if 0 < bound <= 1:
                yield f"loss.{key} is {bound}: it must be above 1, or 0 for none"
        upper_clip = 1 + self.clip_high
        if 0 < self.drop_above < upper_clip:
            yield (
                f"drop_above is {self.drop_above}, below the clip at {upper_clip}: "
                "set it above, or 0 for none"
            )
        if self.cov_low >= self.cov_high:
            yield f"loss.cov_low is {self.cov_low}, but must be below loss.cov_high = {self.cov_high}"
        needs_length_norm = self.aggregation == "sequence_sum_norm"
        if needs_length_norm != bool(self.length_norm):
            yield (
                f"loss.aggregation is {self.aggregation}, and loss.length_norm is {self.length_norm}: "
                "set loss.length_norm, in tokens, with aggregation=sequence_sum_norm only"
            )
        yield from self._sampler_correction_faults()

    def _sampler_correction_faults(self) -> Iterator[str]:
        if self.masks_by_mismatch and self.old_logprobs == "sampler":
            yield (
                "importance_low, importance_high and reject_by compare with the sampler: "
                "set loss.old_logprobs=recompute, or leave them out"
            )
        has_weights = self.importance_cap or self.importance_low or self.importance_high
        if self.importance_level != "token" and not has_weights:
            yield (
                f"importance_level={self.importance_level} needs importance_cap, importance_low or "
                "importance_high, but none is set: set one"
            )
        has_distance = self.reject_by != "none"
        has_threshold = self.reject_above != 0
        if has_distance != has_threshold:
            yield "loss.reject_by and loss.reject_above: set both, or leave both out"
        if not has_distance and self.reject_over != "token":
            yield f"reject_over={self.reject_over} is for reject_by, which is none: set it, or neither"

    def _name_faults(self) -> Iterator[str]:
        """Refuse an unknown loss, and changed keys that only other losses read."""
        if self.name not in LOSSES:
            yield (
                f"loss.name is {self.name}: it must be one of {', '.join(LOSSES)}, "
                "or a function of your own as package.module:function"
            )
            return
        optional_keys = {key for entry in LOSSES.values() for key in entry.keys}
        unread_keys = optional_keys.difference(LOSSES[self.name].keys)
        pydantic_class: Any = LossConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            value = getattr(self, key)
            if key in unread_keys and value != section_field.default:
                yield f"loss.{key} is {value}, but loss.name={self.name} does not read it: leave it out"


@dataclass(frozen=True, config=SECTION)
class OptimizerConfig:
    """An optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: orthogonalised momentum on matrices, AdamW on the rest."""
    lr: PositiveFloat = 5e-7
    """Peak learning rate."""
    adam_lr: NonNegativeFloat = 0.0
    """muon: peak learning rate of the parameters that are not layer matrices; 0: lr."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_updates: NonNegativeInt = 0
    """Optimizer updates in which the learning rate rises linearly to lr."""
    decay_updates: NonNegativeInt = 0
    """Optimizer updates over which cosine and linear fall to 0, warm-up included; 0: all updates of the run.
    With a number, a run may end earlier or be made longer later."""
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
    """host: keep the optimizer's moments in host memory. An update then has a quarter of them, or those of
    the largest parameter, on the devices, and costs two copies. On the CPU it saves nothing."""


@dataclass(frozen=True, config=SECTION)
class LearnerConfig:
    """The updates of a training step."""

    steps: PositiveInt = 410
    """Training steps; one step is one batch of rollouts."""
    minibatch_size: NonNegativeInt = 0
    """Trajectories per optimizer update; 0: all trajectories of the step in one update."""
    shuffle: Literal["trajectories", "groups"] = "trajectories"
    """Order in which trajectories are divided into mini-batches. groups: a question's trajectories stay
    together, so that an update has few questions, most of them with all their trajectories; share_prefixes
    then computes far less."""
    epochs: PositiveInt = 1
    """Passes over the step's trajectories."""
    pack_length: Annotated[PositiveInt, Mark.UNLEARNED] = 16384
    """Tokens of a packed row; at least rollout.max_length."""
    row_widths: Annotated[int, Mark.UNLEARNED] = Field(default=3, ge=1, le=5)
    """Widths of rows, each compiled when it is first used: pack_length, then 1/2, 3/4, 1/4 and 3/8 of it.
    Short trajectories in narrow rows cost less attention. 1: pack_length only."""
    microbatch_rows: Annotated[PositiveInt, Mark.UNLEARNED] = 8
    """Packed rows of pack_length per forward/backward pass, or more narrower rows with as many tokens."""
    share_prefixes: Annotated[bool, Mark.UNLEARNED] = False
    """Compute the equal beginnings of a group's trajectories (the prompt, often a search with its documents)
    once, for the same loss. Only with policy.attention xla or cudnn."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer of the training steps."""


@dataclass(frozen=True, config=SECTION)
class CriticConfig:
    """PPO's value model; read if the estimator needs a critic."""

    clip: NonNegativeFloat = 0.5
    """Clip range of a value around its value before the step; it applies where it makes the error larger.
    0: no clip."""
    warmup_steps: NonNegativeInt = 0
    """First steps that train the critic only."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="constant"))
    """Optimizer of the critic."""


@dataclass(frozen=True, config=SECTION)
class SftPhase(Section):
    """A phase of the supervised cold start."""

    steps: PositiveInt | None = None
    """Optimizer updates; null: 100, or as many as `epochs` needs."""
    epochs: PositiveInt | None = None
    """Instead of steps: passes over the file's demonstrations, each in another order."""
    kind: Literal["imperfect", "lookups", "drills"] = "imperfect"
    """Demonstrations of the generator: imperfect: whole trajectories with flaws; lookups: careful one-hop and
    comparison questions; drills: words to copy and names to compare. No effect with a JSONL file."""
    loss_on: Literal["sampled", "all"] = "sampled"
    """Tokens with a loss. sampled: the policy's own; all: documents and prompt too."""

    def _faults(self) -> Iterator[str]:
        if self.steps and self.epochs:
            yield f"has steps={self.steps} and epochs={self.epochs}: leave one out"


@dataclass(frozen=True, config=SECTION)
class SftConfig:
    """The supervised cold start."""

    init_from: str = ""
    """Policy to start from: a HuggingFace folder or OWNER/NAME[@REVISION]; empty: random, as policy.init."""
    demonstrations: str = ""
    """JSONL file of demonstrations (docs/data.md), or the name of a generator: world."""
    first_query: Literal["best", "varied"] = "best"
    """First query of `calibadv demonstrate`. best: the query with the best hits, mostly the question; varied:
    drawn among the question and its titles that lead to all supporting passages, so that RL can choose."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the file's questions that are not trained on; their loss is sft/held_out_loss."""
    held_out_every: PositiveInt = 20
    """Updates between two measurements of sft/held_out_loss, which the last update always has."""
    phases: list[SftPhase] = Field(default_factory=list)
    """Phases of the cold start, in order."""
    pack_length: PositiveInt | None = None
    """Tokens of a packed row; null: rollout.max_length."""
    rows: PositiveInt = 16
    """Packed rows per update, which are computed together: fewer or shorter rows need less memory."""
    checkpoint_every: NonNegativeInt = 50
    """Updates between two saved states of a cold start, which continues from them; slow updates are saved
    after ten minutes. 0: only when a signal or an error ends it."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the cold start."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/sft"
    """HuggingFace folder of the trained policy."""
