"""The cost of a run on devices that you do not have yet: ``calibadv plan --config FILE --tpu v5e:4x4``.

Exit status 1 if it does not fit; the keys to change are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning import compiled, memory
from calibadv_jax.contrib.planning.hardware import Target, find_target, placed_on, sampler_of
from calibadv_jax.contrib.planning.memory import GAPS, GIB, estimate_memory, find_architecture, peak_memory
from calibadv_jax.contrib.planning.work import Step, expected_rollouts, step_of
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.distributed.joining import own_workers
from calibadv_jax.metrics.console import Console, duration, number, table
from calibadv_jax.policy.architecture import Architecture

Changes = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class RunPlan:
    config: Config  # placed on the devices
    target: Target
    architecture: Architecture
    estimate: dict[str, float]  # bytes of a device by purpose
    step: Step
    efficiency: float
    seconds: float  # of a step
    device_hours: float  # of the trainer's devices, and of those of workers that run elsewhere


def run(
    config: Config,
    tpu: str = "",
    gpu: str = "",
    topology: str = "",
    efficiency: float = 0.4,
    tokens: int = 0,
    sampled: int = 0,
    estimate: bool = False,
    json: str = "",
) -> None:
    """Print the plan; OPTIONS of cli.py describes the arguments."""
    console = Console(config.log.progress)
    plan = make_plan(config, find_target(tpu, gpu, topology), efficiency, tokens, sampled)
    mesh = plan.config.mesh.sizes
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    console.say(f"{plan.target}, mesh {shape}: {memory.policy_line(plan.config, plan.architecture)}")
    for line in (memory.memory_line(plan.estimate), *memory.heads_warnings(plan.architecture, mesh)):
        console.say(line)
    programs = {} if estimate else compile_programs(plan, console)
    lines, fits = memory_verdict(plan, programs)
    for line in [*lines, *work_lines(plan)]:
        console.say(line)
    if json:
        write_json(Path(json), figures(plan, programs) | {"fits": fits})
    if not fits:
        raise SystemExit(1)


def make_plan(
    config: Config, target: Target, efficiency: float, tokens: int = 0, sampled: int = 0
) -> RunPlan:
    """Compute everything that needs no compiler; raises as `run`."""
    if not 0 < efficiency <= 1:
        raise UserError(f"--efficiency {efficiency:g}: must be above 0, and at most 1")
    config = placed_on(config, target)
    if target.hosts > 1:  # each has a process
        own_workers(config.sampler, 0, target.hosts)
    architecture = find_architecture(config)
    if architecture is None:
        raise UserError(
            f"policy.path is {config.policy.path or 'empty'}, where no config.json is: name a folder that has"
            " one, or give the policy's shape in policy.init (its config.json, vocab_size too)"
        )
    estimate = memory_of(config, architecture, target)
    step = step_of(config, architecture, expected_rollouts(config, tokens, sampled), target)
    seconds = step.seconds(target, efficiency)
    sampling = max((part.devices for part in step.parts if part.name == "decode"), default=0)
    devices = target.devices + (sampling if config.sampler.urls else 0)
    hours = config.learner.steps * seconds * devices / 3600
    return RunPlan(config, target, architecture, estimate, step, efficiency, seconds, hours)


def compile_programs(plan: RunPlan, console: Console) -> dict[str, dict[str, Any]]:
    """Return `compiled_figures` of each program, with the memory that lies beside it on a device."""
    results, shares = {}, memory.shares_base(plan.config) and plan.target.hosts == 1
    trained = plan.config, plan.target, compiled.TRAINED + compiled.OF_CRITIC
    sampled = sampler_of(plan.config, plan.target), plan.target.host, compiled.SAMPLED  # on one host
    for config, target, group in (trained, sampled):
        names = [name for name in compiled.programs_of(config) if name in group]
        if names:
            mesh = compiled.topology_mesh(config, target)
        for name in names:
            with console.phase(f"compiling for {target}: {name}", announce=True):
                program = compiled.lowered_program(config, plan.architecture, mesh, name)
                beside = memory.held_beside(plan.estimate, name, shares)
                results[name] = compiled.compiled_figures(program, beside)
    return results


def memory_verdict(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Return the compiler's figures, or else the formula's; and the keys to change if it does not fit."""
    limit, gaps = plan.target.limit, GAPS.get(plan.target.platform, 1.0)
    expected, scale = peak_memory(plan.estimate), 1.0
    room = f"{limit / GIB:.1f} GiB of a device"
    if programs:
        columns = ("arguments", "peak", "needed")
        rows = [(name, *(sizes.get(key, "refused") for key in columns)) for name, sizes in programs.items()]
        headers = ("program", "arguments GiB", "in use at once", "needed, with all that lies beside it")
        # The compiler does not say how much a refused program needs: more than there is.
        refused = 1.1 * gaps * max(limit, expected) / GIB
        needed = {name: sizes.get("needed", refused) * GIB for name, sizes in programs.items()}
        large = [name for name, size in needed.items() if size > limit]
        fits, scale = not large, max(1.0, max(needed.values()) / expected)
        verdict = f"fits {room}" if fits else f"does not fit {room}: {', '.join(large)}"
        lines = [table(rows, headers), verdict]
    else:
        fits = expected <= limit
        lines = [f"{'fits' if fits else 'does not fit'} {room}, by the formula"]
        if fits and expected * gaps > limit:
            lines.append(f"programs may need up to {gaps} times as much: compile it (leave --estimate out)")
    if not fits:
        lines.append(remedy(plan.config, plan.architecture, plan.target, limit / scale))
    return lines, fits


def work_lines(plan: RunPlan) -> list[str]:
    step, rollouts, learner = plan.step, plan.step.rollouts, plan.config.learner
    rows = []
    for part in step.parts:
        counts = part.flops, part.memory * part.devices, part.received * part.devices
        seconds = number(part.seconds(plan.target, plan.efficiency))
        rows.append((part.name, *(f"{count:.2e}" for count in counts), seconds))
    overlap = ", rollouts and update at the same time" if step.overlap else ""
    return [
        f"a step: {rollouts.trajectories} trajectories of {rollouts.tokens} tokens, {rollouts.sampled} of"
        f" them sampled (--tokens, --sampled), which fill {step.fill:.0%} of the update's rows",
        table(rows, ("part", "operations", "bytes of memory", "bytes between devices", "seconds")),
        f"at efficiency {plan.efficiency:g}: {number(plan.seconds)} s a step{overlap},"
        f" {step.trained / plan.seconds:.0f} tokens/s",
        f"{learner.steps} steps: {duration(learner.steps * plan.seconds)}, {number(plan.device_hours)} device"
        " hours",
        "not counted: retrieval, publishing weights, checkpoints, evaluations, compiling",
    ]


def figures(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "devices": plan.target.devices,
        "kind": plan.target.kind,
        "topology": plan.target.topology,
        "limit": plan.target.limit,
        "memory": plan.estimate,
        "peak": peak_memory(plan.estimate),
        "programs": programs,
        "trajectories": vars(plan.step.rollouts),
        "fill": plan.step.fill,
        "parts": [vars(part) for part in plan.step.parts],
        "efficiency": plan.efficiency,
        "seconds": plan.seconds,
        "tokens_per_second": plan.step.trained / plan.seconds,
        "device_hours": plan.device_hours,
    }


def memory_of(config: Config, architecture: Architecture, target: Target) -> dict[str, float]:
    """Return bytes on one device of a placed config by purpose; each of several hosts has its own sampler."""
    sampler = sampler_of(config, target) if target.hosts > 1 else None
    return estimate_memory(config, architecture, config.mesh.sizes, sampler)


def remedy(config: Config, architecture: Architecture, target: Target, limit: float) -> str:
    """Return a line with overrides of a placed config that fit, or with other ways out if none do.

    Until the formula's bytes are within `limit`, the cheapest change that saves memory is added.
    """
    changes: Changes = {}
    size = peak_memory(memory_of(config, architecture, target))
    while size > limit:
        for change in memory_savers(config, architecture, target.hosts):
            with suppress(ValidationError, UserError):  # it does not go together with another key
                smaller = changed(config, change)
                smaller_size = peak_memory(memory_of(smaller, architecture, target))
                if smaller_size < size:
                    config, size, changes = smaller, smaller_size, changes | change
                    break
        else:
            adapters = "" if config.policy.lora.rank else ", or train adapters (policy.lora.rank)"
            return (
                "no combination of learner.pack_length, learner.microbatch_rows, policy.remat, mesh,"
                f" optimizer.offload and sampler fits (the least: {size / GIB:.1f} GiB by the formula): take"
                f" more devices or larger ones{adapters}"
            )
    workers = ""
    if "sampler.name" in changes:
        changes.pop("sampler.slots", None)
        workers = "; vLLM's workers have devices of their own"
    overrides = " ".join(f"{key}={value}" for key, value in changes.items())
    return f"would fit: {overrides} ({size / GIB:.1f} GiB by the formula{workers})"


def memory_savers(config: Config, architecture: Architecture, hosts: int) -> list[Changes]:
    """Return the next step of each change that saves memory and changes no result, the cheapest first.

    A key that cannot go further keeps its value.
    """
    mesh, slots, rows = config.mesh, config.sampler.slots, config.learner.microbatch_rows
    shards, tensor = mesh.data * mesh.fsdp, 2 * mesh.tensor
    changes: list[Changes] = [
        {"learner.pack_length": min(config.learner.pack_length, config.rollout.max_length)},
        {"learner.microbatch_rows": max(1, rows // 2 // shards) * shards},
        {"policy.remat": "full"},
        {"mesh.data": 1, "mesh.fsdp": shards},
        {"learner.optimizer.offload": "host"},
        {"critic.optimizer.offload": "host"},
    ]
    if mesh.fsdp % 2 == 0 and architecture.num_kv_heads % tensor == 0:
        split = {"mesh.fsdp": mesh.fsdp // 2, "mesh.tensor": tensor, "learner.microbatch_rows": rows // 2}
        changes.append(split)
    if config.sampler.name == "jax":
        changes.append({"sampler.slots": max(1, slots // 2 // shards) * shards})
        changes.append({"sampler.name": "vllm"} | ({"sampler.workers": hosts} if hosts > 1 else {}))
    return changes


def changed(section: Any, changes: Changes) -> Any:
    """Return a config or section with other values by dotted key; ValidationError if one is invalid."""
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if inner:
            value = changed(getattr(section, name), {inner: value})
        section = replace(section, **{name: value})
    return section
