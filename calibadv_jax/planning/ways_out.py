"""Which keys to change where a run does not fit its devices, by the doctor's formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.planning.hardware import Target, sampler_of
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.run.memory import GAPS, GIB, estimate_memory, peak_memory

Changes = dict[str, Any]  # dotted key -> value


def changed(config: Config, changes: Changes) -> Config:
    """The config with other values.

    Raises:
        ValidationError: they cannot be.
    """
    parts: dict[str, Changes] = {}
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        parts.setdefault(section, {})[rest] = value
    return replace(config, **{name: _section(getattr(config, name), keys) for name, keys in parts.items()})


def _section(section: Any, changes: Changes) -> Any:
    deep = {key: value for key, value in changes.items() if "." in key}
    flat = {key: value for key, value in changes.items() if key not in deep}
    for key, value in deep.items():
        name, _, rest = key.partition(".")
        flat[name] = _section(flat.get(name, getattr(section, name)), {rest: value})
    return replace(section, **flat)


def memory_of(config: Config, architecture: Architecture, target: Target) -> dict[str, float]:
    """Bytes on one device by purpose, as the doctor counts them; of several hosts each has its own sampler.

    Args:
        config: `placed_on` the target.

    Raises:
        UserError: the sampler's part of the mesh does not fit a host.
    """
    apart = sampler_of(config, target) if target.hosts > 1 and config.sampler.name == "jax" else None
    return estimate_memory(config, architecture, config.mesh.sizes, apart)


def ways_out(config: Config, architecture: Architecture, target: Target, limit: float) -> list[str]:
    """One line for each change that makes it fit; one line that none does.

    Args:
        config: placed on the devices.
        limit: bytes of a device.
    """
    gaps = GAPS.get(target.platform, 1.0)
    lines = []
    for changes in _candidates(config, architecture, target.hosts):
        try:
            needed = peak_memory(memory_of(changed(config, changes), architecture, target)) * gaps
        except (ValidationError, UserError):  # it needs more changes than this
            continue
        if needed <= limit:
            said = " ".join(f"{key}={value}" for key, value in changes.items())
            lines.append(f"would fit: {said} ({needed / GIB:.1f} GiB by the formula{_times(gaps)})")
    return lines or [
        "none of policy.remat, learner.microbatch_rows, learner.row_length, mesh, sampler and"
        " learner.optimizer.offload makes it fit: take more devices, larger ones, or adapters"
        " (policy.lora.rank=16)"
    ]


def _times(gaps: float) -> str:
    return f", with {gaps} times for gaps" if gaps > 1 else ""


def _candidates(config: Config, architecture: Architecture, hosts: int) -> Iterator[Changes]:
    """Changes that leave alone what is learned, those that cost least first."""
    mesh, learner, sampler = config.mesh, config.learner, config.sampler
    shards = mesh.data * mesh.fsdp
    if config.policy.remat != "full":
        yield {"policy.remat": "full"}
    if learner.microbatch_rows > shards:
        yield {"learner.microbatch_rows": shards}
    if learner.row_length > config.rollout.max_length:
        yield {"learner.row_length": config.rollout.max_length}
    if mesh.data > 1:
        yield {"mesh.data": 1, "mesh.fsdp": shards}
    if sampler.name == "jax" and sampler.slots > shards:
        yield {"sampler.slots": shards}
    for tensor in (2, 4, 8):
        if mesh.tensor == 1 and mesh.fsdp % tensor == 0 and architecture.num_kv_heads % tensor == 0:
            rows = learner.microbatch_rows // tensor
            yield {"mesh.fsdp": mesh.fsdp // tensor, "mesh.tensor": tensor, "learner.microbatch_rows": rows}
    apart: Changes = {"sampler.name": "vllm"} | ({"sampler.workers": hosts} if hosts > 1 else {})
    if sampler.name == "jax":
        yield apart
    if learner.optimizer.offload == "none":
        yield {"learner.optimizer.offload": "host"}
        if sampler.name == "jax":
            yield apart | {"learner.optimizer.offload": "host"}
