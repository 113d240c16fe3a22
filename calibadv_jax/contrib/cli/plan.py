"""The cost of a run on devices that you do not have yet: ``calibadv plan --config FILE --tpu v5e:4x4``.

Exit status 1 if it does not fit; the keys to change are named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning import compiled, memory
from calibadv_jax.contrib.planning.efficiency import Efficiency, efficiency_of
from calibadv_jax.contrib.planning.hardware import Target, find_target, placed_on, sampler_of
from calibadv_jax.contrib.planning.known_models import find_architecture
from calibadv_jax.contrib.planning.memory import GAPS, GIB, estimate_memory, peak_memory, with_fitting_remat
from calibadv_jax.contrib.planning.work import Step, expected_rollouts, step_of
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.distributed.joining import workers_of_process
from calibadv_jax.metrics.console import Console, duration, number, table
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.recomputation import REMATS

Changes = dict[str, Any]  # dotted key -> value

# A program that the compiler refuses needs more memory than there is, but the compiler does not say how much.
# The plan assumes this multiple of the memory that there is.
REFUSED_FACTOR = 1.1


@dataclass(frozen=True)
class RunPlan:
    """Memory, time and device hours of a run on devices, without the compiler's figures."""

    config: Config  # placed on the devices
    target: Target
    architecture: Architecture
    source: str  # of the architecture, in words
    estimate: dict[str, float]  # bytes on one device, by purpose
    step: Step
    efficiency: Efficiency  # shares of the devices' peak speed
    seconds: float  # duration of a step
    device_hours: float  # hours of the trainer's devices, and of the devices of workers that run elsewhere


def run(
    config: Config,
    tpu: str = "",
    gpu: str = "",
    topology: str = "",
    efficiency: float = 0.0,
    tokens: int = 0,
    sampled: int = 0,
    estimate: bool = False,
    json: str = "",
) -> None:
    """Print the plan; OPTIONS of cli.py describes the arguments.

    Raises:
        UserError: the devices are unknown, the config does not fit them, or no policy is named.
        SystemExit: with status 1 if the run does not fit into the devices' memory.
    """
    console = Console(config.log.progress)
    plan = make_plan(config, find_target(tpu, gpu, topology), efficiency, tokens, sampled)
    mesh = plan.config.mesh.sizes
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    console.say(f"{plan.target}, mesh {shape}: {memory.policy_line(plan.config, plan.architecture)}")
    console.say(f"shape of {plan.source}")
    if config.policy.remat == "auto":
        console.say(
            f"policy.remat=auto: {plan.config.policy.remat}, by the formula; training asks the compiler"
        )
    console.say(memory.memory_line(plan.estimate))
    for line in memory.heads_warnings(plan.architecture, mesh):
        console.say(line)
    programs: dict[str, dict[str, Any]] = {}
    if not estimate:
        programs = compile_programs(plan, console)
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
    """Compute everything that needs no compiler.

    Args:
        config: the config of the run.
        target: the devices.
        efficiency: share of the devices' peak speed, at most 1; 0: as measured, else an assumption.
        tokens: mean number of tokens of a trajectory; 0: the most that the config allows.
        sampled: of these, the sampled ones; 0: the most that the config allows.

    Raises:
        UserError: the efficiency is out of range, the config does not fit the devices, or no policy is named.
    """
    config = placed_on(config, target)
    if target.hosts > 1:  # each host has a process, which must have workers of its own
        workers_of_process(config.sampler, 0, target.hosts)
    planned = find_architecture(config)
    if planned is None:
        raise UserError(
            f"the shape of {config.policy.path or 'the policy'} is not complete: name a folder with a"
            " config.json in policy.path, or give its fields in policy.init, vocab_size too"
        )
    architecture = planned.architecture
    sampler = sampler_of(config, target) if target.hosts > 1 else None
    limit = target.limit / GAPS.get(target.platform, 1.0)
    config = with_fitting_remat(config, architecture, config.mesh.sizes, limit, sampler)
    estimate = memory_of(config, architecture, target)
    rollouts = expected_rollouts(config, tokens, sampled)
    step = step_of(config, architecture, rollouts, target)
    shares = efficiency_of(efficiency, architecture, target, config.sampler.name == "jax")
    seconds = step.seconds(target, shares)
    num_devices = target.devices
    if config.sampler.urls:  # the workers run elsewhere
        num_devices += max((part.devices for part in step.parts if part.name == "decode"), default=0)
    device_hours = config.learner.steps * seconds * num_devices / 3600
    return RunPlan(
        config, target, architecture, planned.source, estimate, step, shares, seconds, device_hours
    )


def compile_programs(plan: RunPlan, console: Console) -> dict[str, dict[str, Any]]:
    """Return `compiled_figures` of each program, with the memory that lies beside it on a device."""
    sampler_config = sampler_of(plan.config, plan.target)
    sampler_target = plan.target.host  # each host samples for itself
    trainer_programs = compiled.LEARNER_PROGRAMS + compiled.CRITIC_PROGRAMS
    figures_by_program = _compile_group(plan, plan.config, plan.target, trainer_programs, console)
    figures_by_program |= _compile_group(
        plan, sampler_config, sampler_target, compiled.SAMPLER_PROGRAMS, console
    )
    return figures_by_program


def _compile_group(
    plan: RunPlan, config: Config, target: Target, group: Sequence[str], console: Console
) -> dict[str, dict[str, Any]]:
    """Compile those programs of the group that the config uses."""
    names = [name for name in compiled.programs_of(config) if name in group]
    if not names:
        return {}
    mesh = compiled.topology_mesh(config, target)
    # Whether the sampler computes with the base tensors of the trainer, so that they count once.
    shares_base = memory.shares_base(plan.config) and plan.target.hosts == 1
    results = {}
    for name in names:
        with console.phase(f"compiling for {target}: {name}", announce=True):
            program = compiled.lowered_program(config, plan.architecture, mesh, name)
            beside = memory.memory_beside(plan.estimate, name, shares_base)
            results[name] = compiled.compiled_figures(program, beside)
    return results


def memory_verdict(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Say whether the run fits into the devices' memory.

    Args:
        plan: the run and its devices.
        programs: the compiler's figures by program; empty: the formula decides.

    Returns:
        Lines to print, with the keys to change if the run does not fit; and whether it fits.
    """
    if programs:
        return _verdict_by_compiler(plan, programs)
    return _verdict_by_formula(plan)


def _verdict_by_compiler(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    limit = plan.target.limit
    expected = peak_memory(plan.estimate)
    gap = GAPS.get(plan.target.platform, 1.0)
    refused_gib = REFUSED_FACTOR * gap * max(limit, expected) / GIB
    rows = []
    needed: dict[str, float] = {}  # bytes by program
    for name, sizes in programs.items():
        cells = [sizes.get(column, "refused") for column in ("arguments", "peak", "needed")]
        rows.append([name, *cells])
        needed[name] = sizes.get("needed", refused_gib) * GIB
    headers = ["program", "arguments GiB", "in use at once", "needed, with all that lies beside it"]
    lines = [table(rows, headers)]
    too_large = [name for name, size in needed.items() if size > limit]
    if not too_large:
        lines.append(f"fits {limit / GIB:.1f} GiB of a device")
        return lines, True
    lines.append(f"does not fit {limit / GIB:.1f} GiB of a device: {', '.join(too_large)}")
    # The remedy goes by the formula, which must leave as much room as the compiler needs beyond it.
    scale = max(1.0, max(needed.values()) / expected)
    lines.append(remedy(plan.config, plan.architecture, plan.target, limit / scale))
    return lines, False


def _verdict_by_formula(plan: RunPlan) -> tuple[list[str], bool]:
    limit = plan.target.limit
    expected = peak_memory(plan.estimate)
    gap = GAPS.get(plan.target.platform, 1.0)
    if expected > limit:
        lines = [f"does not fit {limit / GIB:.1f} GiB of a device, by the formula"]
        lines.append(remedy(plan.config, plan.architecture, plan.target, limit))
        return lines, False
    lines = [f"fits {limit / GIB:.1f} GiB of a device, by the formula"]
    if expected * gap > limit:
        lines.append(f"programs may need up to {gap} times as much: compile it (leave --estimate out)")
    return lines, True


def work_lines(plan: RunPlan) -> list[str]:
    """Return lines with the work and the time of a step and of the run."""
    step = plan.step
    rollouts = step.rollouts
    num_steps = plan.config.learner.steps
    rows = []
    for part in step.parts:
        rows.append(
            [
                part.name,
                f"{part.flops:.2e}",
                f"{part.memory * part.devices:.2e}",
                f"{part.received * part.devices:.2e}",
                number(part.seconds(plan.target, plan.efficiency.of(part.name))),
            ]
        )
    headers = ["part", "operations", "bytes of memory", "bytes between devices", "seconds"]
    overlap = ", rollouts and update at the same time" if step.overlap else ""
    tokens_per_second = step.trained / plan.seconds
    return [
        f"a step: {rollouts.trajectories} trajectories of {rollouts.tokens} tokens, {rollouts.sampled} of"
        f" them sampled (--tokens, --sampled), which fill {step.fill:.0%} of the update's rows",
        table(rows, headers),
        f"at efficiency {plan.efficiency}: {number(plan.seconds)} s a step{overlap},"
        f" {tokens_per_second:.0f} tokens/s",
        f"{num_steps} steps: {duration(num_steps * plan.seconds)}, {number(plan.device_hours)} device hours",
        "not counted: retrieval, publishing weights, checkpoints, evaluations, compiling",
    ]


def figures(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the plan, for a JSON file."""
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
        "efficiency": vars(plan.efficiency),
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
        saving = _cheapest_saving(config, architecture, target, size)
        if saving is None:
            adapters = "" if config.policy.lora.rank else ", or train adapters (policy.lora.rank)"
            return (
                "no combination of learner.pack_length, learner.microbatch_rows, policy.remat, mesh,"
                f" optimizer.offload and sampler fits (the least: {size / GIB:.1f} GiB by the formula): take"
                f" more devices or larger ones{adapters}"
            )
        change, config, size = saving
        changes.update(change)
    workers = ""
    if "sampler.name" in changes:
        changes.pop("sampler.slots", None)
        workers = "; vLLM's workers have devices of their own"
    overrides = " ".join(f"{key}={value}" for key, value in changes.items())
    return f"would fit: {overrides} ({size / GIB:.1f} GiB by the formula{workers})"


def _cheapest_saving(
    config: Config, architecture: Architecture, target: Target, size: float
) -> tuple[Changes, Config, float] | None:
    """Return the cheapest change that needs fewer bytes than `size`, with its config and its bytes.

    A change that another key forbids is passed over. None: no change saves memory.
    """
    for change in memory_savers(config, architecture, target.hosts):
        try:
            smaller = changed(config, change)
            smaller_size = peak_memory(memory_of(smaller, architecture, target))
        except (ValidationError, UserError):
            continue
        if smaller_size < size:
            return change, smaller, smaller_size
    return None


def memory_savers(config: Config, architecture: Architecture, hosts: int) -> list[Changes]:
    """Return the next step of each change that saves memory and changes no result, the cheapest first.

    A key that cannot go further keeps its value.
    """
    mesh = config.mesh
    rows = config.learner.microbatch_rows
    num_shards = mesh.data * mesh.fsdp
    changes: list[Changes] = [
        {"learner.pack_length": min(config.learner.pack_length, config.rollout.max_length)},
        {"learner.microbatch_rows": _halved(rows, num_shards)},
        {"policy.remat": _next_remat(config.policy.remat)},
        {"mesh.data": 1, "mesh.fsdp": num_shards},
        {"learner.optimizer.offload": "host"},
        {"critic.optimizer.offload": "host"},
    ]
    tensor = 2 * mesh.tensor
    if mesh.fsdp % 2 == 0 and architecture.num_kv_heads % tensor == 0:
        changes.append(
            {
                "mesh.fsdp": mesh.fsdp // 2,
                "mesh.tensor": tensor,
                "learner.microbatch_rows": rows // 2,
            }
        )
    if config.sampler.name == "jax":
        changes.append({"sampler.slots": _halved(config.sampler.slots, num_shards)})
        workers: Changes = {"sampler.name": "vllm"}
        if hosts > 1:
            workers["sampler.workers"] = hosts
        changes.append(workers)
    return changes


def _next_remat(remat: str) -> str:
    """Return the setting of `policy.remat` that recomputes a little more; the last one stays."""
    return REMATS[min(REMATS.index(remat) + 1, len(REMATS) - 1)]


def _halved(count: int, num_shards: int) -> int:
    """Return about half the count, as a multiple of the shards, and at least one for each."""
    return max(1, count // 2 // num_shards) * num_shards


def changed(section: Any, changes: Changes) -> Any:
    """Return a config or section with other values by dotted key; ValidationError if one is invalid."""
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if inner:
            value = changed(getattr(section, name), {inner: value})
        section = replace(section, **{name: value})
    return section
