"""TPUs and GPUs that a run can be planned for: memory and speed of one device, and descriptions for XLA.

Figures of TPUs: Google's pages of v5e, v5p, v6e and v4. Figures of GPUs: NVIDIA's data sheets, without
sparsity, and for H100 and H200 `xla/backends/gpu/target_config/specs` of openxla/xla. The H20, a Hopper chip
with fewer multiprocessors and more memory, is not in that folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.sharding import local_sizes
from calibadv_jax.policy.transformer import KERNELS


@dataclass(frozen=True)
class Gpu:
    """Figures in which Hopper GPUs differ."""

    name: str
    multiprocessors: int
    memory: int  # bytes
    bandwidth: int  # bytes a second
    l2_cache: int  # bytes
    flops: float  # a second, bfloat16, at most


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, 84_942_979_072, 3_352_320_000_000, 52_428_800, 989e12),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 989e12),
    "h20": Gpu("NVIDIA H20", 78, 102_625_181_696, 4_022_784_000_000, 62_914_560, 148e12),
}
# XLA's primitive type -> (units a core, operations a clock), for scalar and for matrix units.
_SCALAR = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1), 16: (128, 2)}
_MATRIX = {10: (4, 512), 11: (4, 256), 12: (4, 32), 16: (4, 512)}
_MATRIX |= dict.fromkeys((2, 6, 19, 20, 23, 24, 25, 28, 29, 33), (4, 1024))
CLOCK_GHZ = 1.98
MATRIX_CLOCK_GHZ = 1.83


def target_config(kind: str) -> str:
    """Return a GpuTargetConfigProto as text, with which XLA compiles for a GPU that is not attached."""
    gpu = GPUS[kind]

    def rates(clock: float, units: Mapping[int, tuple[int, int]]) -> str:
        return " ".join(
            f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock} units_per_core: {count}"
            f" ops_per_clock: {operations} }} }}"
            for key, (count, operations) in units.items()
        )

    scalar, matrix = rates(CLOCK_GHZ, _SCALAR), rates(MATRIX_CLOCK_GHZ, _MATRIX)
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {gpu.multiprocessors} fpus_per_core: 128 clock_rate_ghz: {CLOCK_GHZ}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2_cache} device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {matrix} }}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true name: "{gpu.name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


Platform = Literal["tpu", "cuda"]
FRACTION = (
    "XLA_PYTHON_CLIENT_MEM_FRACTION"  # environment variable of the share of a GPU's memory that JAX takes
)
GPU_SHARE = 0.75  # its default


@dataclass(frozen=True)
class Chip:
    memory: float  # bytes
    flops: float  # a second, bfloat16, at most
    bandwidth: float  # bytes a second from and to its memory, at most
    links: float  # bytes a second that it can receive from others of its slice or host, at most
    network: float  # the same from others of another host


TPUS = {
    "v5e": Chip(16e9, 197e12, 819e9, 200e9, 200e9),
    "v5p": Chip(95e9, 459e12, 2765e9, 600e9, 600e9),
    "v6e": Chip(32e9, 918e12, 1638e9, 400e9, 400e9),
    "v4": Chip(32e9, 275e12, 1228e9, 300e9, 300e9),
}
# Shape of one host of a larger slice, and the most chips that one host alone has.
HOSTS = {"v4": ("2x2x1", 4), "v5e": ("2x2", 8), "v5p": ("2x2x1", 4), "v6e": ("2x2", 8)}
# Names of Cloud TPU: v5e-16 has 16 chips, and v5p-16 has 16 cores, which are 8 chips.
CORES = {"v4": 2, "v5p": 2}
LITE = {"v5litepod": "v5e"}
_HOPPER_LINKS, _NETWORK = 450e9, 50e9  # NVLink; 400 Gbit/s for each GPU, as hosts of eight usually have


@dataclass(frozen=True)
class Target:
    """Devices that need not be attached."""

    platform: Platform
    kind: str  # v5e, h100
    topology: str  # as the compiler names it: v5e:4x4, or slices x hosts x GPUs of a host
    chip: Chip
    devices: int
    hosts: int = 1  # each with a process of the trainer

    @property
    def limit(self) -> float:
        """Bytes of a device that the trainer may use.

        Raises:
            UserError: the environment names an invalid share.
        """
        if self.platform == "tpu":
            return self.chip.memory
        value = os.environ.get(FRACTION, str(GPU_SHARE))
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(
                f"{FRACTION} is {value!r} in the environment: set it to a number above 0, up to 1"
            )
        return share * self.chip.memory

    @property
    def links(self) -> float:
        """Bytes a second that one device receives where all exchange parts: those of the slowest link.

        Links between the hosts of a TPU slice are as fast as within one.
        """
        return self.chip.network if self.hosts > 1 else self.chip.links

    @property
    def host(self) -> Target:
        if self.hosts == 1:
            return self
        if self.platform == "tpu":
            return find_target(tpu=f"{self.kind}:{HOSTS[self.kind][0]}")
        return find_target(gpu=self.kind, topology=f"1x1x{self.devices // self.hosts}")

    def __str__(self) -> str:
        kind = self.kind if self.platform == "tpu" else self.kind.upper()
        return f"{self.devices} {kind} ({self.topology.rpartition(':')[2]})"


def find_target(tpu: str = "", gpu: str = "", topology: str = "") -> Target:
    """Return the devices that the command line names.

    Args:
        tpu: kind and shape of the slice, such as v5e:4x4, or its name in Cloud TPU, such as v5e-16.
        gpu: kind, such as h100.
        topology: of GPUs: slices x hosts x GPUs of a host, such as 1x2x8.

    Raises:
        UserError: neither or both are named, or a kind or shape is unknown.
    """
    if bool(tpu) == bool(gpu):
        raise UserError("name the devices: --tpu v5e:4x4, or --gpu h100 --topology 1x2x8")
    if tpu:
        kind, _, shape = _slice(tpu).partition(":")
        if topology:
            raise UserError(
                f"--topology {topology} is for --gpu; a TPU's shape follows its kind: --tpu {kind}:4x4"
            )
        if kind not in TPUS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
            raise UserError(
                f"--tpu {tpu}: must be one of {', '.join(TPUS)} with the slice's shape, such as v5e:4x4, or a"
                " name of Cloud TPU, such as v5e-16 (chips) and v5p-16 (cores, 8 chips)"
            )
        count, (host, alone) = _product(shape), HOSTS[kind]
        hosts = 1 if count <= alone else count // _product(host)
        return Target("tpu", kind, f"{kind}:{shape}", TPUS[kind], count, hosts)
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: must be one of {', '.join(GPUS)}")
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology):
        raise UserError(
            f"--topology {topology or 'is missing'}: must be slices x hosts x GPUs of a host, such as 1x2x8"
        )
    figures = GPUS[gpu]
    chip = Chip(figures.memory, figures.flops, figures.bandwidth, _HOPPER_LINKS, _NETWORK)
    return Target("cuda", gpu, topology, chip, _product(topology), _product(topology.rpartition("x")[0]))


def _slice(name: str) -> str:
    """Return ``v5p:2x2x2`` for Cloud TPU's name ``v5p-16``: the usual shape; other names unchanged."""
    kind, _, number = name.partition("-")
    kind = LITE.get(kind, kind)
    if kind not in TPUS or not number.isdecimal():
        return name
    chips, rest = divmod(int(number), CORES.get(kind, 1))
    doublings, axes = chips.bit_length() - 1, HOSTS[kind][0].count("x") + 1
    is_sold = chips >= 4 or (chips == 1 and axes == 2)
    if rest or not is_sold or chips != 1 << doublings:
        return name
    sizes = [1 << (doublings + axis) // axes for axis in range(axes)]
    return f"{kind}:{HOSTS[kind][0] if chips == 4 else 'x'.join(map(str, sizes))}"


def sampler_of(config: Config, target: Target) -> Config:
    """Return the config of one process' embedded sampler: its own devices, and its share of the slots.

    Args:
        config: `placed_on` the target.

    Raises:
        UserError: as `local_sizes`.
    """
    if target.hosts == 1:
        return config
    sizes = local_sizes(config.mesh.sizes, target.devices // target.hosts)
    slots = -(-config.sampler.slots // target.hosts)
    sampler = replace(config.sampler, slots=slots)
    return replace(config, mesh=replace(config.mesh, **sizes), sampler=sampler)


def _product(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x"))


def placed_on(config: Config, target: Target) -> Config:
    """Return the config with a mesh of the target's devices, and the attention kernel of its platform.

    Raises:
        UserError: the mesh is of another number of devices, or they cannot share the rows.
    """
    mesh, rows = config.mesh, config.learner.microbatch_rows
    sizes = mesh.sizes_on(target.devices)
    shards = sizes["data"] * sizes["fsdp"]
    if math.prod(sizes.values()) != target.devices:
        shape = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items())
        tensor = mesh.tensor if mesh.tensor > 0 and target.devices % mesh.tensor == 0 else 1
        fsdp = target.devices // tensor
        raise UserError(
            f"the mesh {shape} does not fit {target}: set mesh.data=1 mesh.fsdp={fsdp} mesh.tensor={tensor}"
            f" learner.microbatch_rows={max(1, rows // shards) * fsdp}"
        )
    if rows % shards:
        raise UserError(
            f"learner.microbatch_rows is {rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards}:"
            f" set learner.microbatch_rows={-(-rows // shards) * shards}"
        )
    policy = config.policy
    if policy.attention == "auto":
        policy = replace(policy, attention=KERNELS["gpu" if target.platform == "cuda" else "tpu"])
    return replace(config, mesh=replace(mesh, **sizes), policy=policy)
