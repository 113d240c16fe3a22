"""Trajectories and the sampler that writes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, refuse_credentials


@dataclass(frozen=True, config=SECTION)
class RolloutConfig:
    questions_per_step: Annotated[PositiveInt, Mark.NO_ANSWER] = 512
    """Number of questions per training step."""
    group_size: Annotated[PositiveInt, Mark.NO_ANSWER] = 5
    """Number of trajectories per question."""
    max_searches: NonNegativeInt = 4
    """Largest number of search turns of a trajectory; after that many comes one final turn without
    retrieval."""
    max_prompt_length: PositiveInt = 2048
    """Largest number of tokens of a prompt; what becomes of longer prompts: data.overlong_prompts."""
    max_turn_length: PositiveInt = 1024
    """Largest number of tokens sampled in one turn."""
    max_observation_length: PositiveInt = 2048
    """Largest number of tokens of an observation; longer observations are cut before the closing tag."""
    max_length: PositiveInt = 16384
    """Largest number of tokens of prompt and response together."""
    on_invalid: Literal["end", "retry"] = "end"
    """What follows a turn that is neither search nor answer. end: the trajectory ends (CalibAdv); retry: it
    goes on (Search-R1)."""
    temperature: Annotated[NonNegativeFloat, Mark.NO_ANSWER] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that together have this probability; 1: off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: off."""
    max_concurrency: Annotated[PositiveInt, Mark.UNLEARNED, Mark.NO_ANSWER] = 512
    """Largest number of trajectories that are written at the same time."""
    time_limit: Annotated[NonNegativeFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 0.0
    """Seconds that one trajectory may take, searches and weight swaps included; 0: no limit. A trajectory
    that takes longer counts as failed."""
    max_failed_share: Annotated[float, Mark.UNLEARNED, Mark.NO_ANSWER] = Field(default=0.05, ge=0, le=1)
    """Share of a step's trajectories that may fail, because a service was gone for longer than its patience
    or because of the time limit. Failed trajectories are not trained, and their groups go on without them. If
    more fail, the run stops with its state saved."""
    max_staleness: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Number of steps by which the policy that begins a trajectory may be older than the policy that it
    trains; 0: wait for every rollout before an update. Above 0 rollouts go on while the learner updates
    (sampler.name=vllm) and the loss must correct for it: loss.importance_cap above 0, or
    loss.old_logprobs=sampler."""

    replace_tied: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 0
    """Largest number of further questions that a step asks in place of those whose trajectories all have the
    same score, which teach nothing (dynamic sampling of DAPO); 0: none. If that is not enough, tied groups
    fill the step."""

    @model_validator(mode="after")
    def _prompt_fits(self) -> RolloutConfig:
        if self.max_prompt_length >= self.max_length:
            raise ValueError(
                f"max_prompt_length is {self.max_prompt_length},"
                f" but must be below max_length ({self.max_length})"
            )
        return self


@dataclass(frozen=True, config=SECTION)
class SamplerConfig:
    name: Annotated[Literal["jax", "vllm"], Mark.LEARNED] = "jax"
    """Where trajectories are sampled. jax: in the trainer's process, on its mesh; vllm: on servers that take
    their weights from snapshots."""
    slots: PositiveInt = 64
    """Number of trajectories decoded together (jax: rows of the KV cache; vllm: trajectories of one
    worker)."""
    decode_chunk: PositiveInt = 32
    """jax: tokens decoded before finished rows are handed back and waiting rows admitted."""
    prefill_chunk: PositiveInt = 256
    """jax: tokens of one row that prefill computes together."""
    urls: Annotated[list[str], Mark.PER_RUN] = Field(default_factory=list)
    """vllm: addresses of running workers (scripts/launch_vllm_worker.sh); empty: start `workers` child
    processes. Several processes share them out in this order."""
    workers: PositiveInt = 1
    """vllm: number of child processes to start if `urls` is empty; of all processes of the run together."""
    flavour: Literal["auto", "gpu", "cpu", "tpu"] = "auto"
    """vllm: which build of vLLM the child processes run. auto: the build that is installed."""
    dtype: Literal["", "bfloat16", "float32"] = ""
    """vllm: precision of the child processes; empty: policy.compute_dtype. If it is another precision, the
    sampler's log-probabilities differ from the learner's, and the loss must correct for that:
    loss.importance_cap above 0, or loss.old_logprobs=sampler."""
    worker_devices: list[str] = Field(default_factory=list)
    """vllm: CUDA_VISIBLE_DEVICES of each child process, such as ["4,5", "6,7"]; empty: the devices of the
    trainer."""
    worker_args: list[str] = Field(default_factory=list)
    """vllm: further arguments of the child processes' launcher."""
    start_timeout: PositiveFloat = 1800.0
    """vllm: seconds that a child process may take to become ready."""
    request_timeout: PositiveFloat = 1800.0
    """vllm: seconds that one completion may take; then its worker counts as lost."""
    patience: PositiveFloat = 600.0
    """vllm: seconds without any usable worker after which the start of a run ends, or later a trajectory
    fails (rollout.max_failed_share)."""

    @model_validator(mode="after")
    def _workers_have_devices(self) -> SamplerConfig:
        for url in self.urls:
            refuse_credentials("urls", url)
        if self.worker_devices and len(self.worker_devices) != self.workers:
            raise ValueError(
                f"worker_devices names {len(self.worker_devices)} workers, but workers is {self.workers}"
            )
        return self
