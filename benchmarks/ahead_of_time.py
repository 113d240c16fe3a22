"""Compiles update, log-probabilities and sampler for TPUs or GPUs that are not attached.

    pip install 'jax[tpu]'        # on any Linux machine, but not in vLLM's environment
    python -m benchmarks.ahead_of_time --topology v5e:4x4 --shape qwen2.5-3b --fsdp 8 --tensor 2

    pip install 'jax[cuda13]'     # an environment of its own; no GPU and no driver are needed
    python -m benchmarks.ahead_of_time --platform cuda --gpu h100 --topology 1x1x8 --shape qwen2.5-3b --fsdp 8

Prints for each program how long it compiled, the bytes of its arguments on one device, and the peak of
memory that the compiler plans there. TPU's compiler refuses a program that does not fit; XLA:GPU does not, so
the status is 1 if a peak is above 0.75 of the GPU's memory, the share that JAX takes by default.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine to ask what it is
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # no GPU to try kernels on

import jax
from jax.experimental import topologies

from benchmarks.device import NEVER_STOPS, SHAPES
from benchmarks.gpu_targets import GPUS, target_config
from calibadv_jax.config import LossConfig, MeshConfig, OptimizerConfig, PolicyConfig, SamplerConfig
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.jax_sampler import JaxSampler

GIB = 2**30
GPU_SHARE = 0.75
KERNELS = {"tpu": "splash", "cuda": "triton"}  # "auto" would ask for this machine's backend


def programs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lowered programs by name."""
    jax.config.update("jax_platforms", "cpu")
    if arguments.platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=arguments.topology)
    else:
        target = target_config(arguments.gpu)
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=arguments.topology
        )
    mesh = make_mesh(MeshConfig(-1, arguments.fsdp, arguments.tensor), list(topology.devices))
    attention = arguments.attention or KERNELS[arguments.platform]
    config = PolicyConfig(compute_dtype="bfloat16", remat=arguments.remat, attention=attention)
    policy = Policy(architecture_from_hf(SHAPES[arguments.shape]), Numerics.from_config(config))
    rows = arguments.rows * mesh.shape["data"] * mesh.shape["fsdp"]
    optimizer = make_optimizer(OptimizerConfig(lr=1e-6), make_schedule(OptimizerConfig(), 100))
    learner = Learner(
        policy, optimizer, mesh, rows, logprob_chunk=config.logprob_chunk, entropy_gradient=False
    )
    sampling = SamplerConfig(slots=arguments.slots)
    sampler = JaxSampler(policy, NEVER_STOPS, sampling, mesh, arguments.length)
    sys.stdout.write(
        f"{len(topology.devices)} x {topology.devices[0].device_kind}, mesh {dict(mesh.shape)},"
        f" {arguments.shape}, rows of {arguments.length} tokens, {rows} a microbatch,"
        f" {arguments.slots} slots, attention {attention}, jax {jax.__version__}\n"
    )
    return {
        "update": learner.lower_update(arguments.length, policy_gradient(LossConfig(), on_policy=True)),
        "log-probabilities": learner.lower_logprobs(arguments.length),
        **sampler.lower(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=list(KERNELS), default="tpu")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100")
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        help="TPU: as libtpu names it, v5e:4x4, v5p:2x2x2, v6e:4x4; GPU: slices x hosts x GPUs of a host",
    )
    parser.add_argument("--attention", choices=["xla", "splash", "triton", "cudnn"], help="other kernel")
    parser.add_argument(
        "--programs", nargs="+", help="only these: update, log-probabilities, prefill, decode"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--fsdp", type=int, default=4, help="data takes what is left")
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row, and of a trajectory")
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch on each data and fsdp device")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="full")
    arguments = parser.parse_args()
    out = sys.stdout.write
    lowered = programs(arguments)
    budget = GPU_SHARE * GPUS[arguments.gpu].memory / GIB if arguments.platform == "cuda" else float("inf")
    fits = True
    out(f"{'':20}{'compile s':>10}{'arguments GiB':>15}{'peak GiB':>10}\n")
    for name, program in lowered.items():
        if arguments.programs and name not in arguments.programs:
            continue
        begun = time.perf_counter()
        compiled = program.compile()
        seconds = time.perf_counter() - begun
        memory = compiled.memory_analysis()
        held, peak = memory.argument_size_in_bytes / GIB, memory.peak_memory_in_bytes / GIB
        out(f"{name:20}{seconds:10.1f}{held:15.2f}{peak:10.2f}\n")
        fits &= peak <= budget
    if not fits:
        sys.exit(f"does not fit: more than {budget:.1f} GiB of one {arguments.gpu}")


if __name__ == "__main__":
    main()
