"""Memory of one device, estimated from shapes."""

from __future__ import annotations

from collections.abc import Mapping

from calibadv_jax.config import Config
from calibadv_jax.policy.architecture import Architecture

GIB = 1024**3


def estimate_memory(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes on one device by purpose; an estimate from shapes, not a measurement.

    Args:
        mesh: sizes of the axes data, fsdp and tensor.
    """
    shards, batch_shards = mesh["fsdp"] * mesh["tensor"], mesh["data"] * mesh["fsdp"]
    sizes = {"float32": 4, "bfloat16": 2}
    stored = sizes[config.policy.param_dtype]
    computed = sizes[config.policy.compute_dtype]
    count = architecture.num_parameters / shards
    moments = 1 if config.learner.optimizer.name == "muon" else 2
    tokens = config.learner.microbatch_rows * config.learner.row_length / batch_shards
    width = architecture.hidden_size
    per_layer = 1 if config.policy.remat == "full" else 12
    chunk = min(config.policy.logprob_chunk, config.learner.row_length)
    rows = config.learner.microbatch_rows / batch_shards
    cache = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    estimate = {
        "parameters": count * stored,
        "optimizer": count * stored * moments,
        "gradients": count * 4 * 2,  # accumulated, and those of the microbatch
        "activations": tokens * width * computed * (architecture.num_layers * per_layer + 16),
        "logits": 3 * rows * chunk * architecture.vocab_size * 4,
    }
    if config.loss.kl_coef:
        estimate["reference policy"] = count * stored
    if config.sampler.name == "jax":  # vLLM's workers have their own memory
        estimate["sampler weights"] = count * computed
        slots = config.sampler.slots * config.rollout.max_length
        estimate["kv cache"] = cache * slots * computed / batch_shards
    return estimate


def memory_line(estimate: Mapping[str, float]) -> str:
    """``estimated memory a device: 12.17 GiB (parameters 1.44, …)``"""
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in estimate.items())
    return f"estimated memory a device: {sum(estimate.values()) / GIB:.2f} GiB ({parts})"
