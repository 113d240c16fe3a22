"""A run's programs, compiled by libtpu or XLA's compiler for CUDA for devices that are not attached."""

from __future__ import annotations

import os
import re
import time
from importlib.metadata import requires, version
from pathlib import Path
from string import Template
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.hardware import Target
from calibadv_jax.contrib.planning.memory import GIB
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.learner.critic import ValueLoss, critic_learner
from calibadv_jax.learner.learner import Learner, policy_learner
from calibadv_jax.learner.objective import LossFunction, policy_loss
from calibadv_jax.learner.optimizer import make_schedule
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.engine import CacheEngine

UPDATES = 100  # length of the schedule, of which the programs do not depend
TRAINED = ("update", "apply", "log-probabilities")
OF_CRITIC = ("critic's update", "critic's apply")
SAMPLED = ("prefill", "copy", "decode")
NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory", re.IGNORECASE)
COMPILER = {  # of the environment; what a user sets stays
    "TPU_SKIP_MDS_QUERY": "1",  # no machine to ask what it is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several may compile at a time: none holds a TPU
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # no GPU to try kernels on
}
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")  # of JAX's version, besides NVIDIA's compiler


def programs_of(config: Config) -> tuple[str, ...]:
    sampled = ("prefill", "decode") if config.sampler.name == "jax" else ()
    return TRAINED + (OF_CRITIC if config.advantage.has_critic else ()) + sampled


def topology_mesh(config: Config, target: Target) -> Mesh:
    """Return the config's mesh, of devices that need not be attached.

    Call it before anything asks JAX for devices: the environment is read only once. Raises UserError if the
    compiler is not installed, or does not support the topology.
    """
    for name, value in COMPILER.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for other devices cannot be read back
    options = {"topology_name": target.topology}
    if target.platform == "cuda":
        proto = Path(__file__).with_name("gpu_target.textproto").read_text(encoding="utf-8")
        figures = Template(proto).substitute(vars(target.chip))  # a GpuTargetConfigProto as text
        options = {"topology": target.topology, "target_config": figures}
    try:
        topology = topologies.get_topology_desc(platform=target.platform, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{target}: the compiler knows no such devices: {one_line(error)}") from error
    except (RuntimeError, NotImplementedError) as error:  # it is not installed
        raise UserError(missing_compiler(target)) from error
    return make_mesh(config.mesh, list(topology.devices))


def missing_compiler(target: Target) -> str:
    """Name the packages to install, in a folder of their own: vLLM takes libtpu for a machine with a TPU."""
    compiler = "XLA's compiler for CUDA"
    packages = [f"{name}=={version('jax')}" for name in CUDA_PACKAGES]
    packages += ["nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14"]
    if target.platform == "tpu":
        compiler, requirements = "TPU's compiler (libtpu)", requires("jax") or []
        packages = [text.partition(";")[0].strip() for text in requirements if text.startswith("libtpu")][:1]
    quoted = " ".join(f"'{package}'" for package in packages)
    return (
        f"{compiler} is not installed: pip install --no-deps --target compiler {quoted}, then give the same"
        " command with PYTHONPATH=compiler before it; or leave the compiler out with --estimate"
    )


def lowered_program(config: Config, architecture: Architecture, mesh: Mesh, name: str) -> jax.stages.Lowered:
    """Return a program of a run `placed_on` the mesh's devices, ready to be compiled."""
    numerics, adapters = Numerics.from_config(config.policy), Adapters.from_config(config.policy.lora)
    policy, length = Policy(architecture, numerics, adapters), config.learner.pack_length
    if name in SAMPLED:
        return CacheEngine(policy, mesh, config.sampler, config.rollout.max_length).lower()[name]
    if name in OF_CRITIC:
        learner: Learner = critic_learner(
            config, policy, mesh, make_schedule(config.critic.optimizer, UPDATES)
        )
        loss: LossFunction = ValueLoss(config.critic.clip)
    else:
        learner = policy_learner(config, policy, mesh, make_schedule(config.learner.optimizer, UPDATES))
        loss = policy_loss(config)
    if name == "log-probabilities":
        return learner.lower_logprobs(length)
    return learner.lower_apply() if name.endswith("apply") else learner.lower_update(length, loss)


def compiled_figures(program: jax.stages.Lowered, beside: float = 0.0) -> dict[str, Any]:
    """Return seconds of compiling, and GiB on a device by the compiler's plan; or the compiler's refusal.

    *peak* is in use at once; *needed* is the program's memory, with gaps; both include the bytes `beside` it.
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
