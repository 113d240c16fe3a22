"""A whole run: every section, and the rules between them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.credit import AdvantageConfig, RewardConfig
from calibadv_jax.config.sections.data import DataConfig, PromptConfig, WorldConfig
from calibadv_jax.config.sections.learner import CriticConfig, LearnerConfig, LossConfig, SftConfig
from calibadv_jax.config.sections.policy import DistributedConfig, MeshConfig, PolicyConfig
from calibadv_jax.config.sections.retriever import RetrieverConfig
from calibadv_jax.config.sections.rollout import (
    OF_RETRIEVER,
    RolloutConfig,
    SamplerConfig,
    ToolConfig,
    tool_of,
)
from calibadv_jax.config.sections.run import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    GuardsConfig,
    LogConfig,
    RunConfig,
)
from calibadv_jax.config.sections.section import SECTION, Mark, refuse_if


@dataclass(frozen=True, config=SECTION)
class Config:
    """A whole run. `python -m calibadv_jax.train --config FILE --dry-run` prints it resolved.

    Raises pydantic.ValidationError (a ValueError) for a value or a combination of values that cannot
    work; so do the sections, and `dataclasses.replace` of any of them.
    """

    run: Annotated[RunConfig, Mark.PER_RUN, Mark.PLACE] = Field(default_factory=RunConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    mesh: Annotated[MeshConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(default_factory=MeshConfig)
    distributed: Annotated[DistributedConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(
        default_factory=DistributedConfig
    )
    world: Annotated[WorldConfig, Mark.UNLEARNED, Mark.COLD_START] = Field(default_factory=WorldConfig)
    data: Annotated[DataConfig, Mark.PLACE] = Field(default_factory=DataConfig)
    prompt: Annotated[PromptConfig, Mark.COLD_START] = Field(default_factory=PromptConfig)
    rollout: Annotated[RolloutConfig, Mark.TUNED] = Field(default_factory=RolloutConfig)
    sampler: Annotated[SamplerConfig, Mark.UNLEARNED, Mark.TUNED] = Field(default_factory=SamplerConfig)
    tools: Annotated[list[ToolConfig], Mark.COLD_START] = Field(
        default_factory=lambda: [ToolConfig("search")]
    )
    """Actions of the policy before it answers (docs/tools.md); a name alone is an entry: [search, access]."""
    retriever: Annotated[RetrieverConfig, Mark.UNLEARNED, Mark.TUNED] = Field(default_factory=RetrieverConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: Annotated[LossConfig, Mark.TUNED] = Field(default_factory=LossConfig)
    learner: Annotated[LearnerConfig, Mark.TUNED] = Field(default_factory=LearnerConfig)
    critic: Annotated[CriticConfig, Mark.TUNED] = Field(default_factory=CriticConfig)
    guards: Annotated[GuardsConfig, Mark.UNLEARNED] = Field(default_factory=GuardsConfig)
    sft: Annotated[SftConfig, Mark.UNLEARNED, Mark.COLD_START] = Field(default_factory=SftConfig)
    checkpoint: Annotated[CheckpointConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(
        default_factory=CheckpointConfig
    )
    evaluate: Annotated[EvaluateConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(default_factory=EvaluateConfig)
    export: Annotated[ExportConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(default_factory=ExportConfig)
    log: Annotated[LogConfig, Mark.UNLEARNED, Mark.PER_RUN] = Field(default_factory=LogConfig)

    @property
    def asks_retriever(self) -> bool:
        """Whether an action needs the retrieval service."""
        return any(tool.name in OF_RETRIEVER for tool in self.tools)

    @property
    def has_retriever(self) -> bool:
        """Whether a retrieval service is named, or needed."""
        return bool(self.retriever.url or self.retriever.corpus or self.asks_retriever)

    @property
    def sft_row_length(self) -> int:
        """Tokens of a packed row of the cold start."""
        return self.sft.row_length or self.rollout.max_length

    @property
    def sampler_dtype(self) -> str:
        """Precision in which trajectories are sampled."""
        return self.sampler.dtype or self.policy.compute_dtype

    @property
    def keeps_initial_policy(self) -> bool:
        """Whether the parameters that the run begins with stay on the devices."""
        return self.loss.kl_coef > 0 or "initial" in self.advantage.probed

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_may_be_names(cls, value: Any) -> Any:
        return [tool_of(entry) for entry in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        names = [tool.name for tool in self.tools if tool.name]
        refuse_if(
            not self.tools or len(set(names)) < len(names),
            f"tools is {names}: name each action once, and at least one; to answer without any action set"
            " rollout.max_searches=0 and reward.format=false",
        )
        refuse_if(
            self.advantage.has_critic and self.critic.warmup_steps >= self.learner.steps,
            f"critic.warmup_steps is {self.critic.warmup_steps}, but the run has learner.steps ="
            f" {self.learner.steps}: the policy would never be trained; lower the first",
        )
        if self.guards.action == "rollback":
            self._check_rollback()
        refuse_if(
            self.learner.row_length < self.rollout.max_length,
            f"learner.row_length is {self.learner.row_length}, but a trajectory may have"
            f" rollout.max_length = {self.rollout.max_length} tokens: raise the first or lower the second",
        )
        self._check_sampler()
        return self

    def _check_rollback(self) -> None:
        every, keep, patience = self.checkpoint.every, self.checkpoint.keep, self.guards.patience
        refuse_if(
            not every, "guards.action is rollback, but checkpoint.every is 0: set it to a number of steps"
        )
        bad = -(-(patience - 1) // every)  # checkpoints of bad steps before the last of them trips the guard
        refuse_if(
            keep <= bad,
            f"guards.action is rollback, but of checkpoint.keep={keep} checkpoints, one every {every} steps,"
            f" none may be left from before the guards.patience={patience} bad steps: set"
            f" checkpoint.keep={bad + 1} or more",
        )

    def _check_sampler(self) -> None:
        sampler, rollout, loss = self.sampler, self.rollout, self.loss
        is_vllm, is_corrected = sampler.name == "vllm", loss.corrects_for_sampler
        staleness = f"rollout.max_staleness is {rollout.max_staleness}, but"
        refuse_if(
            rollout.max_staleness and not is_vllm,
            f"{staleness} sampler.name={sampler.name} samples on the learner's own devices: set it to 0, or"
            " sampler.name=vllm",
        )
        refuse_if(
            rollout.max_staleness and not is_corrected,
            f"{staleness} the loss does not correct for trajectories of older policies: set"
            " loss.importance_cap=2, or rollout.max_staleness=0",
        )
        refuse_if(
            sampler.dtype and not is_vllm,
            f"sampler.dtype is {sampler.dtype}, but sampler.name={sampler.name} samples in the learner's"
            " policy.compute_dtype: leave sampler.dtype out, or set sampler.name=vllm",
        )
        dtype = self.policy.compute_dtype
        refuse_if(
            sampler.dtype not in ("", dtype) and not is_corrected,
            f"sampler.dtype is {sampler.dtype} and policy.compute_dtype is {dtype}, but the loss does not"
            " correct for the difference: set loss.importance_cap=2, or leave sampler.dtype out",
        )
        refuse_if(
            (rollout.top_p < 1 or rollout.top_k > 0) and loss.compares_with_sampler and is_vllm,
            "vLLM reports log-probabilities after top_p and top_k, which the learner cannot recompute: set"
            " rollout.top_p=1 and rollout.top_k=0, or leave loss.importance_cap, importance_low and"
            " importance_high at 0 and set loss.old_logprobs=recompute",
        )
