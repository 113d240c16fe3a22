"""Descriptions of GPUs that XLA can compile for without having one: text of its GpuTargetConfigProto.

Figures of H100 and H200: `xla/backends/gpu/target_config/specs` of openxla/xla. The H20 is a Hopper chip
with fewer multiprocessors and more memory; its figures are NVIDIA's, and not in that folder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A Hopper GPU: what differs between its kinds."""

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
# XLA's primitive type -> (units a core, operations a clock), for scalars and for the matrix units.
_SCALAR = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1), 16: (128, 2)}
_MATRIX = {10: 512, 11: 256, 12: 32, 16: 512} | dict.fromkeys((2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 1024)
CLOCK_GHZ = 1.98
MATRIX_CLOCK_GHZ = 1.83


def target_config(kind: str) -> str:
    """The text that `jax.experimental.topologies.get_topology_desc(platform="cuda", …)` wants."""
    gpu = GPUS[kind]
    scalar = " ".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {CLOCK_GHZ} units_per_core: {units}"
        f" ops_per_clock: {operations} }} }}"
        for key, (units, operations) in _SCALAR.items()
    )
    matrix = " ".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {MATRIX_CLOCK_GHZ} units_per_core: 4"
        f" ops_per_clock: {operations} }} }}"
        for key, operations in _MATRIX.items()
    )
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
