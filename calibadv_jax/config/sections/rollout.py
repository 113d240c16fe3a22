"""Trajectories, the sampler that writes them, and the actions of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section, credential_faults
from calibadv_jax.core.user_functions import is_address

OF_RETRIEVER = ("search", "access")
OWN_TOOL = "my_package.my_module:Tool"


@dataclass(frozen=True, config=SECTION)
class RolloutConfig(Section):
    questions_per_step: Annotated[PositiveInt, Mark.NO_ANSWER] = 512
    """Questions per training step."""
    group_size: Annotated[PositiveInt, Mark.NO_ANSWER] = 5
    """Trajectories per question."""
    max_searches: NonNegativeInt = 4
    """Search turns of a trajectory at most; then comes one final turn without retrieval."""
    max_prompt_length: PositiveInt = 2048
    """Tokens of a prompt at most; longer prompts: data.overlong_prompts."""
    max_turn_length: PositiveInt = 1024
    """Tokens sampled in one turn at most."""
    max_observation_length: PositiveInt = 2048
    """Tokens of an observation at most; longer observations are cut before the closing tag."""
    max_length: PositiveInt = 16384
    """Tokens of prompt and response together at most."""
    on_invalid: Literal["end", "retry"] = "end"
    """After a turn that neither acts nor answers the trajectory ends (CalibAdv), or goes on (Search-R1)."""
    temperature: Annotated[NonNegativeFloat, Mark.NO_ANSWER] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that together have this probability; 1: off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: off."""
    max_concurrency: Annotated[PositiveInt, Mark.UNLEARNED, Mark.NO_ANSWER] = 512
    """Trajectories that are sampled at the same time at most."""
    time_limit: Annotated[NonNegativeFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 0.0
    """Seconds for one trajectory, searches and weight swaps included; then it has failed. 0: no limit."""
    max_failed_share: Annotated[float, Mark.UNLEARNED, Mark.NO_ANSWER] = Field(default=0.05, ge=0, le=1)
    """Share of a step's trajectories that may fail, by the time limit or a service's absence. They are not
    trained, and their groups go on without them. If more fail, the run stops with its state saved."""
    max_staleness: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Steps by which the policy that begins a trajectory may be older than the one that it trains; 0: wait
    for every rollout. Above 0 rollouts go on during updates (sampler.name=vllm), and the loss must correct
    for it: loss.importance_cap above 0, or loss.old_logprobs=sampler."""
    dynamic_sampling: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Most further questions of a step in place of those whose trajectories all have the same score (dynamic
    sampling of DAPO); 0: none. After them tied groups fill the step."""

    def _faults(self) -> Iterator[str]:
        if self.max_prompt_length >= self.max_length:
            size = self.max_prompt_length
            yield f"max_prompt_length is {size}, but must be below max_length ({self.max_length})"


@dataclass(frozen=True, config=SECTION)
class SamplerConfig(Section):
    name: Annotated[Literal["jax", "vllm"], Mark.LEARNED] = "jax"
    """jax: sample in the trainer's process, on its mesh; vllm: on servers that load policy snapshots."""
    slots: PositiveInt = 64
    """Trajectories decoded together (jax: rows of the KV cache; vllm: trajectories of one worker)."""
    decode_chunk: PositiveInt = 32
    """jax: tokens decoded before finished rows are handed back and waiting rows admitted."""
    prefill_chunk: PositiveInt = 256
    """jax: tokens of one row that prefill computes together."""
    urls: Annotated[list[str], Mark.PER_RUN] = Field(default_factory=list)
    """vllm: addresses of running workers, shared out by processes; empty: start `workers` of them."""
    workers: PositiveInt = 1
    """vllm: child processes to start if `urls` is empty, of all processes of the run together."""
    flavour: Literal["auto", "gpu", "cpu", "tpu"] = "auto"
    """vllm: build of vLLM that the child processes run. auto: the installed build."""
    dtype: Literal["", "bfloat16", "float32"] = ""
    """vllm: precision of the child processes; empty: policy.compute_dtype. Another precision needs a
    correction by the loss: loss.importance_cap above 0, or loss.old_logprobs=sampler."""
    worker_devices: list[str] = Field(default_factory=list)
    """vllm: CUDA_VISIBLE_DEVICES of each child process, such as ["4,5", "6,7"]; empty: the trainer's."""
    worker_args: list[str] = Field(default_factory=list)
    """vllm: further arguments of the child processes' launcher."""
    start_timeout: PositiveFloat = 1800.0
    """vllm: seconds for a child process to become ready."""
    patience: PositiveFloat = 600.0
    """vllm: seconds without a usable worker until the start ends, or a trajectory fails."""

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("urls", self.urls)
        if len(set(self.urls)) < len(self.urls):
            yield f"urls is {', '.join(self.urls)}: give each server once"
        if self.worker_devices and len(self.worker_devices) != self.workers:
            yield f"worker_devices names {len(self.worker_devices)} workers, but workers is {self.workers}"


@dataclass(frozen=True, config=SECTION)
class McpConfig(Section):
    command: str = ""
    """Command line of a server that is started here and speaks MCP on its standard input and output."""
    url: str = ""
    """Address of a running server that speaks MCP over HTTP; MCP_TOKEN is sent as its bearer token."""
    tools: list[str] = Field(default_factory=list)
    """Tools of the server that are on; empty: all of them."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call."""
    patience: PositiveFloat = 300.0
    """Seconds for which the server may be away; then the trajectory that calls it has failed."""

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("url", self.url, "MCP_TOKEN")
        if bool(self.command.strip()) == bool(self.url):
            yield "mcp needs a command to start, or the url of a running server: give one of them"


@dataclass(frozen=True, config=SECTION)
class ToolConfig(Section):
    name: Annotated[str, Field(json_schema_extra={"enum": [*OF_RETRIEVER, OWN_TOOL]})] = ""
    """search: documents for a query; access: one page of the retrieval service, by its address;
    package.module:Class: an action of your own, see examples/own_tool.py."""
    mcp: McpConfig | None = None
    """Instead of `name`: a server whose tools become actions."""
    max_length: NonNegativeInt = 0
    """Tokens of an observation of this action at most; 0: rollout.max_observation_length."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of an action of your own; then the trajectory has failed."""

    def _faults(self) -> Iterator[str]:
        if bool(self.name) == bool(self.mcp):
            yield "give a name, or an mcp server"
        if self.name and self.name not in OF_RETRIEVER and not is_address(self.name):
            own = f"a class of your own as {OWN_TOOL}"
            yield f"name is {self.name!r}: must be one of {', '.join(OF_RETRIEVER)}, or {own}"
