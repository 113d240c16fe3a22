"""Temporary memory of the update by the length of a row, by the compiler's plan: nothing is computed.

    python -m benchmarks.compiled.update_memory [--shape qwen2.5-3b] [--lengths 2048 4096 …]  # CPU
    python -m benchmarks.compiled.update_memory --platform tpu --topology v5e:2x2 --fsdp 4  # needs libtpu

One row of each length on each device, bfloat16, `remat: full`. The gradient of a microbatch is one program,
the optimizer's step another, which does not depend on the length.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine to ask what it is

import jax
from jax.experimental import topologies

from benchmarks.device import SHAPES
from calibadv_jax.config import LossConfig, MeshConfig, OptimizerConfig
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.attention import best_kernel
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy

MIB = 2**20


def make_learner(arguments: argparse.Namespace) -> Learner:
    jax.config.update("jax_platforms", "cpu")
    devices, kernel = jax.devices()[:1], best_kernel(arguments.platform, "bfloat16")
    if arguments.platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=arguments.topology)
        devices = list(topology.devices)
    mesh = make_mesh(MeshConfig(data=-1, fsdp=arguments.fsdp), devices)
    numerics = Numerics(compute_dtype=jax.numpy.bfloat16, remat="full", kernel=kernel)
    policy = Policy(architecture_from_hf(SHAPES[arguments.shape]), numerics)
    config = OptimizerConfig(offload=arguments.offload)
    optimizer = make_optimizer(config, make_schedule(config, 100))
    rows = len(devices) * arguments.rows
    return Learner(
        policy,
        optimizer,
        mesh,
        LearnerOptions(rows, entropy_gradient=False, offload=arguments.offload == "host"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=["cpu", "tpu"], default="cpu")
    parser.add_argument("--topology", default="v5e:2x2", help="topology, as libtpu names it")
    parser.add_argument("--fsdp", type=int, default=1, help="size of the axis fsdp; data takes what is left")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-3b")
    parser.add_argument("--rows", type=int, default=1, help="rows on each device")
    parser.add_argument("--offload", choices=["none", "host"], default="none")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048 * 2**n for n in range(6)])
    arguments = parser.parse_args()
    learner = make_learner(arguments)
    loss = policy_gradient(LossConfig(), on_policy=True)
    lowered = {f"gradient, {n} tokens": learner.lower_update(n, loss) for n in arguments.lengths}
    lowered["optimizer's step"] = learner.lower_apply()
    out = sys.stdout.write
    out(f"{arguments.shape}, {arguments.platform}, {dict(learner.mesh.shape)}, jax {jax.__version__}\n")
    out(f"{'MiB of a device':26}{'arguments':>11}{'temporary':>11}{'peak':>9}{'host':>9}\n")
    for name, program in lowered.items():
        memory: Any = program.compile().memory_analysis()
        sizes = (
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.peak_memory_in_bytes,
            memory.host_argument_size_in_bytes,
        )
        held, temporary, peak, host = (size / MIB for size in sizes)
        out(f"{name:26}{held:11.0f}{temporary:11.0f}{peak:9.0f}{host:9.0f}\n")


if __name__ == "__main__":
    main()
