"""Memory, operations and traffic of other ways to compute an update, compiled for a GPU that is not attached.

    python -m benchmarks.compiled.update_variants --shape qwen2.5-0.5b --rows 4
    python -m benchmarks.compiled.update_variants --shape qwen2.5-0.5b --only head "optimizer's step"

Needs XLA's compiler for CUDA (`benchmarks.compiled.ahead_of_time`); no GPU. A line for each variant:

    layers scanned       one loop over all layers, as `policy.transformer` has it
    layers unrolled      a copy of the layer's code for each layer
    fused products       q/k/v in one product, gate/up in one product, layers scanned
    head N               N tokens of a row whose logits exist at once; 0: those of the whole row
    optimizer's step     clip, moments and parameters; bytes for each parameter

The operations are those of matrix products, the bytes those that kernels read and write, both from the text
of the compiled program (`benchmarks.compiled.hlo_costs`). Every token is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from benchmarks.compiled.ahead_of_time import parse as parse_programs
from benchmarks.compiled.ahead_of_time import run_config, target_of
from benchmarks.compiled.hlo_costs import program_costs
from benchmarks.device import SHAPES
from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.compiled import lowered_program, topology_mesh
from calibadv_jax.contrib.planning.memory import GIB
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.kernels.custom_gradients import gated
from calibadv_jax.policy.logprobs import MIN_CHUNKS
from calibadv_jax.policy.rotary import Rope, rotate
from calibadv_jax.policy.transformer import Attention, Mlp

PARTS = ("layers", "fused", "head", "optimizer's step")
HEADS = (256, 512, 0)  # beside the 1024 of "layers scanned"
GIGA = 1e9
TERA = 1e12


@contextmanager
def unrolled_layers() -> Iterator[None]:
    """Let `jax.lax.scan` copy its body for each iteration."""
    scan = jax.lax.scan

    def unrolled_scan(*arguments: Any, **options: Any) -> Any:
        return scan(*arguments, **options | {"unroll": True})

    with mock.patch.object(jax.lax, "scan", unrolled_scan):
        yield


def fused_product(x: Array, *layers: Any) -> list[Array]:
    """Return the results of linear layers, from one product with all of their weights.

    Args:
        x: [..., D].
        layers: `Linear` without adapters.

    Returns:
        [..., F] for each layer.
    """
    dtype = x.dtype
    kernel = jnp.concatenate([layer.kernel[...].astype(dtype) for layer in layers], axis=1)
    out = x @ kernel
    if layers[0].bias is not None:
        out = out + jnp.concatenate([layer.bias[...].astype(dtype) for layer in layers])
    ends: list[int] = []
    for layer in layers[:-1]:
        ends.append((ends[-1] if ends else 0) + layer.kernel.shape[1])
    return jnp.split(out, ends, axis=-1)


def fused_project(attention: Attention, x: Array, rope: Rope) -> tuple[Array, Array, Array]:
    """Return what `Attention.project` does, from one product; for architectures without q and k norms."""
    by_head = (*x.shape[:2], -1, attention.architecture.head_dim)
    products = fused_product(x, attention.q, attention.k, attention.v)
    q, k, v = (product.reshape(by_head) for product in products)
    return rotate(q, *rope), rotate(k, *rope), v


def fused_mlp(mlp: Mlp, x: Array) -> Array:
    """Return what `Mlp` does, with gate and up from one product."""
    return mlp.down(gated(*fused_product(x, mlp.gate, mlp.up)))


@contextmanager
def fused_products() -> Iterator[None]:
    """Let the layers of a decoder compute q, k and v in one product, and gate and up in one."""
    with (
        mock.patch.object(Attention, "project", fused_project),
        mock.patch.object(Mlp, "__call__", fused_mlp),
    ):
        yield


def figures_of(config: Config, architecture: Architecture, mesh: Mesh, name: str) -> dict[str, float]:
    """Compile a program, and return its GiB on a device, its operations, bytes and seconds to compile."""
    program = lowered_program(config, architecture, mesh, name)
    begun = time.perf_counter()
    compiled = program.compile()
    seconds = time.perf_counter() - begun
    memory: Any = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    length = config.learner.pack_length
    chunk = min(config.policy.logprob_chunk, length // MIN_CHUNKS)
    text = compiled.as_text()
    assert text
    costs = program_costs(text, other_trips=length // chunk)
    return {
        "needed": (needed - memory.alias_size_in_bytes) / GIB,
        "flops": costs.flops,
        "bytes": costs.bytes,
        "compile_s": seconds,
    }


def variants(
    config: Config, architecture: Architecture, mesh: Mesh, parts: list[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the figures of each variant."""
    if "layers" in parts:
        yield "layers scanned", figures_of(config, architecture, mesh, "update")
    if "fused" in parts:
        with fused_products():
            yield "fused products", figures_of(config, architecture, mesh, "update")
    if "head" in parts:
        for chunk in HEADS:
            length = chunk or config.learner.pack_length
            changed = replace(config, policy=replace(config.policy, logprob_chunk=length))
            yield f"head {chunk}", figures_of(changed, architecture, mesh, "update")
    if "optimizer's step" in parts:
        yield "optimizer's step", figures_of(config, architecture, mesh, "apply")
    if "layers" in parts:  # last, since it takes minutes
        with unrolled_layers():
            yield "layers unrolled", figures_of(config, architecture, mesh, "update")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--rows", default="4")
    parser.add_argument("--length", default="8192")
    parser.add_argument("--remat", default="attention")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="file to which a line is added for each variant")
    options = parser.parse_args()
    words = (
        f"--platform cuda --gpu {options.gpu} --topology 1x1x1 --shape {options.shape} --fsdp 1 --tensor 1"
    )
    words += f" --rows {options.rows} --length {options.length} --remat {options.remat}"
    arguments = parse_programs(words.split())
    config = run_config(arguments)
    mesh = topology_mesh(config, target_of(arguments))
    architecture = architecture_from_hf(SHAPES[options.shape])
    out = sys.stdout
    out.write(f"{words}, attention {config.policy.attention}, jax {jax.__version__}\n")
    out.write(f"{'':20}{'GiB':>8}{'TFLOP':>9}{'GB':>9}{'bytes/parameter':>17}{'compile s':>11}\n")
    for name, figures in variants(config, architecture, mesh, options.only):
        by_parameter = figures["bytes"] / architecture.num_parameters
        out.write(
            f"{name:20}{figures['needed']:8.1f}{figures['flops'] / TERA:9.2f}{figures['bytes'] / GIGA:9.1f}"
            f"{by_parameter:17.1f}{figures['compile_s']:11.1f}\n"
        )
        out.flush()
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"arguments": words, "name": name} | figures) + "\n")


if __name__ == "__main__":
    main()
