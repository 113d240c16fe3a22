"""The config of a whole run: all sections, and the rules between keys of different sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.credit import AdvantageConfig, RewardConfig
from calibadv_jax.config.sections.data import (
    DEFAULT_TEMPLATE,
    FROM_DATA,
    DataConfig,
    PromptConfig,
    WorldConfig,
)
from calibadv_jax.config.sections.learner import CriticConfig, LearnerConfig, LossConfig, SftConfig
from calibadv_jax.config.sections.policy import DistributedConfig, MeshConfig, PolicyConfig
from calibadv_jax.config.sections.retriever import RetrieverConfig
from calibadv_jax.config.sections.rollout import (
    RETRIEVER_ACTIONS,
    TAGS,
    ContinuationsConfig,
    DemonstrationsConfig,
    RolloutConfig,
    SamplerConfig,
    ToolCallsConfig,
    ToolConfig,
)
from calibadv_jax.config.sections.run import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    GuardsConfig,
    LogConfig,
    RunConfig,
)
from calibadv_jax.config.sections.section import SECTION, Mark, Section
from calibadv_jax.config.sections.teacher import INITIAL, TeacherConfig
from calibadv_jax.core.registry import LOSSES


@dataclass(frozen=True, config=SECTION)
class Config(Section):
    """The config of a whole run; `calibadv train --config FILE --dry-run` prints it resolved.

    `Config()` holds the defaults; `dataclasses.replace` returns a changed copy. docs/configuration.md
    describes every key.

    Raises:
        pydantic.ValidationError: A value, or a combination of values, cannot work. It is a ValueError.
            The sections, and `dataclasses.replace` of any of them, raise it too.
    """

    run: Annotated[RunConfig, Mark.PER_RUN, Mark.PLACE] = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    mesh: Annotated[MeshConfig, Mark.UNLEARNED, Mark.PER_RUN] = MeshConfig()
    distributed: Annotated[DistributedConfig, Mark.UNLEARNED, Mark.PER_RUN] = DistributedConfig()
    world: Annotated[WorldConfig, Mark.UNLEARNED, Mark.COLD_START] = WorldConfig()
    data: Annotated[DataConfig, Mark.PLACE] = DataConfig()
    prompt: Annotated[PromptConfig, Mark.COLD_START] = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampler: Annotated[SamplerConfig, Mark.UNLEARNED] = SamplerConfig()
    tools: Annotated[list[ToolConfig], Mark.COLD_START] = field(
        default_factory=lambda: [ToolConfig("search")]
    )
    """Actions that the policy may take before it answers (docs/tools.md). An entry may be a name alone, as in
    [search, access]."""
    tool_calls: Annotated[ToolCallsConfig, Mark.COLD_START] = ToolCallsConfig()
    retriever: Annotated[RetrieverConfig, Mark.UNLEARNED] = RetrieverConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    continuations: ContinuationsConfig = ContinuationsConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    teacher: TeacherConfig = TeacherConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    guards: Annotated[GuardsConfig, Mark.UNLEARNED] = GuardsConfig()
    sft: Annotated[SftConfig, Mark.UNLEARNED, Mark.COLD_START] = SftConfig()
    checkpoint: Annotated[CheckpointConfig, Mark.UNLEARNED, Mark.PER_RUN] = CheckpointConfig()
    evaluate: Annotated[EvaluateConfig, Mark.UNLEARNED, Mark.PER_RUN] = EvaluateConfig()
    export: Annotated[ExportConfig, Mark.UNLEARNED, Mark.PER_RUN] = ExportConfig()
    log: Annotated[LogConfig, Mark.UNLEARNED, Mark.PER_RUN] = LogConfig()

    @property
    def asks_retriever(self) -> bool:
        """Whether an action needs the retrieval service."""
        return any(tool.name in RETRIEVER_ACTIONS for tool in self.tools)

    @property
    def has_retriever(self) -> bool:
        """Whether the config names a retrieval service, or an action needs it."""
        return bool(self.retriever.url or self.retriever.corpus or self.asks_retriever)

    @property
    def sft_row_length(self) -> int:
        """Tokens of a packed row of the cold start."""
        return self.sft.pack_length or self.rollout.max_length

    @property
    def sampler_dtype(self) -> str:
        """Precision in which trajectories are sampled: "bfloat16" or "float32"."""
        return self.sampler.dtype or self.policy.compute_dtype

    @property
    def keeps_initial_policy(self) -> bool:
        """Whether the parameters at the run's start stay on the devices, as a reference policy."""
        is_teacher = self.teacher.policy == INITIAL
        return self.loss.kl_coef > 0 or is_teacher or INITIAL in self.advantage.probed

    @property
    def answer_from(self) -> str:
        """Where the answer stands: "tag", "whole" or "box"."""
        if self.reward.answer_from != "auto":
            return self.reward.answer_from
        return "tag" if self.rollout.protocol == TAGS else "whole"

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_may_be_names(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"name": entry} if isinstance(entry, str) else entry for entry in value]

    def _faults(self) -> Iterator[str]:
        yield from self._tool_faults()
        yield from self._protocol_faults()
        yield from self._length_faults()
        yield from self._rollback_faults()
        yield from self._staleness_faults()
        yield from self._sampler_faults()
        yield from self._teacher_faults()
        yield from self._group_faults()

    def _tool_faults(self) -> Iterator[str]:
        names = [tool.name for tool in self.tools if tool.name]
        has_repeated_name = len(set(names)) < len(names)
        if not self.tools or has_repeated_name:
            yield (
                f"tools is {names}: name each action once, and at least one "
                "(for none: rollout.max_searches=0)"
            )

    def _protocol_faults(self) -> Iterator[str]:
        answer_from = self.reward.answer_from
        if self.rollout.protocol == TAGS:
            if answer_from not in ("auto", "tag"):
                yield (
                    f"reward.answer_from is {answer_from}, but with rollout.protocol=tags the answer stands "
                    "inside <answer>: set it to tag"
                )
            return
        prompt = self.prompt
        if prompt.template not in (DEFAULT_TEMPLATE, FROM_DATA):
            yield (
                f"prompt.template is {prompt.template!r}, which explains the tags; with "
                "rollout.protocol=tool_calls set prompt.system and prompt.user, or prompt.template=from_data"
            )
        if prompt.prepend_think:
            yield (
                "prompt.prepend_think is on, but with rollout.protocol=tool_calls the chat template begins "
                "the turns: switch it off"
            )
        if prompt.chat == "off":
            yield (
                "prompt.chat is off, but rollout.protocol=tool_calls needs the chat template: set it to auto"
            )

    def _length_faults(self) -> Iterator[str]:
        steps = self.learner.steps
        warmup_steps = self.critic.warmup_steps
        if self.advantage.has_critic and warmup_steps >= steps:
            yield (
                f"critic.warmup_steps is {warmup_steps}, but must be below learner.steps ({steps}): lower it"
            )
        pack_length = self.learner.pack_length
        max_length = self.rollout.max_length
        if pack_length < max_length:
            yield (
                f"learner.pack_length is {pack_length}, but rollout.max_length = {max_length}: "
                "raise the first or lower the second"
            )

    def _rollback_faults(self) -> Iterator[str]:
        if self.guards.action != "rollback":
            return
        every = self.checkpoint.every
        keep = self.checkpoint.keep
        if not every:
            yield "guards.action is rollback, but checkpoint.every is 0: set it to a number of steps"
            return
        # Checkpoints written during the bad steps before the step at which the guard trips, rounded up.
        bad_steps = self.guards.patience_steps - 1
        bad_checkpoints = (bad_steps + every - 1) // every
        if keep <= bad_checkpoints:
            yield (
                f"guards.action is rollback, but all {keep} checkpoints may be of bad steps: "
                f"set checkpoint.keep={bad_checkpoints + 1} or more"
            )

    def _staleness_faults(self) -> Iterator[str]:
        staleness = self.rollout.max_staleness
        if not staleness:
            return
        if self.sampler.name != "vllm":
            yield (
                f"rollout.max_staleness is {staleness}, but sampler.name={self.sampler.name} samples on the "
                "learner's own devices: set it to 0"
            )
        if not self.loss.corrects_for_sampler:
            yield (
                f"rollout.max_staleness is {staleness}, but the loss does not correct for trajectories of "
                "older policies: set loss.importance_cap=2, or rollout.max_staleness=0"
            )

    def _sampler_faults(self) -> Iterator[str]:
        is_vllm = self.sampler.name == "vllm"
        dtype = self.sampler.dtype
        if dtype and not is_vllm:
            yield (
                f"sampler.dtype is {dtype}, but sampler.name={self.sampler.name} samples in "
                "policy.compute_dtype: leave sampler.dtype out, or set sampler.name=vllm"
            )
        differs_from_learner = dtype not in ("", self.policy.compute_dtype)
        if differs_from_learner and not self.loss.corrects_for_sampler:
            yield (
                f"sampler.dtype is {dtype}, but the loss does not correct for another policy.compute_dtype: "
                "set loss.importance_cap=2, or leave sampler.dtype out"
            )
        truncates_distribution = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncates_distribution and self.loss.compares_with_sampler and is_vllm:
            yield (
                "vLLM reports log-probabilities after top_p and top_k, unlike the learner: set top_p=1 and "
                "top_k=0, or loss.importance_* to 0 and loss.old_logprobs=recompute"
            )

    def _teacher_faults(self) -> Iterator[str]:
        teacher = self.teacher
        if not teacher.is_on:
            return
        entry = LOSSES.get(self.loss.name)
        if teacher.acts_on == "advantage" and entry is not None and entry.batch_factor:
            yield (
                f"teacher.acts_on is advantage, but loss.name={self.loss.name} weighs the advantages of the "
                "mini-batch before the teacher's part is known: set teacher.acts_on=loss"
            )
        if teacher.needs_titles and not self.retriever.corpus:
            yield (
                "teacher.hint names {titles}, but retriever.corpus, which holds them, is empty: set it to "
                "the file of the corpus, or leave {titles} out"
            )
        if teacher.url and self.rollout.temperature not in (0.0, 1.0):
            yield (
                f"rollout.temperature is {self.rollout.temperature:g}, but the server at teacher.url returns "
                "log-probabilities at temperature 1: set it to 1, or let teacher.policy name the teacher"
            )

    def _group_faults(self) -> Iterator[str]:
        """Refuse groups in which nothing is sampled, and a critic of tokens that were not sampled."""
        parts = {}
        if self.demonstrations.is_on:
            parts["demonstrations"] = self.demonstrations.per_group
        if self.continuations.is_on:
            parts["continuations"] = self.continuations.per_group
        group_size = self.rollout.group_size
        if sum(parts.values()) >= group_size:
            named = " and ".join(f"{name}.per_group = {count}" for name, count in parts.items())
            yield (
                f"rollout.group_size is {group_size}, but {named}: raise the first or lower the others, so "
                "that a trajectory is sampled from the prompt"
            )
        for name in parts:
            if self.advantage.has_critic:
                yield (
                    f"{name} are on, but advantage.name=gae estimates advantages along trajectories that the "
                    f"policy samples from the prompt: choose another estimator, or leave {name} out"
                )
