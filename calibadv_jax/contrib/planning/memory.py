"""Memory of one device, counted from shapes and shardings, and whether it fits.

The memory that programs need beyond their arrays is a formula; benchmarks/scale.md compares it with the
compilers' plans.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.learner.critic import make_critic
from calibadv_jax.learner.optimizer import STACKED_MATRICES, peak_elements
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.attention import SCORE_BYTES
from calibadv_jax.policy.sharding import MESH_AXES, param_shardings
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.policy.weights import flatten
from calibadv_jax.sampler.tiles import TileShape
from calibadv_jax.snapshots.huggingface import read_hf_config

# Files with the memory limit of a container: cgroup version 2, version 1.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
REMEDY = "lower sampler.slots, rollout.max_length, learner.microbatch_rows, learner.pack_length; add devices"
GIB = 1024**3
GAPS = {"tpu": 1.6}  # Largest ratio of a program's memory to that in use at once (benchmarks/scale.md).
UPDATE = ("gradients", "activations", "workspace")  # Arrays that exist only while gradients are computed.
STEP = ("moments",)  # With optimizer.offload: the moments on the device, beside the sum of the gradients.
SAMPLING = ("prefill", "decode")  # Arrays of one call of the embedded sampler: one of them at a time.
FLOAT32_BYTES = 4
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
        "gradients": num_trained * FLOAT32_BYTES * 2,  # the sum, and those of the microbatch
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
    teacher_folder = Path(config.teacher.policy)
    if config.teacher.has_own_weights and (teacher_folder / "config.json").is_file():
        teacher = architecture_from_hf(read_hf_config(teacher_folder), config.teacher.policy)
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
    """Return bytes that live between forward and backward pass, and the most that is computed at once."""
    policy = config.policy
    learner = config.learner
    compute_bytes = _compute_bytes(config)
    rows = learner.microbatch_rows / (mesh["data"] * mesh["fsdp"])  # on one device
    tokens = rows * learner.pack_length
    gathered_layers, gathered_head = _gathered(config, architecture, mesh)
    chunk = min(policy.logprob_chunk, learner.pack_length)
    logits = 3 * rows * chunk * _share(architecture.vocab_size, mesh) * FLOAT32_BYTES
    kept = tokens * _kept_width(architecture, mesh, policy.remat)
    if policy.remat == "none":  # the weights too, in the precision in which they are used
        kept += _layer_parameters(architecture) / mesh["tensor"]
    of_layer = 2 * tokens * layer_width(architecture, mesh) * compute_bytes + gathered_layers
    return {
        "activations": architecture.num_layers * kept * compute_bytes,
        "workspace": max(of_layer, logits + gathered_head),
    }


def layer_width(architecture: Architecture, mesh: Mapping[str, int]) -> float:
    """Return elements a token that the forward pass of one layer makes on one device."""
    heads = _share(architecture.num_heads, mesh) + _share(architecture.num_kv_heads, mesh)
    mlp = _share(architecture.intermediate_size, mesh)
    return 4 * architecture.hidden_size + 2 * heads * architecture.head_dim + 3 * mlp


def _kept_width(architecture: Architecture, mesh: Mapping[str, int], remat: str) -> float:
    """Return elements a token that one layer keeps for the backward pass on one device."""
    hidden = architecture.hidden_size
    head_dim = architecture.head_dim
    heads = _share(architecture.num_heads, mesh)
    kv_heads = _share(architecture.num_kv_heads, mesh)
    mlp = _share(architecture.intermediate_size, mesh)
    if remat == "full":  # the layer's input
        return hidden
    if remat == "dots":  # and the results of its matrix products
        return 3 * hidden + (heads + 2 * kv_heads) * head_dim + 2 * mlp
    return 13 * hidden + 6 * heads * head_dim + 5 * mlp  # fitted to one compiled update


def _layer_parameters(architecture: Architecture) -> float:
    """Return the mean number of a layer's parameters."""
    num_embeddings = 1 if architecture.tie_word_embeddings else 2
    embeddings = architecture.vocab_size * architecture.hidden_size * num_embeddings
    return (architecture.num_parameters - embeddings) / architecture.num_layers


def _gathered(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Return bytes of weights that a device gathers over `fsdp`: two layers (one ahead); the head."""
    if mesh["fsdp"] == 1:
        return 0.0, 0.0
    scale = _compute_bytes(config) / mesh["tensor"]
    head = architecture.vocab_size * architecture.hidden_size
    return 2 * _layer_parameters(architecture) * scale, head * scale


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
    estimate = estimate_memory(config, architecture, mesh)
    num_devices = math.prod(mesh.values())
    return [
        policy_line(config, architecture),
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
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        host_bytes = host_memory()
        limit = host_bytes / devices
        room = f"this host has {host_bytes / GIB:.1f} GiB for {devices} device(s)"
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit") or 0.0
        room = f"the device has {limit / GIB:.1f} GiB"
    if not limit:
        return ["not checked: memory: the device does not say how much it has"]
    if peak > limit:
        return [f"failed: {peak / GIB:.1f} GiB a device do not fit: {room}; {REMEDY}"]
    gaps = GAPS.get(device.platform, 1.0)
    if peak * gaps > limit:
        return [f"warning: {room}, and programs can need {gaps} times the estimate; {REMEDY}"]
    return []


def host_memory() -> float:
    """Return bytes that this process may use: the machine's, or the limit of its container."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for path in CGROUP_LIMITS:
        file = Path(path)
        text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
        if text.isdigit() and int(text):
            limits.append(float(text))
    return min(limits)


def find_architecture(config: Config) -> Architecture | None:
    """Return the architecture of policy.path, or of policy.init if there is no such folder.

    Returns:
        The architecture; None if the vocabulary's size is not known yet, because it is that of a tokenizer
        that may not exist.

    Raises:
        UserError: The policy is of a kind that is not supported.
    """
    folder = Path(config.policy.path)
    source = "policy.init"
    hf_config: dict[str, Any] = dict(config.policy.init)
    if config.policy.path and (folder / "config.json").is_file():
        source = f"{folder}/config.json"
        hf_config = read_hf_config(folder)
    if "vocab_size" not in hf_config:
        return None
    return architecture_from_hf(hf_config, source)
