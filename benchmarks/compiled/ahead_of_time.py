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
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.compiled.gpu_targets import GPUS, target_config
from benchmarks.device import NEVER_STOPS, SHAPES
from calibadv_jax.config import (
    AdvantageConfig,
    Config,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    SamplerConfig,
)
from calibadv_jax.learner.critic import CriticLearner, ValueLoss, critic_of
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.attention import Kernel
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.run.memory import GIB, estimate_memory, program_memory, shares_base
from calibadv_jax.sampler.jax_sampler import JaxSampler

GPU_SHARE = 0.75
KERNELS: dict[str, Kernel] = {
    "tpu": "splash",
    "cuda": "triton",
}  # "auto" would ask for this machine's backend
NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory", re.IGNORECASE)
PROGRAMS = ("update", "apply", "log-probabilities", "prefill", "copy", "decode")


def mesh_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Sizes of the mesh's axes, without asking for the devices."""
    devices = math.prod(int(size) for size in arguments.topology.rpartition(":")[2].split("x"))
    fsdp, tensor = arguments.fsdp, arguments.tensor
    return {"data": devices // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}


def run_config(arguments: argparse.Namespace) -> Config:
    """The parts of a run's config that its programs and their memory come from."""
    mesh = mesh_sizes(arguments)
    attention = arguments.attention or KERNELS[arguments.platform]
    return Config(
        policy=PolicyConfig(
            compute_dtype="bfloat16",
            remat=arguments.remat,
            attention=attention,
            lora=LoraConfig(rank=arguments.lora),
        ),
        mesh=MeshConfig(**mesh),
        learner=LearnerConfig(
            row_length=arguments.length, microbatch_rows=arguments.rows * mesh["data"] * mesh["fsdp"]
        ),
        rollout=RolloutConfig(max_length=arguments.length, max_prompt_length=arguments.length // 2),
        sampler=SamplerConfig(slots=arguments.slots),
        advantage=AdvantageConfig(name="gae" if arguments.critic else "calibadv"),
    )


def expected_bytes(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes on a device that `doctor` expects of the programs that decide; log-probabilities never do."""
    found = program_memory(expected_parts(arguments), shares_base(run_config(arguments)))
    if arguments.critic:
        found |= {name: found[f"critic's {name}"] for name in ("update", "apply")}
    return found


def expected_parts(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes on a device by purpose, as `doctor` counts them."""
    architecture = architecture_from_hf(SHAPES[arguments.shape])
    return estimate_memory(run_config(arguments), architecture, mesh_sizes(arguments))


def make_topology_mesh(arguments: argparse.Namespace) -> Mesh:
    """A mesh of devices that need not be attached."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine to ask what it is
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # no GPU to try kernels on
    jax.config.update("jax_platforms", "cpu")
    options = {"topology_name": arguments.topology}
    if arguments.platform == "cuda":
        options = {"topology": arguments.topology, "target_config": target_config(arguments.gpu)}
    devices = topologies.get_topology_desc(platform=arguments.platform, **options).devices
    return make_mesh(MeshConfig(**mesh_sizes(arguments)), list(devices))


def lowered_programs(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, jax.stages.Lowered]:
    """The programs that the arguments ask for, for the mesh's devices."""
    config, names = run_config(arguments), set(arguments.only)
    architecture, numerics = (
        architecture_from_hf(SHAPES[arguments.shape]),
        Numerics.from_config(config.policy),
    )
    policy = Policy(architecture, numerics, Adapters.from_config(config.policy.lora))
    optimizer = make_optimizer(OptimizerConfig(lr=1e-6), make_schedule(OptimizerConfig(), 100))
    learner = (CriticLearner if arguments.critic else Learner)(
        critic_of(policy) if arguments.critic else policy,
        optimizer,
        mesh,
        config.learner.microbatch_rows,
        logprob_chunk=config.policy.logprob_chunk,
        entropy_gradient=False,
    )
    lowered = {}
    if "update" in names:
        loss = ValueLoss(0.5) if arguments.critic else policy_gradient(LossConfig(), on_policy=True)
        lowered["update"] = learner.lower_update(arguments.length, loss)
    if "apply" in names:
        lowered["apply"] = learner.lower_apply()
    if "log-probabilities" in names:
        lowered["log-probabilities"] = learner.lower_logprobs(arguments.length)
    if names & {"prefill", "copy", "decode"}:
        sampler = JaxSampler(policy, NEVER_STOPS, config.sampler, mesh, arguments.length)
        lowered |= {name: program for name, program in sampler.lower().items() if name in names}
    return lowered


def compiled_figures(program: jax.stages.Lowered, beside: float = 0.0) -> dict[str, Any]:
    """Seconds of compiling, and GiB on a device by the compiler's plan; or why the compiler refuses.

    *peak* is what lives at once; *needed* is what the program takes: temporary memory is one block, and lies
    there with its gaps.

    Args:
        beside: bytes on a device that the program does not take, and that lie there meanwhile.
    """
    begun = time.perf_counter()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = NO_ROOM.search(str(error))
        if refusal is None:
            raise
        return {"refused": refusal[0]}
    seconds = time.perf_counter() - begun
    memory: Any = compiled.memory_analysis()
    held, made = memory.argument_size_in_bytes, memory.output_size_in_bytes
    sizes = {
        "arguments": held,
        "results": made,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes + beside,
        "needed": held + made - memory.alias_size_in_bytes + memory.temp_size_in_bytes + beside,
    }
    return {"compile_s": round(seconds, 1)} | {name: size / GIB for name, size in sizes.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=list(KERNELS), default="tpu")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100")
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        help="topology. TPU: as libtpu names it, v5e:4x4, v5p:2x2x2; GPU: slices x hosts x GPUs of a host",
    )
    parser.add_argument(
        "--attention", choices=["xla", "splash", "triton", "cudnn"], help="another kernel of attention"
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
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="full")
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
        f" {arguments.slots} slots, attention {arguments.attention or KERNELS[arguments.platform]},"
        f" jax {jax.__version__}\n"
    )
    out(f"{'':20}{'compile s':>10}{'arguments GiB':>15}{'GiB':>8}{'doctor GiB':>12}\n")
    expected, figures = expected_bytes(arguments), written(arguments.json)
    base = expected_parts(arguments).get("base", 0.0)
    for name, program in lowered_programs(arguments, mesh).items():
        beside = base if name == "apply" else 0.0
        figures[name] = found = compiled_figures(program, beside)
        if "refused" in found:
            out(f"{name:20}{found['refused']}")
        else:
            out(f"{name:20}{found['compile_s']:10.1f}{found['arguments']:15.2f}{found['needed']:8.2f}")
        out(f"{expected[name] / GIB:12.2f}\n" if name in expected else "\n")
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2))
    large = [name for name in arguments.only if not fits(figures[name], arguments)]
    if large:
        sys.exit(f"does not fit: {', '.join(large)}")


def written(file: Path | None) -> dict[str, dict[str, Any]]:
    """Figures of the programs that a file already has."""
    return json.loads(file.read_text()) if file and file.exists() else {}


def fits(figures: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """TPU's compiler has said so itself."""
    if "refused" in figures or arguments.platform == "tpu":
        return "refused" not in figures
    return figures["needed"] * GIB <= GPU_SHARE * GPUS[arguments.gpu].memory


if __name__ == "__main__":
    main()
