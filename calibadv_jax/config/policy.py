"""The network and the devices it is spread over."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.section import SECTION


@dataclass(frozen=True, config=SECTION)
class PolicyConfig:
    path: str = ""
    """HuggingFace folder (config.json, safetensors, tokenizer) to start from."""
    tokenizer: str = ""
    """Tokenizer folder; empty: the policy's own folder."""
    init: dict[str, Any] = Field(default_factory=dict)
    """Fields of a HuggingFace config.json for a randomly initialised policy; used when `path` is empty."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of matrix products and activations."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the trained parameters and of the optimizer state."""
    remat: Literal["none", "dots", "full"] = "full"
    """Recomputed in the backward pass: nothing, all but matrix products, every layer."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel. auto: cuDNN on GPU in bfloat16, else XLA."""
    attention_chunk: PositiveInt = 1024
    """Queries handled at once by the XLA kernel; bounds its memory at [B, N, chunk, T]."""
    logprob_chunk: PositiveInt = 1024
    """Tokens per row whose logits exist at once; [B, T, V] is never materialised."""


@dataclass(frozen=True, config=SECTION)
class MeshConfig:
    data: int = 1
    """Replicas of the parameters."""
    fsdp: int = -1
    """Shards of parameters, optimizer state and batch; -1: all remaining devices."""
    tensor: int = 1
    """Shards of heads, MLP width and vocabulary."""
