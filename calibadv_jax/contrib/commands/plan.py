"""The cost of a run on devices that you do not have yet: ``calibadv plan --config FILE --tpu v5e:4x4``.

Exit status 1 if it does not fit; the keys to change are named.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning import compiled, memory
from calibadv_jax.contrib.planning.hardware import Target, find_target, placed_on, sampler_of
from calibadv_jax.contrib.planning.memory import GAPS, GIB, estimate_memory, find_architecture, peak_memory
from calibadv_jax.contrib.planning.work import ExpectedRollouts, Step, expected_rollouts, step_of
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.hosts.joining import check_workers
from calibadv_jax.metrics.console import Console, duration, number, table
from calibadv_jax.policy.architecture import Architecture

NOT_COUNTED = "not counted: retrieval, publishing weights, checkpoints, evaluations, compiling"
Changes = dict[str, Any]  # dotted key -> value
ADAPTERS: Changes = {"policy.lora.rank": 16}
TENSOR = (2, 4, 8)  # sizes of mesh.tensor that are tried
NUM_LEVERS, STRONGEST = 8, 2**16  # of a lever, whose options count from 1; 0: it is not used


@dataclass(frozen=True)
class RunPlan:
    config: Config  # placed on the devices
    target: Target
    architecture: Architecture
    estimate: dict[str, float]  # bytes of a device by purpose
    step: Step
    rollouts: ExpectedRollouts
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
    mesh, a = plan.config.mesh.sizes, plan.architecture
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    console.say(f"{plan.target}, mesh {shape}: {a.model_type}, {a.num_parameters / 1e6:.2f}M parameters")
    for line in (memory.memory_line(plan.estimate), *memory.heads_warnings(a, mesh)):
        console.say(line)
    programs: dict[str, dict[str, Any]] = {}
    failure = None
    if not estimate:
        try:
            programs = compile_programs(plan, console)
        except UserError as error:
            failure = error
    lines, fits = memory_verdict(plan, programs)
    for line in [*lines, *work_lines(plan)]:
        console.say(line)
    if failure:
        raise failure
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
        check_workers(config.sampler, target.hosts)
    architecture = find_architecture(config)
    if architecture is None:
        raise UserError(
            f"policy.path is {config.policy.path or 'empty'}, where no config.json is: name a folder that has"
            " one, or give the policy's shape in policy.init (its config.json, vocab_size too)"
        )
    rollouts = expected_rollouts(config, tokens, sampled)
    estimate = memory_of(config, architecture, target)
    step = step_of(config, architecture, rollouts, target)
    seconds = step.seconds(target, efficiency)
    sampling = max((part.devices for part in step.parts if part.name == "decode"), default=0)
    devices = target.devices + (sampling if config.sampler.urls else 0)
    hours = config.learner.steps * seconds * devices / 3600
    return RunPlan(config, target, architecture, estimate, step, rollouts, efficiency, seconds, hours)


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
    expected, scale, lines = peak_memory(plan.estimate), 1.0, []
    has = f"{limit / GIB:.1f} GiB of a device"
    if programs:
        columns = ("arguments", "peak", "needed")
        rows = [
            (name, *(f"{sizes[key]:.2f}" if key in sizes else "refused" for key in columns))
            for name, sizes in programs.items()
        ]
        headers = ("program", "arguments GiB", "in use at once", "needed, with all that lies beside it")
        lines.append(table(rows, headers))
        large = [name for name, sizes in programs.items() if sizes.get("needed", math.inf) * GIB > limit]
        fits = not large
        verdict = f"fits {has}" if fits else f"does not fit {has}: {', '.join(large)}"
        refused = gaps * max(limit, expected) / GIB
        most = max(sizes.get("needed", refused) for sizes in programs.values())
        scale = max(1.0, most * GIB / expected)
    else:
        fits = expected <= limit
        verdict = f"{'fits' if fits else 'does not fit'} {has}, by the formula"
        if fits and expected * gaps > limit:
            verdict += f"; programs may need up to {gaps} times as much, so compile it (leave --estimate out)"
    lines.append(verdict)
    if not fits:
        lines.append(remedy(plan.config, plan.architecture, plan.target, limit, scale))
    return lines, fits


def work_lines(plan: RunPlan) -> list[str]:
    rollouts, step, learner = plan.rollouts, plan.step, plan.config.learner
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
        NOT_COUNTED,
    ]


def figures(plan: RunPlan, programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    target = plan.target
    return {name: getattr(target, name) for name in ("devices", "kind", "topology", "limit")} | {
        "memory": plan.estimate,
        "peak": peak_memory(plan.estimate),
        "programs": programs,
        "trajectories": vars(plan.rollouts),
        "fill": plan.step.fill,
        "parts": [vars(part) for part in plan.step.parts],
        "efficiency": plan.efficiency,
        "seconds": plan.seconds,
        "tokens_per_second": plan.step.trained / plan.seconds,
        "device_hours": plan.device_hours,
    }


def memory_of(config: Config, architecture: Architecture, target: Target) -> dict[str, float]:
    """Return bytes on one device of a placed config by purpose; each of several hosts has its own sampler."""
    sampler = sampler_of(config, target) if target.hosts > 1 and config.sampler.name == "jax" else None
    return estimate_memory(config, architecture, config.mesh.sizes, sampler)


def changed(section: Any, changes: Changes) -> Any:
    """Return a config, or a section of it, with other values; ValidationError if one is invalid."""
    parts: dict[str, Changes] = {}
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        parts.setdefault(name, {})[inner] = value
    values = {
        name: keys[""] if "" in keys else changed(getattr(section, name), keys)
        for name, keys in parts.items()
    }
    return replace(section, **values)


def remedy(
    config: Config, architecture: Architecture, target: Target, limit: float, scale: float = 1.0
) -> str:
    """Return a line with the cheapest changes that fit, or with the least memory if none do.

    `config` is placed on the devices; `limit`: bytes of a device; `scale`: bytes that the verdict
    counts, over those of the formula.
    """

    def proposal(config: Config, adapters: Changes) -> tuple[str, float]:
        changes, size = cheapest_changes(config, architecture, target, limit / scale)
        overrides = " ".join(f"{key}={value}" for key, value in (adapters | changes).items())
        gaps = GAPS.get(target.platform, 1.0)
        scaled = f", times {scale:.2f} as the compiler counts" if scale > 1 else ""
        more = f"; programs may need up to {gaps} times as much" if size * scale * gaps > limit else ""
        more += "; vLLM's workers have devices of their own" if "sampler.name" in changes else ""
        return f"{overrides} ({size * scale / GIB:.1f} GiB by the formula{scaled}{more})", size * scale

    line, size = proposal(config, {})
    if size <= limit:
        return f"would fit: {line}"
    advice = (
        "no combination of learner.row_length, learner.microbatch_rows, policy.remat, mesh,"
        f" learner.optimizer.offload and sampler fits (the least: {size / GIB:.1f} GiB): take more devices or"
        " larger ones"
    )
    if not config.policy.lora.rank:
        with suppress(ValidationError):  # the config may have what adapters cannot have
            line, size = proposal(changed(config, ADAPTERS), ADAPTERS)
            advice += f", or train adapters: {line}" if size <= limit else ""
    return advice


def cheapest_changes(
    config: Config, architecture: Architecture, target: Target, limit: float
) -> tuple[Changes, float]:
    """Return the cheapest combination of `levers` within a limit, and its bytes; else the strongest one.

    The dearest lever decides the cost of a combination, so it is relaxed first.
    """

    def pull(strengths: Sequence[int]) -> tuple[Changes, float]:
        changes: Changes = {}
        pulled, size = config, peak_memory(memory_of(config, architecture, target))
        for lever, strength in enumerate(strengths):
            options = levers(pulled, architecture, target.hosts)[lever]
            if strength and options:
                step = options[min(strength, len(options)) - 1]
                with suppress(ValidationError, UserError):  # it does not go together with the others
                    stepped = changed(pulled, step)
                    size = peak_memory(memory_of(stepped, architecture, target))
                    pulled, changes = stepped, changes | step
        return changes, size

    strengths = [STRONGEST] * NUM_LEVERS
    if pull(strengths)[1] <= limit:
        for n in reversed(range(NUM_LEVERS)):
            before, after = strengths[:n], strengths[n + 1 :]
            strengths[n] = bisect_left(
                range(STRONGEST), True, key=lambda strength: pull([*before, strength, *after])[1] <= limit
            )
    return pull(strengths)


def levers(config: Config, architecture: Architecture, hosts: int) -> list[list[Changes]]:
    """Return the options of every lever, from the mildest to the strongest; none if it is at its end.

    The cheapest lever comes first; none changes what is learned.
    """
    mesh, sampler, learner, longest = config.mesh, config.sampler, config.learner, config.rollout.max_length
    shards, rows, heads = mesh.data * mesh.fsdp, learner.microbatch_rows, architecture.num_kv_heads
    parts = {"learner": learner} | ({"critic": config.critic} if config.advantage.has_critic else {})
    resident = [name for name, section in parts.items() if section.optimizer.offload == "none"]
    is_embedded = sampler.name == "jax"
    splits: list[Changes] = [  # a tensor axis must divide the shards and the heads, and leave rows
        {"mesh.fsdp": mesh.fsdp // size, "mesh.tensor": size, "learner.microbatch_rows": rows // size}
        for size in TENSOR
        if mesh.tensor <= 1 and mesh.fsdp % size == 0 and heads % size == 0 and rows >= size
    ]
    slots = (sampler.slots - 1) // shards * shards if is_embedded else 0
    workers: Changes = {"sampler.name": "vllm"} | ({"sampler.workers": hosts} if hosts > 1 else {})
    return [
        [{"learner.row_length": longest}] if learner.row_length > longest else [],
        [{"learner.microbatch_rows": size} for size in range(rows - shards, 0, -shards)],
        [{"policy.remat": "full"}] if config.policy.remat != "full" else [],
        [{"mesh.data": 1, "mesh.fsdp": shards}] if mesh.data > 1 else [],
        [{f"{name}.optimizer.offload": "host" for name in resident}] if resident else [],
        splits,
        [{"sampler.slots": count} for count in range(slots, 0, -shards)],
        [workers] if is_embedded else [],
    ]
