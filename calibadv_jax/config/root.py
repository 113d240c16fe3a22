"""A whole run: every section, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.credit import AdvantageConfig, RewardConfig
from calibadv_jax.config.sections.data import DataConfig, PromptConfig, WorldConfig
from calibadv_jax.config.sections.learner import CriticConfig, LearnerConfig, LossConfig, SftConfig
from calibadv_jax.config.sections.policy import DistributedConfig, MeshConfig, PolicyConfig
from calibadv_jax.config.sections.retriever import RetrieverConfig
from calibadv_jax.config.sections.rollout import OF_RETRIEVER, RolloutConfig, SamplerConfig, ToolConfig
from calibadv_jax.config.sections.run import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    GuardsConfig,
    LogConfig,
    RunConfig,
)
from calibadv_jax.config.sections.section import SECTION, Mark, Section


@dataclass(frozen=True, config=SECTION)
class Config(Section):
    """A whole run. `python -m calibadv_jax.train --config FILE --dry-run` prints it resolved.

    Raises pydantic.ValidationError (a ValueError) for a value or a combination of values that cannot
    work; so do the sections, and `dataclasses.replace` of any of them.
    """

    run: Annotated[RunConfig, Mark.PER_RUN, Mark.PLACE] = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    mesh: Annotated[MeshConfig, Mark.UNLEARNED, Mark.PER_RUN] = MeshConfig()
    distributed: Annotated[DistributedConfig, Mark.UNLEARNED, Mark.PER_RUN] = DistributedConfig()
    world: Annotated[WorldConfig, Mark.UNLEARNED, Mark.COLD_START] = WorldConfig()
    data: Annotated[DataConfig, Mark.PLACE] = DataConfig()
    prompt: Annotated[PromptConfig, Mark.COLD_START] = PromptConfig()
    rollout: Annotated[RolloutConfig, Mark.TUNED] = RolloutConfig()
    sampler: Annotated[SamplerConfig, Mark.UNLEARNED, Mark.TUNED] = SamplerConfig()
    tools: Annotated[list[ToolConfig], Mark.COLD_START] = field(
        default_factory=lambda: [ToolConfig("search")]
    )
    """Actions of the policy before it answers (docs/tools.md); a name alone is an entry: [search, access]."""
    retriever: Annotated[RetrieverConfig, Mark.UNLEARNED, Mark.TUNED] = RetrieverConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: Annotated[LossConfig, Mark.TUNED] = LossConfig()
    learner: Annotated[LearnerConfig, Mark.TUNED] = LearnerConfig()
    critic: Annotated[CriticConfig, Mark.TUNED] = CriticConfig()
    guards: Annotated[GuardsConfig, Mark.UNLEARNED] = GuardsConfig()
    sft: Annotated[SftConfig, Mark.UNLEARNED, Mark.COLD_START] = SftConfig()
    checkpoint: Annotated[CheckpointConfig, Mark.UNLEARNED, Mark.PER_RUN] = CheckpointConfig()
    evaluate: Annotated[EvaluateConfig, Mark.UNLEARNED, Mark.PER_RUN] = EvaluateConfig()
    export: Annotated[ExportConfig, Mark.UNLEARNED, Mark.PER_RUN] = ExportConfig()
    log: Annotated[LogConfig, Mark.UNLEARNED, Mark.PER_RUN] = LogConfig()

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
        return self.sft.pack_length or self.rollout.max_length

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
        if not isinstance(value, list):
            return value
        return [{"name": entry} if isinstance(entry, str) else entry for entry in value]

    def _faults(self) -> Iterator[str]:
        names = [tool.name for tool in self.tools if tool.name]
        if not self.tools or len(set(names)) < len(names):
            way_out = "name each action once, and at least one (for none: rollout.max_searches=0)"
            yield f"tools is {names}: {way_out}"
        warmup, steps = self.critic.warmup_steps, self.learner.steps
        if self.advantage.has_critic and warmup >= steps:
            yield f"critic.warmup_steps is {warmup}, but must be below learner.steps ({steps}): lower it"
        if (width := self.learner.pack_length) < (longest := self.rollout.max_length):
            fault = f"learner.pack_length is {width}, but rollout.max_length = {longest}"
            yield f"{fault}: raise the first or lower the second"
        rolls_back = self.guards.action == "rollback"
        every, keep = self.checkpoint.every, self.checkpoint.keep
        if rolls_back and not every:
            yield "guards.action is rollback, but checkpoint.every is 0: set it to a number of steps"
        # Checkpoints of bad steps before the last of them trips the guard.
        bad = -(-(self.guards.patience_steps - 1) // (every or 1))
        if rolls_back and keep <= bad:
            way_out = f"set checkpoint.keep={bad + 1} or more"
            yield f"guards.action is rollback, but all {keep} checkpoints may be of bad steps: {way_out}"
        yield from self._sampler_faults()

    def _sampler_faults(self) -> Iterator[str]:
        sampler, rollout, loss = self.sampler, self.rollout, self.loss
        is_vllm, is_corrected = sampler.name == "vllm", loss.corrects_for_sampler
        staleness = f"rollout.max_staleness is {rollout.max_staleness}, but"
        dtype = f"sampler.dtype is {sampler.dtype}, but"
        if rollout.max_staleness and not is_vllm:
            yield f"{staleness} sampler.name={sampler.name} samples on the learner's own devices: set it to 0"
        if rollout.max_staleness and not is_corrected:
            way_out = "set loss.importance_cap=2, or rollout.max_staleness=0"
            yield f"{staleness} the loss does not correct for trajectories of older policies: {way_out}"
        if sampler.dtype and not is_vllm:
            way_out = "leave sampler.dtype out, or set sampler.name=vllm"
            yield f"{dtype} sampler.name={sampler.name} samples in policy.compute_dtype: {way_out}"
        if sampler.dtype not in ("", self.policy.compute_dtype) and not is_corrected:
            way_out = "set loss.importance_cap=2, or leave sampler.dtype out"
            yield f"{dtype} the loss does not correct for another policy.compute_dtype: {way_out}"
        if (rollout.top_p < 1 or rollout.top_k > 0) and loss.compares_with_sampler and is_vllm:
            way_out = "set top_p=1 and top_k=0, or loss.importance_* to 0 and loss.old_logprobs=recompute"
            yield f"vLLM reports log-probabilities after top_p and top_k, unlike the learner: {way_out}"
