"""Memory of one device, counted from shapes and shardings, and whether it fits.

The memory that programs need beyond their arrays is a formula; benchmarks/scale.md compares it with the
compilers' plans.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.contrib.planning.known_models import find_teacher_architecture
from calibadv_jax.learner.critic import make_critic
from calibadv_jax.learner.optimizer import STACKED_MATRICES, peak_elements
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.attention import SCORE_BYTES
from calibadv_jax.policy.logprobs import MIN_CHUNKS
from calibadv_jax.policy.recomputation import REMATS
from calibadv_jax.policy.sharding import MESH_AXES, param_shardings
from calibadv_jax.policy.transformer import MAX_UNROLLED_LAYERS, Numerics, Params, Policy
from calibadv_jax.policy.weights import flatten
from calibadv_jax.sampler.tiles import TileShape

# Files with the memory limit of a container: cgroup version 2, version 1.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
REMEDY = "lower sampler.slots, rollout.max_length, learner.microbatch_rows, learner.pack_length; add devices"
GIB = 1024**3
GAPS = {"tpu": 1.6}  # Largest ratio of a program's memory to that in use at once (benchmarks/scale.md).
UPDATE = ("gradients", "activations", "workspace")  # Arrays that exist only while gradients are computed.
STEP = ("moments",)  # With optimizer.offload: the moments on the device, beside the sum of the gradients.
SAMPLING = ("prefill", "decode")  # Arrays of one call of the embedded sampler: one of them at a time.
FLOAT32_BYTES = 4
# Share by which more of a layer exists at once where its weights are gathered, by XLA's plans for GPUs.
GATHERED_OVERHEAD = 0.15
# The formula's bytes are within this factor of the compiler's (benchmarks/gpu.md).
FORMULA_MARGIN = 1.15
# Arrays that are the inputs of the learner's programs; SAMPLER_INPUTS are those of the sampler's programs.
LEARNER_INPUTS: dict[str, tuple[str, ...]] = {
    "update": ("parameters", "base", "optimizer"),
    "apply": ("parameters", "optimizer"),
    "log-probabilities": ("parameters", "base"),
    "critic's update": ("critic", "base", "critic's optimizer"),
    "critic's apply": ("critic", "critic's optimizer"),
}
SAMPLER_INPUTS = ("sampler weights", "kv cache")
_critic_of = lru_cache(maxsize=8)(make_critic)


def estimate_memory(
    config: Config, architecture: Architecture, mesh: Mapping[str, int], sampling: Config | None = None
) -> dict[str, float]:
    """Estimate the memory of one device.

    Args:
        config: The run's config.
        architecture: The policy's architecture.
        mesh: Sizes of the learner's mesh by axis.
        sampling: With several processes, the config of one process' embedded sampler (`sampler_of`), with its
            mesh and its slots. None: the sampler works on the learner's mesh.

    Returns:
        Bytes by purpose. Not all of them exist at once: `peak_memory` gives the largest sum.

    Raises:
        UserError: Nothing says what the shape of the teacher is.
    """
    lora = config.policy.lora
    stored_bytes = jnp.dtype(config.policy.param_dtype).itemsize
    policy = _shapes(architecture, Adapters.from_config(lora))
    frozen_params, trained_params = policy.split(policy.abstract_params)
    frozen = _held_elements(frozen_params, mesh)
    trained = _held_elements(trained_params, mesh)
    num_frozen = sum(frozen.values())
    num_trained = sum(trained.values())
    optimizer = _optimizer_state(config.learner.optimizer, trained, stored_bytes)
    moments_in_use = optimizer.in_use
    estimate: dict[str, float] = {
        "parameters": num_trained * stored_bytes,
        "optimizer": optimizer.permanent,
        # The sum, and those of the microbatch in the parameters' precision.
        "gradients": num_trained * (FLOAT32_BYTES + stored_bytes),
    }
    estimate.update(_update(config, architecture, mesh))
    if frozen:
        estimate["base"] = num_frozen * jnp.dtype(lora.base_dtype).itemsize
    if config.advantage.has_critic:  # trained after the policy; its update needs no more
        critic = _held_elements(_critic_of(policy).abstract_trained, mesh)
        estimate["critic"] = sum(critic.values()) * stored_bytes
        critic_optimizer = _optimizer_state(config.critic.optimizer, critic, stored_bytes)
        if critic_optimizer.permanent:
            estimate["critic's optimizer"] = critic_optimizer.permanent
        moments_in_use = max(moments_in_use, critic_optimizer.in_use)
    if moments_in_use:
        estimate["moments"] = moments_in_use
    # With new adapters the base itself is the reference policy.
    copies_reference = not frozen or lora.init_from
    if config.keeps_initial_policy and copies_reference:
        estimate["reference policy"] = num_trained * stored_bytes
    if config.teacher.has_own_weights:
        teacher = find_teacher_architecture(config)
        held = _held_elements(_shapes(teacher, None).abstract_params, mesh)
        estimate["teacher"] = sum(held.values()) * _compute_bytes(config)
    if config.sampler.name == "jax":  # vLLM's workers have their own memory
        sampler_mesh = sampling.mesh.sizes if sampling else mesh
        num_weights = sum(_held_elements(policy.abstract_params, sampler_mesh).values())
        if sampling is None and shares_base(config):
            num_weights -= num_frozen
        estimate["sampler weights"] = num_weights * _compute_bytes(config)
        estimate.update(_sampler(sampling or config, architecture, sampler_mesh))
    return estimate


def _compute_bytes(config: Config) -> int:
    """Return the bytes of an element in the precision of the forward pass."""
    return int(jnp.dtype(config.policy.compute_dtype).itemsize)


@lru_cache(maxsize=8)
def _shapes(architecture: Architecture, adapters: Adapters | None) -> Policy:
    """Return a policy whose parameters have shapes only; building it takes a tenth of a second."""
    return Policy(architecture, Numerics(), adapters)


def shares_base(config: Config) -> bool:
    """Whether the embedded sampler of a run in one process uses the learner's own frozen base."""
    return bool(config.policy.lora.rank) and config.policy.lora.base_dtype == config.policy.compute_dtype


def peak_memory(estimate: Mapping[str, float]) -> float:
    """Return the bytes on a device at the worst moment.

    Args:
        estimate: A result of `estimate_memory`.

    Returns:
        The permanent arrays, and those of an update, an optimizer step or a sampler call.
    """
    permanent = sum(_permanent(estimate).values())
    update = sum(estimate[name] for name in UPDATE)
    sampling = max(estimate.get(name, 0) for name in SAMPLING)
    return permanent + max(update, _step(estimate), sampling)


def _permanent(estimate: Mapping[str, float]) -> dict[str, float]:
    temporary = UPDATE + STEP + SAMPLING
    return {name: size for name, size in estimate.items() if name not in temporary}


def program_memory(estimate: Mapping[str, float], shares_base: bool = False) -> dict[str, float]:
    """Estimate the memory of the trainer's programs by themselves, to compare with a compiler's plan.

    Args:
        estimate: A result of `estimate_memory`.
        shares_base: Whether the sampler uses the learner's base, see the function of this name.

    Returns:
        Bytes on a device by the program's name.
    """
    base = estimate.get("base", 0)
    update = sum(estimate[name] for name in UPDATE)
    inputs = estimate["parameters"] + base + estimate["optimizer"]
    programs = {"update": inputs + update, "apply": inputs + _step(estimate)}
    if "critic" in estimate:
        inputs = estimate["critic"] + base + estimate.get("critic's optimizer", 0.0)
        programs["critic's update"] = inputs + update
        programs["critic's apply"] = inputs + _step(estimate)
    if "kv cache" in estimate:
        shared = base if shares_base else 0
        inputs = estimate["sampler weights"] + shared + estimate["kv cache"]
        for name in SAMPLING:
            programs[name] = inputs + estimate[name]
    return programs


def memory_beside(estimate: Mapping[str, float], program: str, shares_base: bool = False) -> float:
    """Return the bytes on a device that a run holds besides a program and its inputs.

    Args:
        estimate: A result of `estimate_memory`.
        program: A name of `program_memory`, or log-probabilities.
        shares_base: Whether the sampler uses the learner's base, see the function of this name.
    """
    inputs = LEARNER_INPUTS.get(program, SAMPLER_INPUTS)
    if shares_base and inputs == SAMPLER_INPUTS:
        inputs += ("base",)
    return sum(size for name, size in _permanent(estimate).items() if name not in inputs)


def _step(estimate: Mapping[str, float]) -> float:
    """Return bytes that the optimizer's step adds: the gradients' sum, and moments from the host."""
    return estimate["gradients"] / 2 + estimate.get("moments", 0)


def memory_line(estimate: Mapping[str, float]) -> str:
    """Format as ``estimated memory a device: 12.87 GiB (parameters 1.44, …; update: gradients 2.87, …)``."""
    phases = {
        "": tuple(_permanent(estimate)),
        "update: ": UPDATE,
        "optimizer's step: ": STEP,
        "sampling: ": SAMPLING,
    }
    texts = []
    for phase, names in phases.items():
        sizes = [f"{name} {estimate[name] / GIB:.2f}" for name in names if name in estimate]
        if sizes:
            texts.append(phase + ", ".join(sizes))
    return f"estimated memory a device: {peak_memory(estimate) / GIB:.2f} GiB ({'; '.join(texts)})"


def policy_line(config: Config, architecture: Architecture) -> str:
    """Return the policy's number of parameters, and with adapters that of the trained ones."""
    line = f"{architecture.model_type}, {architecture.num_parameters / 1e6:.2f}M parameters"
    if not config.policy.lora.rank:
        return line
    return f"{line}, and {trained_parameters(config, architecture) / 1e6:.2f}M trained ones of adapters"


def trained_parameters(config: Config, architecture: Architecture) -> int:
    """Return the number of parameters that are trained: with adapters, theirs alone."""
    trained = _shapes(architecture, Adapters.from_config(config.policy.lora)).abstract_trained
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def heads_warnings(architecture: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """Return a warning if ``mesh.tensor`` does not divide the key-value heads, else nothing."""
    tensor = mesh["tensor"]
    num_heads = architecture.num_kv_heads
    if num_heads % tensor == 0:
        return []
    return [
        f"warning: mesh.tensor is {tensor}, which does not divide the policy's {num_heads} key-value heads:"
        f" each device of the axis computes all of them; set it to a divisor of {num_heads}, and mesh.fsdp to"
        " the rest"
    ]


def _held_elements(abstract: Params, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return parameter path -> its elements on one device; an axis that the mesh does not divide is whole."""
    sizes = tuple(mesh[name] for name in MESH_AXES)
    shardings = param_shardings(abstract, AbstractMesh(sizes, MESH_AXES))

    def num_elements(leaf: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(leaf.shape))

    return flatten(jax.tree.map(num_elements, abstract, shardings))


class _Moments(NamedTuple):
    """Bytes of an optimizer's moments on one device."""

    permanent: float
    in_use: float  # with optimizer.offload: old and new moments that are on the device at once


def _optimizer_state(rule: OptimizerConfig, counts: Mapping[str, int], stored_bytes: int) -> _Moments:
    """Return the memory of the moments: two for each parameter, one where Muon orthogonalises.

    `counts` has the elements on one device by the parameter's path.
    """
    moments = {}  # elements of the moments by the parameter's path
    for path, count in counts.items():
        is_stacked_matrix = path.startswith("layers.") and path.endswith(STACKED_MATRICES)
        has_one_moment = rule.name == "muon" and is_stacked_matrix
        moments[path] = count if has_one_moment else 2 * count
    if rule.offload == "host":
        return _Moments(permanent=0.0, in_use=2 * peak_elements(moments.values()) * stored_bytes)
    return _Moments(permanent=sum(moments.values()) * stored_bytes, in_use=0.0)


def _update(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> dict[str, float]:
    """Return bytes that live between forward and backward pass, and the most that is computed at once.

    There are two moments of most memory. While the head computes gradients, the layers' do not exist yet.
    While the first layer computes them, the logits do not exist any more. The workspace is what either needs
    beside activations and all gradients.
    """
    policy = config.policy
    learner = config.learner
    compute_bytes = _compute_bytes(config)
    rows = learner.microbatch_rows / (mesh["data"] * mesh["fsdp"])  # on one device
    tokens = rows * learner.pack_length
    hidden = tokens * architecture.hidden_size * compute_bytes
    gathered_layers, _ = _gathered(config, architecture, mesh)
    is_gathered = mesh["fsdp"] > 1
    trains_all = not policy.lora.rank
    casts_weights = trains_all and policy.param_dtype != policy.compute_dtype
    kept = architecture.num_layers * tokens * _kept_width(architecture, mesh, policy.remat) * compute_bytes
    if policy.remat == "none" and casts_weights and not is_gathered:
        # The layers' weights in the precision in which they are used; gathered ones are gathered again.
        kept += _layer_parameters(architecture) * architecture.num_layers * compute_bytes / mesh["tensor"]
    chunk = _logprob_chunk(config)
    logits = rows * chunk * _share(architecture.vocab_size, mesh) * FLOAT32_BYTES
    head = architecture.vocab_size * architecture.hidden_size / mesh["tensor"]
    head_gradient = head * FLOAT32_BYTES if trains_all else 0.0
    head_weights = head * compute_bytes if casts_weights or is_gathered else 0.0
    # Logits and their gradient in half the bytes; states of all tokens.
    at_head = 1.5 * logits + head_gradient + head_weights + 3 * hidden
    at_layer = tokens * _backward_width(architecture, mesh) * compute_bytes
    if is_gathered:
        # Weights for the forward and for the backward pass, and gradients before they are divided.
        at_layer += (2 if trains_all else 1) * gathered_layers
        if trains_all and policy.attention != "splash":
            at_layer += GATHERED_OVERHEAD * tokens * _backward_width(architecture, mesh) * compute_bytes
    trained = _shapes(architecture, Adapters.from_config(policy.lora)).abstract_trained
    gradients = sum(_held_elements(trained, mesh).values()) * jnp.dtype(policy.param_dtype).itemsize
    return {
        "activations": kept,
        "workspace": max(at_layer - head_gradient / mesh["fsdp"], at_head - gradients, 0.0),
    }


def _logprob_chunk(config: Config) -> int:
    """Return the tokens of a row whose logits exist at once."""
    length = config.learner.pack_length
    if length <= config.policy.logprob_chunk:
        return length
    return min(config.policy.logprob_chunk, math.ceil(length / MIN_CHUNKS))


def layer_width(architecture: Architecture, mesh: Mapping[str, int]) -> float:
    """Return elements a token that the forward pass of one layer makes on one device."""
    heads = _share(architecture.num_heads, mesh) + _share(architecture.num_kv_heads, mesh)
    mlp = _share(architecture.intermediate_size, mesh)
    return 4 * architecture.hidden_size + 2 * heads * architecture.head_dim + 3 * mlp


def _backward_width(architecture: Architecture, mesh: Mapping[str, int]) -> float:
    """Return elements a token that exist at once while a layer's gradients are computed on one device."""
    mlp = _share(architecture.intermediate_size, mesh)
    heads = _share(architecture.num_heads, mesh) * architecture.head_dim
    return 5 * mlp + 12 * architecture.hidden_size + 6 * heads  # as XLA plans it for GPUs


def _kept_width(architecture: Architecture, mesh: Mapping[str, int], remat: str) -> float:
    """Return elements a token that one layer keeps for the backward pass on one device."""
    hidden = architecture.hidden_size  # of the layer's input, which is always kept
    heads = _share(architecture.num_heads, mesh)
    queries = heads * architecture.head_dim
    keys_and_values = 2 * _share(architecture.num_kv_heads, mesh) * architecture.head_dim
    mlp = _share(architecture.intermediate_size, mesh)
    statistics = 4 * heads  # of the softmax: two numbers of float32 for each head
    if remat == "attention":
        return hidden + queries + statistics
    if remat == "dots":  # queries, keys, values, attention and its projection; gate and up
        return 2 * hidden + 2 * queries + keys_and_values + 2 * mlp + statistics
    if remat == "none":  # and both norms, the sum after attention, and the product of the gate
        return 5 * hidden + 2 * queries + keys_and_values + 3 * mlp + statistics
    return hidden


def _layer_parameters(architecture: Architecture) -> float:
    """Return the mean number of a layer's parameters."""
    num_embeddings = 1 if architecture.tie_word_embeddings else 2
    embeddings = architecture.vocab_size * architecture.hidden_size * num_embeddings
    return (architecture.num_parameters - embeddings) / architecture.num_layers


def _gathered(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Return bytes of weights that a device gathers over `fsdp`: of layers (one ahead), and of the head."""
    if mesh["fsdp"] == 1:
        return 0.0, 0.0
    scale = _compute_bytes(config) / mesh["tensor"]
    head = architecture.vocab_size * architecture.hidden_size
    is_unrolled = architecture.num_layers <= MAX_UNROLLED_LAYERS
    num_layers = architecture.num_layers if is_unrolled else 2
    return num_layers * _layer_parameters(architecture) * scale, head * scale


def _sampler(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> dict[str, float]:
    """Return bytes of the KV cache of `CacheEngine`, and those that one call of it needs besides."""
    sampler = config.sampler
    length = config.rollout.max_length
    num_heads = architecture.num_heads
    if architecture.num_kv_heads % mesh["tensor"]:
        # The devices along `tensor` cannot divide the heads, so they divide the slots, as those along `fsdp`.
        mesh = {"data": mesh["data"], "fsdp": mesh["fsdp"] * mesh["tensor"], "tensor": 1}
    compute_bytes = _compute_bytes(config)
    slots = -(-sampler.slots // (mesh["data"] * mesh["fsdp"]))  # of one device, rounded up
    row_scores = 4 * sampler.prefill_chunk * num_heads * length  # bytes of a row's attention scores
    prefill_rows = TileShape.fitting(1, slots, sampler.prefill_chunk).rows
    score_rows = min(prefill_rows, max(1, SCORE_BYTES // row_scores))
    scores = row_scores * score_rows * _share(num_heads, mesh) / num_heads
    activations = prefill_rows * sampler.prefill_chunk * layer_width(architecture, mesh) * compute_bytes
    gathered_layers, gathered_head = _gathered(config, architecture, mesh)
    kv_heads = _share(architecture.num_kv_heads, mesh)
    cache = 2 * architecture.num_layers * slots * length * kv_heads * architecture.head_dim * compute_bytes
    if prefill_rows < slots:  # the rows are copied from the cache of one layer
        activations += cache / architecture.num_layers * prefill_rows / slots
    return {
        "kv cache": cache,
        "prefill": activations + 1.5 * scores + gathered_layers,
        "decode": 2 * slots * architecture.vocab_size * 4 + gathered_head,
    }


def _share(size: int, mesh: Mapping[str, int]) -> int:
    """Return a device's part of `size` along the tensor axis: all, if not divisible."""
    if size % mesh["tensor"]:
        return size
    return size // mesh["tensor"]


def device_lines(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """Return size, memory and warnings of a config on a mesh of this machine's devices."""
    num_devices = math.prod(mesh.values())
    lines = []
    if config.policy.remat == "auto":
        limit = device_limit(num_devices) / GAPS.get(jax.local_devices()[0].platform, 1.0)
        config = with_fitting_remat(config, architecture, mesh, limit)
        lines.append(f"policy.remat=auto: {config.policy.remat}, by the formula; training asks the compiler")
    estimate = estimate_memory(config, architecture, mesh)
    return [
        policy_line(config, architecture),
        *lines,
        memory_line(estimate),
        *memory_lines(peak_memory(estimate), num_devices),
        *heads_warnings(architecture, mesh),
    ]


def memory_lines(peak: float, devices: int) -> list[str]:
    """Return the keys to change if a device of this machine has less memory than is needed, else nothing.

    Args:
        peak: Bytes needed on one device.
        devices: Number of devices of the mesh.
    """
    num_present = jax.device_count()
    if devices > num_present:
        return [f"not checked: memory: the mesh has {devices} devices, and this machine {num_present}"]
    platform = jax.local_devices()[0].platform
    limit = device_limit(devices)
    room = f"the device has {limit / GIB:.1f} GiB"
    if platform == "cpu":
        room = f"this host has {limit * devices / GIB:.1f} GiB for {devices} device(s)"
    if not limit:
        return ["not checked: memory: the device does not say how much it has"]
    if peak > limit:
        return [f"failed: {peak / GIB:.1f} GiB a device do not fit: {room}; {REMEDY}"]
    gaps = GAPS.get(platform, 1.0)
    if peak * gaps > limit:
        return [f"warning: {room}, and programs can need {gaps} times the estimate; {REMEDY}"]
    return []


def device_limit(devices: int) -> float:
    """Return the bytes that this process may use on one device; 0: the device does not say.

    Args:
        devices: Number of devices of the mesh, which share the memory of a host without accelerators.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return host_memory() / devices
    return float((device.memory_stats() or {}).get("bytes_limit") or 0.0)


def with_fitting_remat(
    config: Config,
    architecture: Architecture,
    mesh: Mapping[str, int],
    limit: float,
    sampling: Config | None = None,
) -> Config:
    """Return the config with the fastest recomputation that fits by the formula, if `policy.remat` is auto.

    Args:
        config: The run's config.
        architecture: The policy's architecture.
        mesh: Sizes of the mesh by axis.
        limit: Bytes of one device, less the gaps between arrays (`GAPS`).
        sampling: As in `estimate_memory`.
    """
    if config.policy.remat != "auto":
        return config
    for remat in REMATS:
        chosen = _with_remat(config, remat)
        if peak_memory(estimate_memory(chosen, architecture, mesh, sampling)) <= limit:
            return chosen
    return _with_remat(config, REMATS[-1])


def _with_remat(config: Config, remat: Any) -> Config:
    return replace(config, policy=replace(config.policy, remat=remat))


def host_memory() -> float:
    """Return bytes that this process may use: the machine's, or the limit of its container."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for path in CGROUP_LIMITS:
        file = Path(path)
        text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
        if text.isdigit() and int(text):
            limits.append(float(text))
    return min(limits)
