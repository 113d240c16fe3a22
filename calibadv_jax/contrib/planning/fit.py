"""Whether a config fits the machine that it would run on, and which keys to change if it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import jax

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.memory import GAPS, GIB, memory_line, peak_memory

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, 1
CPU_COLUMNS = 2**18  # slots x tokens of the KV cache; a CPU reads up to all of them for a token of every slot
CPU_ROW = 2**12  # tokens of a learner's row on a CPU
LESS = "less of sampler.slots, rollout.max_length, learner.microbatch_rows and learner.row_length"


def memory_lines(estimate: Mapping[str, float], devices: int) -> list[str]:
    """The estimate, and if the device of this machine has less, what to change.

    Args:
        estimate: bytes on one device, see `estimate_memory`.
        devices: of the mesh. Those of a CPU share the host's memory.
    """
    lines, device = [memory_line(estimate)], jax.local_devices()[0]
    if devices > jax.device_count():
        return [
            *lines,
            f"not checked: whether that fits: the mesh has {devices} devices, and this machine"
            f" {jax.device_count()}",
        ]
    is_cpu = device.platform == "cpu"
    limit = host_memory() / devices if is_cpu else (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        return [*lines, "not checked: whether that fits: the device does not say how much memory it has"]
    peak, gaps = peak_memory(estimate), GAPS.get(device.platform, 1.0)
    has = f"the device has {limit / GIB:.1f} GiB"
    remedy = f"raise mesh.fsdp or mesh.tensor, or choose {LESS}"
    if is_cpu:
        has = f"this host has {host_memory() / GIB:.1f} GiB" + (
            f" for {devices} devices" if devices > 1 else ""
        )
        remedy = f"choose {LESS}, a smaller policy (policy.path), or another machine"
    if peak > limit:
        lines.append(f"failed: {peak / GIB:.1f} GiB a device do not fit: {has}; {remedy}")
    elif peak * gaps > limit:
        lines.append(
            f"warning: {has}, and programs can need {gaps} times the estimate (benchmarks/scale.md); {remedy}"
        )
    return lines


def host_memory() -> float:
    """Bytes that this process may use: the machine's, or the limit of its container."""
    found = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for path in map(Path, CGROUP_LIMITS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdigit() and int(text):
            found.append(float(text))
    return min(found)


def cpu_lines(config: Config) -> list[str]:
    """A warning if the devices are a CPU's, and the sizes are those of accelerators; else nothing."""
    if jax.local_devices()[0].platform != "cpu":
        return []
    rollout, sampler, learner = config.rollout, config.sampler, config.learner
    wanted: list[str] = []
    if sampler.name == "jax" and sampler.slots * rollout.max_length > CPU_COLUMNS:
        wanted.append(
            f"lower sampler.slots ({sampler.slots}) and rollout.max_length ({rollout.max_length}), whose"
            f" product is the KV cache, to a product of at most {CPU_COLUMNS}"
        )
    if learner.row_length > CPU_ROW:
        wanted.append(f"lower learner.row_length ({learner.row_length}) to at most {CPU_ROW}")
    if not wanted:
        return []
    if config.policy.compute_dtype == "bfloat16":
        wanted.append("set policy.compute_dtype=float32, which a CPU computes faster")
    return [
        f"warning: this machine computes on a CPU, and a few tokens would take minutes: {'; '.join(wanted)}."
        " --config configs/cpu.yaml, given last, does so for a trial"
    ]
