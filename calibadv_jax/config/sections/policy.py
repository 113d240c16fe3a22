"""The policy network, the device mesh, and the processes of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section

# Size of the mesh axis that takes all devices which the other axes leave.
REMAINING_DEVICES = -1
LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


@dataclass(frozen=True, config=SECTION)
class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, which alone are trained. 0: no adapters; every parameter is trained."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    targets: list[LoraTarget] = field(default_factory=lambda: list(LORA_TARGETS))
    """Matrix products of every layer that get an adapter."""
    base_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the frozen parameters; that of the adapters is policy.param_dtype."""
    init_from: Annotated[str, Mark.UNLEARNED, Mark.PLACE] = ""
    """PEFT folder with the adapters to start from; empty: new adapters, which change nothing at first."""
    snapshots: Annotated[Literal["merged", "adapters"], Mark.UNLEARNED] = "merged"
    """What vLLM workers load. merged: the whole policy. adapters: megabytes instead of gigabytes; the worker
    adds them to the base, which it reads from policy.path."""

    def _faults(self) -> Iterator[str]:
        has_repeated_target = len(set(self.targets)) < len(self.targets)
        if not self.targets or has_repeated_target:
            yield f"targets must name at least one of {', '.join(LORA_TARGETS)}, and none twice"
        if self.init_from and not self.rank:
            yield (
                f"policy.lora.init_from is {self.init_from}, but policy.lora.rank is 0: "
                "set it to r of that folder's adapter_config.json"
            )


@dataclass(frozen=True, config=SECTION)
class PolicyConfig(Section):
    """The language model that is trained."""

    path: Annotated[str, Mark.UNLEARNED, Mark.PLACE] = ""
    """Policy to start from: a HuggingFace folder, or OWNER/NAME of the hub."""
    revision: str = ""
    """Branch, tag or commit of policy.path on the hub; empty: main. A run keeps its first commit."""
    tokenizer: Annotated[str, Mark.UNLEARNED, Mark.PLACE] = ""
    """Tokenizer folder, or OWNER/NAME[@REVISION] of the hub; empty: the policy's own."""
    init: Annotated[dict[str, Any], Mark.COLD_START] = Field(default_factory=dict)
    """Fields of a HuggingFace config.json for a randomly initialised policy; used when `path` is empty."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of matrix products and activations."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the trained parameters and of the optimizer state."""
    remat: Annotated[Literal["none", "dots", "attention", "full", "auto"], Mark.UNLEARNED] = "full"
    """Recomputed by the backward pass to save memory. full: every layer; attention: all but the attention
    kernel; dots: all but attention and matrix products; none: nothing. auto: the least that fits; `sft`
    then takes full."""
    attention: Annotated[Literal["auto", "xla", "splash", "tokamax", "triton", "cudnn"], Mark.UNLEARNED] = (
        "auto"
    )
    """Attention kernel. auto: Splash on TPU; on GPU tokamax, or Triton with JAX 0.10; otherwise XLA. cudnn
    holds a mask of T x T."""
    attention_chunk: Annotated[PositiveInt, Mark.UNLEARNED] = 128
    """Queries and keys in a block of the XLA kernel; rows up to this length are one block."""
    logprob_chunk: Annotated[PositiveInt, Mark.UNLEARNED] = 1024
    """Tokens per row whose logits are in memory at the same time."""
    lora: Annotated[LoraConfig, Mark.COLD_START] = Field(default_factory=LoraConfig)
    """Adapters that are trained in place of the policy's own parameters (docs/lora.md)."""

    def _faults(self) -> Iterator[str]:
        has_adapters_of_a_base = self.path and self.lora.rank
        if self.lora.snapshots == "adapters" and not has_adapters_of_a_base:
            yield "policy.lora.snapshots=adapters needs policy.lora.rank above 0 and policy.path: set both"
        if self.attention == "tokamax" and self.compute_dtype != "bfloat16":
            yield (
                f"policy.attention is tokamax, but policy.compute_dtype is {self.compute_dtype}: set it to"
                " bfloat16, or policy.attention=xla"
            )


@dataclass(frozen=True, config=SECTION)
class MeshConfig(Section):
    """Sizes of the device mesh."""

    data: int = 1
    """Replicas of the parameters. One of the three sizes of the mesh may be -1: all remaining devices."""
    fsdp: int = -1
    """Shards of parameters, optimizer state and batch."""
    tensor: int = 1
    """Shards of heads, MLP width and vocabulary."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis by its name, as configured."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    def sizes_on(self, devices: int) -> dict[str, int]:
        """Return the size of each mesh axis on a number of devices.

        Args:
            devices: Number of devices.

        Returns:
            Size by axis name. The axis of size -1 gets the devices that the other axes leave, and at least 1.
        """
        fixed_sizes = [size for size in self.sizes.values() if size != REMAINING_DEVICES]
        remaining = max(1, devices // math.prod(fixed_sizes))
        return {name: remaining if size == REMAINING_DEVICES else size for name, size in self.sizes.items()}

    def _faults(self) -> Iterator[str]:
        for name, size in self.sizes.items():
            if size < 1 and size != REMAINING_DEVICES:
                yield f"{name} is {size}: must be at least 1, or -1 for all remaining devices"
        if list(self.sizes.values()).count(REMAINING_DEVICES) > 1:
            yield f"data={self.data}, fsdp={self.fsdp} and tensor={self.tensor}: only one of them can be -1"


@dataclass(frozen=True, config=SECTION)
class DistributedConfig:
    """Several processes that train together."""

    coordinator_address: str = Field(default="", pattern=r"^(|auto|.+:\d{1,5})$")
    """host:port of process 0, where processes that train together meet (docs/cluster.md); auto: as JAX
    detects it (SLURM, Open MPI, Kubernetes jobs, TPU pods). Empty: the environment variable
    JAX_COORDINATOR_ADDRESS or, without it, one process."""
    num_processes: PositiveInt | None = None
    """Number of processes; empty: JAX_NUM_PROCESSES or, with auto, as JAX detects it."""
    process_id: NonNegativeInt | None = None
    """Number of this process, from 0; empty: JAX_PROCESS_ID or, with auto, as JAX detects it. Process 0
    writes the run's folder and starts the services."""
    timeout: float = Field(default=30.0, ge=5.0)
    """Seconds without a sign of life after which a process counts as lost and all others end."""
