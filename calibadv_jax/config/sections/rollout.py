"""Trajectories and what else groups hold, the sampler, and the actions of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section, credential_faults, normal_url
from calibadv_jax.core.user_functions import is_address

# Actions that the retrieval service answers.
RETRIEVER_ACTIONS = ("search", "access")
USER_TOOL = "my_package.my_module:Tool"
USER_FORMAT = "my_package.my_module:Format"
# Protocols of the turns: this project's tags, or the tool calls of the tokenizer's chat template.
TAGS: Final = "tags"
TOOL_CALLS: Final = "tool_calls"
# Formats of tool calls that `protocols.formats` reads and writes.
FORMATS = ("hermes", "qwen_xml", "llama_json", "mistral", "gpt_oss", "schema")


@dataclass(frozen=True, config=SECTION)
class RolloutConfig(Section):
    """The trajectories of a training step."""

    questions_per_step: Annotated[PositiveInt, Mark.NO_ANSWER] = 512
    """Questions per training step."""
    group_size: Annotated[PositiveInt, Mark.NO_ANSWER] = 5
    """Trajectories per question."""
    max_searches: NonNegativeInt = 4
    """Largest number of search turns in a trajectory; one final turn without retrieval follows."""
    max_prompt_length: PositiveInt = 2048
    """Largest number of tokens of a prompt; for longer prompts see data.overlong_prompts."""
    max_turn_length: PositiveInt = 1024
    """Largest number of tokens sampled in one turn."""
    max_observation_length: PositiveInt = 2048
    """Largest number of tokens of an observation; longer observations are cut before the closing tag."""
    max_length: PositiveInt = 16384
    """Largest number of tokens of prompt and response together."""
    protocol: Annotated[Literal["tags", "tool_calls"], Mark.COLD_START] = "tags"
    """How the policy acts and answers. tags: <search> and <answer>; tool_calls: in the tool-call format of
    the tokenizer's chat template, see the section tool_calls."""
    on_invalid: Literal["end", "retry"] = "end"
    """After a turn that neither acts nor answers the trajectory ends (CalibAdv), or goes on (Search-R1)."""
    temperature: Annotated[NonNegativeFloat, Mark.NO_ANSWER] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that together have this probability; 1: off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: off."""
    max_concurrency: Annotated[PositiveInt, Mark.UNLEARNED, Mark.NO_ANSWER] = 512
    """Largest number of trajectories that are sampled at the same time."""
    time_limit: Annotated[NonNegativeFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 0.0
    """Seconds for one trajectory, searches and weight swaps included; after that it has failed. 0: no
    limit."""
    max_failed_share: Annotated[float, Mark.UNLEARNED, Mark.NO_ANSWER] = Field(default=0.05, ge=0, le=1)
    """Share of a step's trajectories that may fail, by the time limit or because a service is unreachable.
    They are not trained, and their groups go on without them. If more fail, the run saves its state and
    stops."""
    max_staleness: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Steps by which the policy that begins a trajectory may be older than the policy that it trains; 0: wait
    for every rollout. Above 0, rollouts go on during updates (sampler.name=vllm), and the loss must correct
    for that: loss.importance_cap above 0, or loss.old_logprobs=sampler."""
    dynamic_sampling: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Largest number of further questions in a step, in place of questions whose trajectories all have the
    same score (dynamic sampling of DAPO); 0: none. After them, tied groups fill the step."""

    def _faults(self) -> Iterator[str]:
        if self.max_prompt_length >= self.max_length:
            yield (
                f"max_prompt_length is {self.max_prompt_length}, "
                f"but must be below max_length ({self.max_length})"
            )


@dataclass(frozen=True, config=SECTION)
class ToolCallsConfig(Section):
    """The tool calls of the policy, if rollout.protocol is tool_calls."""

    format: Annotated[str, Field(json_schema_extra={"enum": ["auto", *FORMATS, USER_FORMAT]})] = "auto"
    """Form in which the policy writes calls. auto: the one that the chat template writes; schema: the
    response template that the tokenizer itself carries; package.module:Class: a format of your own."""
    history: Literal["keep", "refuse"] = "keep"
    """Chat templates that write earlier messages differently later, as Qwen3's drops earlier thoughts. keep:
    what was sampled stays as it is; refuse: the run does not start."""
    max_calls: PositiveInt = 8
    """Largest number of calls in one turn; a turn with more is invalid. They are executed together."""
    max_thinking_tokens: NonNegativeInt = 0
    """Largest number of tokens of a turn's thought; then the environment closes the thought. 0: no limit but
    rollout.max_turn_length."""

    def _faults(self) -> Iterator[str]:
        if self.format not in ("auto", *FORMATS) and not is_address(self.format):
            yield (
                f"format is {self.format!r}: must be one of auto, {', '.join(FORMATS)}, "
                f"or a class of your own as {USER_FORMAT}"
            )


@dataclass(frozen=True, config=SECTION)
class DemonstrationsConfig(Section):
    """Demonstrations in the groups of the first steps (docs/groups.md)."""

    file: Annotated[str, Mark.PLACE] = ""
    """File of demonstrations, in the formats of sft.demonstrations; they are matched to the training
    questions by the question's text. Empty: none."""
    per_group: PositiveInt = 1
    """Largest number of trajectories of a group that are demonstrations of its question. A question with
    fewer of them keeps sampled trajectories in their place."""
    first_steps: PositiveInt = 50
    """Steps whose groups hold demonstrations, from the first one on (David-GRPO: 50)."""
    importance: Literal["ratio", "shaped"] = "ratio"
    """Weight of a demonstration's token. ratio: the loss's own, with the learner's probability at the start
    of the step as the denominator, so that it starts at 1; shaped: p / (p + gamma), where p is the token's
    probability under the policy, without clipping (LUFFY)."""
    gamma: PositiveFloat = 0.1
    """importance=shaped: the smaller, the more of the gradient goes to tokens that the policy finds
    unlikely."""

    @property
    def is_on(self) -> bool:
        """Whether groups hold demonstrations."""
        return bool(self.file)

    def _faults(self) -> Iterator[str]:
        pydantic_class: Any = DemonstrationsConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            if not self.file and getattr(self, key) != section_field.default:
                yield f"demonstrations.{key} is set, but there are no demonstrations: set demonstrations.file"
        if self.importance != "shaped" and self.gamma != pydantic_class.__pydantic_fields__["gamma"].default:
            yield f"gamma is {self.gamma:g}, but importance is {self.importance}: set importance=shaped"


@dataclass(frozen=True, config=SECTION)
class ContinuationsConfig(Section):
    """Trajectories that found evidence and failed, continued in a second round (docs/groups.md)."""

    per_group: NonNegativeInt = 0
    """Trajectories of a group that are sampled in a second round: each continues a near miss of the first
    round, behind the observation with its last new supporting passage. In a group without a near miss they
    are sampled from the prompt. 0: there is one round."""
    failed_below: float = Field(default=1.0, gt=0, le=1)
    """Reward of the answer, as a share of the largest one, below which a trajectory has failed."""
    only_unsolved: bool = True
    """Continue only in groups in which every trajectory of the first round has failed, as David-GRPO does;
    false: also beside a right one."""

    @property
    def is_on(self) -> bool:
        """Whether groups have a second round."""
        return self.per_group > 0

    def _faults(self) -> Iterator[str]:
        if self.is_on:
            return
        pydantic_class: Any = ContinuationsConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            if getattr(self, key) != section_field.default:
                yield f"continuations.{key} is set, but continuations.per_group is 0: raise it"


@dataclass(frozen=True, config=SECTION)
class SamplerConfig(Section):
    """The sampler: embedded, or vLLM workers."""

    name: Annotated[Literal["jax", "vllm"], Mark.LEARNED] = "jax"
    """jax: sample in the trainer's process, on its mesh; vllm: on servers that load policy snapshots."""
    slots: PositiveInt = 64
    """Trajectories decoded together (jax: rows of the KV cache; vllm: trajectories of one worker)."""
    decode_chunk: PositiveInt = 32
    """jax: tokens decoded before finished rows are handed back and waiting rows admitted."""
    prefill_chunk: PositiveInt = 256
    """jax: tokens of one row that prefill computes together."""
    urls: Annotated[list[str], Mark.PER_RUN] = Field(default_factory=list)
    """vllm: addresses of running workers, divided among the processes of the run; empty: start `workers`."""
    workers: PositiveInt = 1
    """vllm: workers to start as child processes if `urls` is empty, counted over all processes of the run."""
    flavour: Literal["auto", "gpu", "cpu", "tpu"] = "auto"
    """vllm: build of vLLM that the child processes run. auto: the installed build."""
    dtype: Literal["", "bfloat16", "float32"] = ""
    """vllm: precision of the child processes; empty: policy.compute_dtype. Another precision needs a
    correction by the loss: loss.importance_cap above 0, or loss.old_logprobs=sampler."""
    worker_devices: list[str] = Field(default_factory=list)
    """vllm: CUDA_VISIBLE_DEVICES of each child process, as in ["4,5", "6,7"]; empty: that of the trainer."""
    worker_args: list[str] = Field(default_factory=list)
    """vllm: further arguments of the child processes' launcher."""
    start_timeout: PositiveFloat = 1800.0
    """vllm: seconds for a child process to become ready."""
    patience: PositiveFloat = 600.0
    """vllm: seconds to wait for a usable worker; after that the start ends, or the trajectory fails."""

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("urls", self.urls)
        servers = {normal_url(url) for url in self.urls}
        if len(servers) < len(self.urls):
            yield f"urls is {', '.join(self.urls)}: give each server once"
        if self.worker_devices and len(self.worker_devices) != self.workers:
            yield f"worker_devices names {len(self.worker_devices)} workers, but workers is {self.workers}"


@dataclass(frozen=True, config=SECTION)
class McpConfig(Section):
    """A server of the Model Context Protocol, whose tools become actions."""

    command: str = ""
    """Command line of a server to start, which speaks MCP on its standard input and output."""
    url: str = ""
    """Address of a running server that speaks MCP over HTTP; MCP_TOKEN is sent as its bearer token."""
    tools: list[str] = Field(default_factory=list)
    """Tools of the server to offer to the policy; empty: all of them."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call."""
    patience: PositiveFloat = 300.0
    """Seconds to wait for an unreachable server; after that the trajectory that calls it has failed."""

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("url", self.url, "MCP_TOKEN")
        if bool(self.command.strip()) == bool(self.url):
            yield "mcp needs a command to start, or the url of a running server: give one of them"


@dataclass(frozen=True, config=SECTION)
class ToolConfig(Section):
    """An action of the policy, or a server that offers actions."""

    name: Annotated[str, Field(json_schema_extra={"enum": [*RETRIEVER_ACTIONS, USER_TOOL]})] = ""
    """search: documents for a query; access: one page of the retrieval service, by its address;
    package.module:Class: an action of your own, see examples/own_tool.py."""
    mcp: McpConfig | None = None
    """Instead of `name`: a server whose tools become actions."""
    max_length: NonNegativeInt = 0
    """Largest number of tokens of an observation of this action; 0: rollout.max_observation_length."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of an action of your own; after that the trajectory has failed."""

    def _faults(self) -> Iterator[str]:
        if bool(self.name) == bool(self.mcp):
            yield "give a name, or an mcp server"
        if self.name and self.name not in RETRIEVER_ACTIONS and not is_address(self.name):
            yield (
                f"name is {self.name!r}: must be one of {', '.join(RETRIEVER_ACTIONS)}, "
                f"or a class of your own as {USER_TOOL}"
            )
