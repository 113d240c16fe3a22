"""Compiles update, optimizer's step, log-probabilities and sampler for TPUs or GPUs that are not attached.

    pip install 'jax[tpu]'        # on any Linux machine, but not in vLLM's environment
    python -m benchmarks.compiled.ahead_of_time --topology v5e:4x4 --shape qwen2.5-3b --fsdp 8 --tensor 2

    pip install 'jax[cuda13]'     # an environment of its own; no GPU and no driver are needed
    python -m benchmarks.compiled.ahead_of_time --platform cuda --gpu h100 --topology 1x1x8 \
        --shape qwen2.5-3b --fsdp 8

Prints for each program how long it compiled, the bytes of its arguments on one device, the memory that it
takes there by the compiler's plan, and what `doctor` would have said. `update` is the gradient of a
microbatch added to a sum, `apply` the optimizer's step. TPU's compiler refuses a program that does not fit;
XLA:GPU does not. The status is 1 if one is refused or takes more than 0.75 of the GPU's memory, the share
that JAX takes by default. `--json FILE` writes the figures, program by program. Many points and a table:
`benchmarks.compiled.scale_table`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.device import SHAPES
from calibadv_jax.config import (
    AdvantageConfig,
    Config,
    LearnerConfig,
    LoraConfig,
    MeshConfig,
    PolicyConfig,
    RolloutConfig,
    SamplerConfig,
)
from calibadv_jax.contrib.planning import compiled
from calibadv_jax.contrib.planning.compiled import (
    LEARNER_PROGRAMS,
    SAMPLER_PROGRAMS,
    compiled_figures,
    topology_mesh,
)
from calibadv_jax.contrib.planning.hardware import GPUS, Target, find_target
from calibadv_jax.contrib.planning.memory import GIB, estimate_memory, program_memory, shares_base
from calibadv_jax.policy.architecture import architecture_from_hf

PLATFORMS = ("tpu", "cuda")
PROGRAMS = (*LEARNER_PROGRAMS, *SAMPLER_PROGRAMS)


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the devices to compile for."""
    if arguments.platform == "tpu":
        return find_target(tpu=arguments.topology)
    return find_target(gpu=arguments.gpu, topology=arguments.topology)


def mesh_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Return sizes of the mesh's axes, without asking for the devices."""
    devices, fsdp, tensor = target_of(arguments).devices, arguments.fsdp, arguments.tensor
    return {"data": devices // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}


def run_config(arguments: argparse.Namespace) -> Config:
    """Return the parts of a run's config that its programs and their memory come from."""
    mesh = mesh_sizes(arguments)
    attention = arguments.attention or target_of(arguments).kernel("bfloat16")
    return Config(
        policy=PolicyConfig(
            compute_dtype="bfloat16",
            remat=arguments.remat,
            attention=attention,
            lora=LoraConfig(rank=arguments.lora),
        ),
        mesh=MeshConfig(**mesh),
        learner=LearnerConfig(
            pack_length=arguments.length,
            microbatch_rows=arguments.rows * mesh["data"] * mesh["fsdp"],
            share_prefixes=arguments.share_prefixes,
        ),
        rollout=RolloutConfig(max_length=arguments.length, max_prompt_length=arguments.length // 2),
        sampler=SamplerConfig(slots=arguments.slots),
        advantage=AdvantageConfig(name="gae" if arguments.critic else "calibadv"),
    )


def expected_bytes(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the bytes on a device that `doctor` expects of the programs that decide."""
    memory = program_memory(expected_parts(arguments), shares_base(run_config(arguments)))
    if arguments.critic:
        memory |= {name: memory[f"critic's {name}"] for name in ("update", "apply")}
    return memory


def expected_parts(arguments: argparse.Namespace) -> dict[str, float]:
    """Return bytes on a device by purpose, as `doctor` counts them."""
    architecture = architecture_from_hf(SHAPES[arguments.shape])
    return estimate_memory(run_config(arguments), architecture, mesh_sizes(arguments))


def make_topology_mesh(arguments: argparse.Namespace) -> Mesh:
    """Return a mesh of devices that need not be attached."""
    return topology_mesh(run_config(arguments), target_of(arguments))


def lowered_programs(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, jax.stages.Lowered]:
    """Return the programs that the arguments ask for, for the mesh's devices."""
    of_critic = {name: f"critic's {name}" for name in ("update", "apply")} if arguments.critic else {}
    config, architecture = run_config(arguments), architecture_from_hf(SHAPES[arguments.shape])
    return {
        name: compiled.lowered_program(config, architecture, mesh, of_critic.get(name, name))
        for name in arguments.only
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=PLATFORMS, default="tpu")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100")
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        help="topology. TPU: as libtpu names it, v5e:4x4, v5p:2x2x2; GPU: slices x hosts x GPUs of a host",
    )
    parser.add_argument(
        "--attention",
        choices=["xla", "splash", "tokamax", "triton", "cudnn"],
        help="another kernel of attention",
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--fsdp", type=int, default=4, help="size of the axis fsdp; data takes what is left")
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument(
        "--length", type=int, default=4096, help="number of tokens of a row and of a trajectory"
    )
    parser.add_argument(
        "--rows", type=int, default=1, help="rows of a microbatch on each data and fsdp device"
    )
    parser.add_argument(
        "--slots", type=int, default=64, help="slots of the embedded sampler on all devices together"
    )
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters on every product; 0: all parameters are trained"
    )
    parser.add_argument(
        "--share-prefixes", action="store_true", help="learner.share_prefixes, with --attention xla or cudnn"
    )
    parser.add_argument("--remat", choices=["none", "dots", "attention", "full"], default="full")
    parser.add_argument(
        "--critic", action="store_true", help="PPO's critic of this shape in place of the policy"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this JSON file")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    mesh = make_topology_mesh(arguments)
    out = sys.stdout.write
    out(
        f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)},"
        f" {arguments.shape}, rows of {arguments.length} tokens, {arguments.rows} a device,"
        f" {arguments.slots} slots, attention {run_config(arguments).policy.attention},"
        f" jax {jax.__version__}\n"
    )
    out(f"{'':20}{'compile s':>10}{'arguments GiB':>15}{'GiB':>8}{'doctor GiB':>12}\n")
    expected, figures = expected_bytes(arguments), written(arguments.json)
    base = expected_parts(arguments).get("base", 0.0)
    for name, program in lowered_programs(arguments, mesh).items():
        beside = base if name == "apply" else 0.0
        figures[name] = figure = compiled_figures(program, beside)
        if "refused" in figure:
            out(f"{name:20}{figure['refused']}")
        else:
            out(f"{name:20}{figure['compile_s']:10.1f}{figure['arguments']:15.2f}{figure['needed']:8.2f}")
        out(f"{expected[name] / GIB:12.2f}\n" if name in expected else "\n")
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2))
    large = [name for name in arguments.only if not fits(figures[name], arguments)]
    if large:
        sys.exit(f"does not fit: {', '.join(large)}")


def written(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return figures of the programs that a file already has."""
    return json.loads(file.read_text()) if file and file.exists() else {}


def fits(figures: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Return whether the program fits the device; TPU's compiler refuses by itself what does not."""
    if "refused" in figures or arguments.platform == "tpu":
        return "refused" not in figures
    return figures["needed"] * GIB <= target_of(arguments).limit


if __name__ == "__main__":
    main()
