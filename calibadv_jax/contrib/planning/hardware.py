"""Devices that a run can be planned for (``hardware.yaml``), and a config's mesh on them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Literal

import yaml

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.attention import Kernel, best_kernel
from calibadv_jax.policy.sharding import local_sizes

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # Environment variable: share of a GPU's memory that JAX takes.
TPU_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
ONE_GPU = "1x1x1"
GPU_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*){2}")


@dataclass(frozen=True)
class Chip:
    """The figures of a device, as hardware.yaml describes them."""

    memory: float  # bytes
    flops: float  # bfloat16 operations a second
    bandwidth: float  # bytes a second from and to its memory
    links: float  # bytes a second from other devices of its slice or host
    network: float  # bytes a second from devices of other hosts


@dataclass(frozen=True)
class Gpu(Chip):
    """A GPU, with the figures that the compiler for CUDA needs."""

    name: str
    capability: str  # compute capability, such as "9.0"
    multiprocessors: int
    l2_cache: int  # bytes
    shared_memory: int  # bytes of a multiprocessor
    threads: int  # the most of a multiprocessor
    fpus: int  # of a multiprocessor
    clock: float  # GHz

    def target_config(self) -> str:
        """Return XLA's GpuTargetConfigProto of the GPU, as text."""
        template = Path(__file__).with_name("gpu_target.textproto").read_text(encoding="utf-8")
        major, _, minor = self.capability.partition(".")
        # From Hopper on, only code for exactly this kind of GPU may use all of its instructions.
        has_accelerated_features = int(major) >= 9
        figures = vars(self) | {
            "major": major,
            "minor": minor,
            "extension": "ACCELERATED_FEATURES" if has_accelerated_features else "NONE",
            "platform": f"{self.capability}a" if has_accelerated_features else self.capability,
            # A multiprocessor keeps a kilobyte of its memory.
            "block_memory": self.shared_memory - 1024,
            # Operations of a tensor core in a clock, by the card's rate: half precision, one byte.
            "half_rate": round(self.flops / (2e9 * self.clock * 4 * self.multiprocessors)),
            "byte_rate": round(self.flops / (1e9 * self.clock * 4 * self.multiprocessors)),
        }
        return Template(template).substitute(figures)


@dataclass(frozen=True)
class Tpu(Chip):
    """A TPU chip, with the shapes of its slices."""

    host: str  # shape of one host of a larger slice
    alone: int  # the most chips that one host alone has
    slices: dict[int, str]  # shapes by the number in Cloud TPU's name


_FIGURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GPUS = {name: Gpu(**figures) for name, figures in _FIGURES["gpus"].items()}
TPUS = {name: Tpu(**figures) for name, figures in _FIGURES["tpus"].items()}
# Names of slices in Cloud TPU, such as v5e-16, with kind and shape, such as v5e:4x4.
CLOUD_NAMES = {
    f"{kind}-{number}": f"{kind}:{shape}"
    for kind, tpu in TPUS.items()
    for number, shape in tpu.slices.items()
}


@dataclass(frozen=True)
class Target:
    """Devices of one kind that a run can be planned for."""

    platform: Literal["tpu", "cuda"]
    kind: str  # v5e, h100
    topology: str  # as the compiler names it: v5e:4x4, or slices x hosts x GPUs of a host
    chip: Chip
    devices: int
    hosts: int = 1  # each with a process of the trainer

    @property
    def limit(self) -> float:
        """Bytes of a device that the trainer may use; UserError for an invalid share in the environment."""
        if self.platform == "tpu":
            return self.chip.memory
        value = os.environ.get(FRACTION, "0.75")
        with suppress(ValueError):
            if 0 < float(value) <= 1:
                return float(value) * self.chip.memory
        raise UserError(f"{FRACTION} is {value!r} in the environment: set it to a number above 0, up to 1")

    @property
    def links(self) -> float:
        """Bytes a second that a device receives when all devices exchange data: over the slowest link."""
        return self.chip.network if self.hosts > 1 else self.chip.links

    def kernel(self, compute_dtype: str) -> Kernel:
        """Return the attention kernel that ``auto`` takes on these devices, with the installed JAX."""
        if isinstance(self.chip, Gpu):
            return best_kernel("gpu", compute_dtype, float(self.chip.capability))
        return best_kernel("tpu", compute_dtype)

    @property
    def host(self) -> Target:
        """The devices of one host."""
        if self.hosts == 1:
            return self
        if self.platform == "tpu":
            return find_target(tpu=f"{self.kind}:{TPUS[self.kind].host}")
        return find_target(gpu=self.kind, topology=f"1x1x{self.devices // self.hosts}")

    def __str__(self) -> str:
        kind = self.kind if self.platform == "tpu" else self.kind.upper()
        _, _, shape = self.topology.rpartition(":")
        return f"{self.devices} {kind} ({shape})"


def find_target(tpu: str = "", gpu: str = "", topology: str = "") -> Target:
    """Return the devices that the command line names: either `tpu`, or `gpu` and `topology`.

    Args:
        tpu: Kind and shape of a slice, such as v5e:4x4, or its name in Cloud TPU, such as v5e-16.
        gpu: Kind of the GPUs, such as h100.
        topology: Of GPUs: slices x hosts x GPUs of a host, such as 1x2x8; empty: one GPU.

    Raises:
        UserError: The names are unknown or incomplete.
    """
    if bool(tpu) == bool(gpu) or (tpu and topology):
        raise UserError("name the devices: --tpu v5e:4x4, --gpu h100, or --gpu h100 --topology 1x2x8")
    return _find_gpus(gpu, topology or ONE_GPU) if gpu else _find_tpus(tpu)


def _find_gpus(gpu: str, topology: str) -> Target:
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: must be one of {', '.join(GPUS)}")
    if not GPU_SHAPE.fullmatch(topology):
        raise UserError(f"--topology {topology}: must be slices x hosts x GPUs of a host, such as 1x2x8")
    slices_and_hosts, _, _ = topology.rpartition("x")
    return Target("cuda", gpu, topology, GPUS[gpu], _product(topology), hosts=_product(slices_and_hosts))


def _find_tpus(tpu: str) -> Target:
    name = tpu.replace("v5litepod", "v5e")  # another name of Cloud TPU for v5e
    kind, _, shape = CLOUD_NAMES.get(name, name).partition(":")
    if kind not in TPUS or not TPU_SHAPE.fullmatch(shape):
        raise UserError(
            f"--tpu {tpu}: must be one of {', '.join(TPUS)} with the slice's shape, such as v5e:4x4, or a"
            " name of Cloud TPU, such as v5e-16 (chips) and v5p-16 (cores, 8 chips)"
        )
    devices = _product(shape)
    chip = TPUS[kind]
    hosts = 1
    if devices > chip.alone:
        hosts = devices // _product(chip.host)
    return Target("tpu", kind, f"{kind}:{shape}", chip, devices, hosts)


def sampler_of(config: Config, target: Target) -> Config:
    """Return the config of one process' embedded sampler, with a process on each host."""
    return process_sampler(config, config.mesh.sizes, target.devices, target.hosts)


def process_sampler(config: Config, mesh: Mapping[str, int], devices: int, processes: int) -> Config:
    """Return the config of one process' embedded sampler: its own devices, its share of the slots.

    Args:
        config: The config of the run.
        mesh: Sizes of the run's mesh by axis.
        devices: Number of devices of all processes.
        processes: Number of processes.

    Returns:
        The config; the same where a process is alone, or samples with vLLM.
    """
    if processes == 1 or config.sampler.name != "jax":
        return config
    sizes = local_sizes(mesh, devices // processes)
    slots = -(-config.sampler.slots // processes)  # rounded up
    sampler = replace(config.sampler, slots=slots)
    return replace(config, mesh=replace(config.mesh, **sizes), sampler=sampler)


def _product(shape: str) -> int:
    """Return the number of devices of a shape such as 2x4."""
    return math.prod(int(size) for size in shape.split("x"))


def placed_on(config: Config, target: Target) -> Config:
    """Return the config with a mesh of the target's devices, and the attention kernel of its platform.

    Args:
        config: The config; a mesh axis may be given as the rest of the devices.
        target: The devices.

    Raises:
        UserError: The mesh does not fit the devices, or they cannot share a microbatch evenly.
    """
    devices = target.devices
    sizes = config.mesh.sizes_on(devices)
    if math.prod(sizes.values()) != devices:
        shape = " x ".join(f"{name} {size}" for name, size in config.mesh.sizes.items())
        raise UserError(
            f"the mesh {shape} does not fit {target}: set mesh.data=1 mesh.fsdp={devices} mesh.tensor=1"
            f" learner.microbatch_rows={devices}"
        )
    check_rows(config, sizes)
    policy = config.policy
    if policy.attention == "auto":
        policy = replace(policy, attention=target.kernel(policy.compute_dtype))
    return replace(config, mesh=replace(config.mesh, **sizes), policy=policy)


def check_rows(config: Config, mesh: Mapping[str, int]) -> None:
    """Check that the mesh's devices can share the rows of a microbatch evenly.

    Args:
        config: The config.
        mesh: Sizes of the mesh by axis.

    Raises:
        UserError: They cannot.
    """
    shards = mesh["data"] * mesh["fsdp"]
    rows = config.learner.microbatch_rows
    if rows % shards:
        next_multiple = -(-rows // shards) * shards
        raise UserError(
            f"learner.microbatch_rows is {rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards}:"
            f" set learner.microbatch_rows={next_multiple}"
        )
