"""A run's programs, compiled by libtpu or XLA's compiler for CUDA for devices that are not attached."""

from __future__ import annotations

import os
import re
import time
from importlib.metadata import requires, version
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.hardware import Gpu, Target
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

UPDATES = 100  # Length of the learning rate's schedule. The programs do not depend on it.
LEARNER_PROGRAMS = ("update", "apply", "log-probabilities")
CRITIC_PROGRAMS = ("critic's update", "critic's apply")
SAMPLER_PROGRAMS = ("prefill", "copy", "decode")
NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory", re.IGNORECASE)
# Environment variables of the compilers; values that a user has set are kept.
COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask for the machine's type
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several may compile at a time: none holds a TPU
    # There is no GPU to try kernels on, and from JAX 0.11 on no default for a product's kernel in Triton.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")  # Packages with the same version as JAX.
NVIDIA_COMPILER = ("nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14")


def programs_of(config: Config) -> tuple[str, ...]:
    """Return the names of the programs that a run compiles, for `lowered_program`."""
    programs: tuple[str, ...] = LEARNER_PROGRAMS
    if config.advantage.has_critic:
        programs += CRITIC_PROGRAMS
    if config.sampler.name == "jax":
        programs += ("prefill", "decode")
    return programs


def topology_mesh(config: Config, target: Target) -> Mesh:
    """Return the config's mesh of devices that need not be attached.

    Call it before anything asks JAX for devices: JAX reads the environment only once.

    Args:
        config: The config, `placed_on` the target.
        target: The devices.

    Raises:
        UserError: The compiler is not installed, or does not support the topology.
    """
    for name, value in COMPILER.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for other devices cannot be read back
    options = {"topology_name": target.topology}
    if target.platform == "cuda":
        assert isinstance(target.chip, Gpu)
        options = {"topology": target.topology, "target_config": target.chip.target_config()}
    try:
        topology = topologies.get_topology_desc(platform=target.platform, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{target}: the compiler knows no such devices: {one_line(error)}") from error
    except (RuntimeError, NotImplementedError) as error:  # it is not installed
        raise UserError(missing_compiler(target)) from error
    return make_mesh(config.mesh, list(topology.devices))


def missing_compiler(target: Target) -> str:
    """Return the message that names the packages to install for a target's compiler.

    They go to a folder of their own: where libtpu is importable, vLLM takes the machine for one with a TPU.
    """
    if target.platform == "tpu":
        compiler = "TPU's compiler (libtpu)"
        packages = _libtpu_requirement()
    else:
        compiler = "XLA's compiler for CUDA"
        packages = [f"{name}=={version('jax')}" for name in CUDA_PACKAGES]
        packages.extend(NVIDIA_COMPILER)
    quoted = " ".join(f"'{package}'" for package in packages)
    return (
        f"{compiler} is not installed: pip install --no-deps --target compiler {quoted}, then give the same"
        " command with PYTHONPATH=compiler before it; or leave the compiler out with --estimate"
    )


def _libtpu_requirement() -> list[str]:
    """Return the version of libtpu that the installed JAX requires; empty if it names none."""
    for requirement in requires("jax") or []:
        package, _, _ = requirement.partition(";")
        if package.startswith("libtpu"):
            return [package.strip()]
    return []


def lowered_program(config: Config, architecture: Architecture, mesh: Mesh, name: str) -> jax.stages.Lowered:
    """Return a program of a run, ready to be compiled.

    Args:
        config: The config, `placed_on` the mesh's devices.
        architecture: The policy's architecture.
        mesh: The mesh, which may be a `topology_mesh`.
        name: One of `LEARNER_PROGRAMS`, `CRITIC_PROGRAMS` or `SAMPLER_PROGRAMS`.
    """
    numerics = Numerics.from_config(config.policy)
    adapters = Adapters.from_config(config.policy.lora)
    policy = Policy(architecture, numerics, adapters)
    length = config.learner.pack_length
    if name in SAMPLER_PROGRAMS:
        engine = CacheEngine(policy, mesh, config.sampler, config.rollout.max_length)
        return engine.lower()[name]
    learner: Learner
    loss: LossFunction
    if name in CRITIC_PROGRAMS:
        schedule = make_schedule(config.critic.optimizer, UPDATES)
        learner = critic_learner(config, policy, mesh, schedule)
        loss = ValueLoss(config.critic.clip)
    else:
        schedule = make_schedule(config.learner.optimizer, UPDATES)
        learner = policy_learner(config, policy, mesh, schedule)
        loss = policy_loss(config)
    # Kernels ask JAX's default device which GPU they are for. It must be one of this process.
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    with jax.default_device(device):
        if name == "log-probabilities":
            return learner.lower_logprobs(length)
        if name.endswith("apply"):
            return learner.lower_apply()
        return learner.lower_update(length, loss)


def compiled_figures(program: jax.stages.Lowered, beside: float = 0.0) -> dict[str, Any]:
    """Compile a program, and return its time and its memory by the compiler's plan.

    Args:
        program: A `lowered_program`.
        beside: Bytes on a device that the run holds besides the program and its inputs.

    Returns:
        `compile_s` in seconds, and GiB on a device: `arguments`, `results`, `temporary`, `peak` (in use at
        once) and `needed` (the program's memory, with gaps). The last two include `beside`. If the program
        does not fit, only `refused`: the compiler's words.
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
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes
    temporary = memory.temp_size_in_bytes
    # Results that take the place of donated arguments are counted once.
    needed = arguments + results - memory.alias_size_in_bytes + temporary
    return {
        "compile_s": round(seconds, 1),
        "arguments": arguments / GIB,
        "results": results / GIB,
        "temporary": temporary / GIB,
        "peak": (memory.peak_memory_in_bytes + beside) / GIB,
        "needed": (needed + beside) / GIB,
    }
