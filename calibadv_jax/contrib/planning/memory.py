"""Memory of one device, counted from shapes and shardings, and whether it fits.

What programs need besides is a formula; benchmarks/scale.md sets it beside the compilers' plans.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.learner.critic import critic_of
from calibadv_jax.learner.optimizer import STACKED_MATRICES, most_at_once
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.attention import SCORE_BYTES
from calibadv_jax.policy.sharding import MESH_AXES, param_shardings
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.policy.weights import flatten
from calibadv_jax.sampler.prefixes import TileShape
from calibadv_jax.snapshots.huggingface import read_hf_config

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, 1
REMEDY = "lower sampler.slots, rollout.max_length, learner.microbatch_rows, learner.pack_length; add devices"
GIB = 1024**3
GAPS = {"tpu": 1.6}  # largest ratio of a program's memory to that in use at once (benchmarks/scale.md)
UPDATE = ("gradients", "activations", "workspace")  # live while gradients are computed only
STEP = ("moments",)  # with optimizer.offload: in use, live beside the sum of the gradients
SAMPLING = ("prefill", "decode")  # live while the embedded sampler works only; one of them at a time
_critic_of = lru_cache(maxsize=8)(critic_of)


def estimate_memory(
    config: Config, architecture: Architecture, mesh: Mapping[str, int], sampling: Config | None = None
) -> dict[str, float]:
    """Return bytes on one device by purpose; `peak_memory` gives the bytes at once.

    `sampling`: of several processes, the config of one's embedded sampler, with its mesh and slots.
    """
    stored, lora = jnp.dtype(config.policy.param_dtype).itemsize, config.policy.lora
    policy = _shapes(architecture, Adapters.from_config(lora))
    frozen, trained = (_held_elements(part, mesh) for part in policy.split(policy.abstract_params))
    held, frozen_count = sum(trained.values()), sum(frozen.values())
    optimizer, moments = _optimizer_state(config.learner.optimizer, trained, stored)
    estimate = {
        "parameters": held * stored,
        "optimizer": optimizer,
        "gradients": held * 4 * 2,  # accumulated, and those of the microbatch
        **_update(config, architecture, mesh),
    }
    if frozen:
        estimate["base"] = frozen_count * jnp.dtype(lora.base_dtype).itemsize
    if config.advantage.has_critic:  # trained after the policy; its update needs no more
        counts = _held_elements(_critic_of(policy).abstract_trained, mesh)
        estimate["critic"] = sum(counts.values()) * stored
        optimizer, critic_moments = _optimizer_state(config.critic.optimizer, counts, stored)
        if optimizer:
            estimate["critic's optimizer"] = optimizer
        moments = max(moments, critic_moments)
    if moments:
        estimate["moments"] = moments
    if config.keeps_initial_policy and (not frozen or lora.init_from):  # new adapters: the base itself
        estimate["reference policy"] = held * stored
    if config.sampler.name == "jax":  # vLLM's workers have their own memory
        sampler_mesh = sampling.mesh.sizes if sampling else mesh
        weights = sum(_held_elements(policy.abstract_params, sampler_mesh).values())
        if sampling is None and shares_base(config):
            weights -= frozen_count
        estimate["sampler weights"] = weights * _computed_bytes(config)
        estimate |= _sampler(sampling or config, architecture, sampler_mesh)
    return estimate


def _computed_bytes(config: Config) -> int:
    return int(jnp.dtype(config.policy.compute_dtype).itemsize)


@lru_cache(maxsize=8)
def _shapes(architecture: Architecture, adapters: Adapters | None) -> Policy:
    """Return a policy whose parameters have shapes only; building it takes a tenth of a second."""
    return Policy(architecture, Numerics(), adapters)


def shares_base(config: Config) -> bool:
    """Return whether the embedded sampler of a run in one process uses the learner's own frozen base."""
    return bool(config.policy.lora.rank) and config.policy.lora.base_dtype == config.policy.compute_dtype


def peak_memory(estimate: Mapping[str, float]) -> float:
    """Return bytes on a device at the worst moment: permanent ones, and an update or a sampler call."""
    update = sum(estimate[name] for name in UPDATE)
    sampling = max(estimate.get(name, 0) for name in SAMPLING)
    return sum(_permanent(estimate).values()) + max(update, _step(estimate), sampling)


def _permanent(estimate: Mapping[str, float]) -> dict[str, float]:
    return {name: size for name, size in estimate.items() if name not in UPDATE + STEP + SAMPLING}


def program_memory(estimate: Mapping[str, float], shares_base: bool = False) -> dict[str, float]:
    """Return bytes on a device of the trainer's programs by themselves, to compare with a compiler's plan."""
    base, update = estimate.get("base", 0), sum(estimate[name] for name in UPDATE)
    held = estimate["parameters"] + base + estimate["optimizer"]
    programs = {"update": held + update, "apply": held + _step(estimate)}
    if "critic" in estimate:
        held = estimate["critic"] + base + estimate.get("critic's optimizer", 0.0)
        programs |= {"critic's update": held + update, "critic's apply": held + _step(estimate)}
    if "kv cache" in estimate:
        cache = estimate["sampler weights"] + (base if shares_base else 0) + estimate["kv cache"]
        programs |= {name: cache + estimate[name] for name in SAMPLING}
    return programs


def held_beside(estimate: Mapping[str, float], program: str, shares_base: bool = False) -> float:
    """Return bytes on a device beside a program (of `program_memory` or log-probabilities) and its inputs."""
    arguments: tuple[str, ...] = {
        "update": ("parameters", "base", "optimizer"),
        "apply": ("parameters", "optimizer"),
        "log-probabilities": ("parameters", "base"),
        "critic's update": ("critic", "base", "critic's optimizer"),
        "critic's apply": ("critic", "critic's optimizer"),
    }.get(program, ("sampler weights", "kv cache"))
    if shares_base and "kv cache" in arguments:
        arguments += ("base",)
    return sum(size for name, size in _permanent(estimate).items() if name not in arguments)


def _step(estimate: Mapping[str, float]) -> float:
    """Return bytes that the optimizer's step adds: the gradients' sum, and moments from the host."""
    return estimate["gradients"] / 2 + estimate.get("moments", 0)


def memory_line(estimate: Mapping[str, float]) -> str:
    """Format as ``estimated memory a device: 12.87 GiB (parameters 1.44, …; update: gradients 2.87, …)``."""
    phases = {"": tuple(_permanent(estimate)), "update: ": UPDATE}
    phases |= {"optimizer's step: ": STEP, "sampling: ": SAMPLING}
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
    trained = _shapes(architecture, Adapters.from_config(config.policy.lora)).abstract_trained
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def heads_warnings(architecture: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """Return a warning if ``mesh.tensor`` does not divide the key-value heads, else nothing."""
    tensor, heads = mesh["tensor"], architecture.num_kv_heads
    if heads % tensor == 0:
        return []
    return [
        f"warning: mesh.tensor is {tensor}, which does not divide the policy's {heads} key-value heads: each"
        f" device of the axis computes all of them; set it to a divisor of {heads}, and mesh.fsdp to the rest"
    ]


def _held_elements(abstract: Params, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return parameter path -> its elements on one device; an axis that the mesh does not divide is whole."""
    axes = AbstractMesh(tuple(mesh[name] for name in MESH_AXES), MESH_AXES)
    shardings = param_shardings(abstract, axes)
    return flatten(
        jax.tree.map(lambda leaf, own: math.prod(own.shard_shape(leaf.shape)), abstract, shardings)
    )


def _optimizer_state(rule: OptimizerConfig, counts: Mapping[str, int], stored: int) -> tuple[float, float]:
    """Return bytes of the moments on one device, permanent and, with offload, in use: old and new ones.

    Each parameter has two moments, one where Muon orthogonalises.
    """
    moments = {
        path: size
        if rule.name == "muon" and path.startswith("layers.") and path.endswith(STACKED_MATRICES)
        else 2 * size
        for path, size in counts.items()
    }
    if rule.offload == "host":
        return 0.0, 2 * most_at_once(moments.values()) * stored
    return sum(moments.values()) * stored, 0.0


def _update(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> dict[str, float]:
    """Return bytes that live between forward and backward pass, and the most that is computed at once."""
    a, policy, learner, computed = architecture, config.policy, config.learner, _computed_bytes(config)
    rows = learner.microbatch_rows / (mesh["data"] * mesh["fsdp"])
    tokens = rows * learner.pack_length
    layers, head = _gathered(config, a, mesh)
    logits = 3 * rows * min(policy.logprob_chunk, learner.pack_length) * _share(a.vocab_size, mesh) * 4
    kept = tokens * _kept_width(a, mesh, policy.remat)
    if policy.remat == "none":  # the weights too, in the precision that they are used in
        kept += _layer_parameters(a) / mesh["tensor"]
    return {
        "activations": a.num_layers * kept * computed,
        "workspace": max(2 * tokens * layer_width(a, mesh) * computed + layers, logits + head),
    }


def layer_width(architecture: Architecture, mesh: Mapping[str, int]) -> float:
    """Return elements a token that the forward pass of one layer makes on one device."""
    a = architecture
    heads = _share(a.num_heads, mesh) + _share(a.num_kv_heads, mesh)
    return 4 * a.hidden_size + 2 * heads * a.head_dim + 3 * _share(a.intermediate_size, mesh)


def _kept_width(a: Architecture, mesh: Mapping[str, int], remat: str) -> float:
    heads, kv_heads, mlp = (_share(size, mesh) for size in (a.num_heads, a.num_kv_heads, a.intermediate_size))
    if remat == "full":  # the layer's input
        return a.hidden_size
    if remat == "dots":  # and the results of its matrix products
        return 3 * a.hidden_size + (heads + 2 * kv_heads) * a.head_dim + 2 * mlp
    return 13 * a.hidden_size + 6 * heads * a.head_dim + 5 * mlp  # fitted to one compiled update


def _layer_parameters(a: Architecture) -> float:
    embeddings = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
    return (a.num_parameters - embeddings) / a.num_layers


def _gathered(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Return bytes of weights that a device gathers over `fsdp`: two layers (one ahead); the head."""
    if mesh["fsdp"] == 1:
        return 0.0, 0.0
    scale = _computed_bytes(config) / mesh["tensor"]
    head = architecture.vocab_size * architecture.hidden_size
    return 2 * _layer_parameters(architecture) * scale, head * scale


def _sampler(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> dict[str, float]:
    """Return bytes of the KV cache of `CacheEngine`, and those that one call of it needs besides."""
    a, sampler, length = architecture, config.sampler, config.rollout.max_length
    if a.num_kv_heads % mesh["tensor"]:  # its devices have slots of their own, as those of fsdp
        mesh = {"data": mesh["data"], "fsdp": mesh["fsdp"] * mesh["tensor"], "tensor": 1}
    computed = _computed_bytes(config)
    slots = -(-sampler.slots // (mesh["data"] * mesh["fsdp"]))
    of_row = 4 * sampler.prefill_chunk * a.num_heads * length
    rows = TileShape.fitting(1, slots, sampler.prefill_chunk).rows  # of prefill
    scores = of_row * min(rows, max(1, SCORE_BYTES // of_row)) * _share(a.num_heads, mesh) / a.num_heads
    new = rows * sampler.prefill_chunk * layer_width(a, mesh) * computed
    layers, head = _gathered(config, a, mesh)
    cache = 2 * a.num_layers * slots * length * _share(a.num_kv_heads, mesh) * a.head_dim * computed
    if rows < slots:  # they are taken out of one layer's cache
        new += cache / a.num_layers * rows / slots
    return {
        "kv cache": cache,
        "prefill": new + 1.5 * scores + layers,
        "decode": 2 * slots * a.vocab_size * 4 + head,
    }


def _share(size: int, mesh: Mapping[str, int]) -> int:
    """Return a device's part of `size` along the tensor axis: all, if not divisible."""
    return size if size % mesh["tensor"] else size // mesh["tensor"]


def device_lines(config: Config, architecture: Architecture, mesh: Mapping[str, int]) -> list[str]:
    """Return size, memory and warnings of a config on a mesh of this machine's devices."""
    estimate = estimate_memory(config, architecture, mesh)
    lines = [policy_line(config, architecture), memory_line(estimate)]
    lines += memory_lines(peak_memory(estimate), math.prod(mesh.values()))
    return lines + heads_warnings(architecture, mesh)


def memory_lines(peak: float, devices: int) -> list[str]:
    """Return the keys to change if a device of this machine has less than `peak` bytes, else nothing."""
    device, present = jax.local_devices()[0], jax.device_count()
    if device.platform == "cpu":
        limit = host_memory() / devices
        room = f"this host has {host_memory() / GIB:.1f} GiB for {devices} device(s)"
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit") or 0.0
        room = f"the device has {limit / GIB:.1f} GiB"
    gaps = GAPS.get(device.platform, 1.0)
    if devices > present:
        return [f"not checked: memory: the mesh has {devices} devices, and this machine {present}"]
    if not limit:
        return ["not checked: memory: the device does not say how much it has"]
    if peak > limit:
        return [f"failed: {peak / GIB:.1f} GiB a device do not fit: {room}; {REMEDY}"]
    if peak * gaps > limit:
        return [f"warning: {room}, and programs can need {gaps} times the estimate; {REMEDY}"]
    return []


def host_memory() -> float:
    """Return bytes that this process may use: the machine's, or the limit of its container."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for path in map(Path, CGROUP_LIMITS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdigit() and int(text):
            limits.append(float(text))
    return min(limits)


def find_architecture(config: Config) -> Architecture | None:
    """Return the architecture of policy.path if it exists, else of policy.init; None if incomplete."""
    folder, source = Path(config.policy.path), "policy.init"
    hf_config: dict[str, Any] = dict(config.policy.init)
    if config.policy.path and (folder / "config.json").is_file():
        hf_config, source = read_hf_config(folder), f"{folder}/config.json"
    if "vocab_size" not in hf_config:  # as large as the tokenizer, which may not exist yet
        return None
    return architecture_from_hf(hf_config, source)
