"""The trainer's programs compile for GPUs, by XLA's own compiler for them: no GPU and no driver is needed.

In a process of its own, with the compiler from a folder of its own: its packages of CUDA must not stand
beside those that a build of torch wants.
"""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compiler_rig import SQUARE, compile_for, run_with
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from calibadv_jax.contrib.planning.hardware import find_target
from calibadv_jax.policy.attention import packed_attention

COMPILER = Path(sys.prefix) / "cuda_compiler"  # where scripts/test.sh puts it
MOSAIC = "mosaic_gpu_v2"
# GPU, head size, and what tokamax's kernel is called in the compiled program. With JAX 0.11 and later.
ATTENTIONS = (
    ("h100", 64, MOSAIC),
    ("h200", 128, MOSAIC),
    ("b200", 64, MOSAIC),
    ("a10", 64, "__gpu$xla.gpu.triton"),
)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.is_dir(), reason="no compiler for CUDA; scripts/test.sh installs it")
def test_update_logprobs_and_sampler_compile_for_a_sharded_mesh_of_gpus():
    run_with(COMPILER, __file__)


def compile_all() -> None:
    lowered, compiled = compile_for("--platform", "cuda", "--gpu", "h100", "--topology", "1x1x8", share=1 / 6)
    for name, program in compiled.items():
        for text in (program.as_text(), lowered[name].as_text() if name in lowered else ""):
            assert not SQUARE.search(text), f"{name} holds an array of T x T"
            assert "__cudnn" not in text, f"{name} wants cuDNN"
        if name in ("update", "log-probabilities"):
            kernel = MOSAIC if has_tokamax() else "triton"
            assert kernel in program.as_text(), f"{name} has another attention"


def has_tokamax() -> bool:
    """Whether JAX is one for which ``auto`` takes tokamax's kernels."""
    return jax.__version_info__ >= (0, 11)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.is_dir(), reason="no compiler for CUDA; scripts/test.sh installs it")
@pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed; it needs JAX 0.11.1"
)
@pytest.mark.parametrize(("gpu", "head_dim", "kernel"), ATTENTIONS)
def test_attention_of_tokamax_compiles_for_each_card(gpu, head_dim, kernel):
    """Each in a process of its own: the first card of a process decides what ptxas compiles for."""
    run_with(COMPILER, __file__, gpu, str(head_dim), kernel)


def compile_attention(gpu: str, head_dim: int, kernel: str) -> None:
    """Compile values and gradients of packed attention with grouped queries, for a GPU that is not here."""
    target = find_target(gpu=gpu)
    assert target.kernel("bfloat16") == "tokamax"
    options = {"target_config": target.chip.target_config(), "topology": target.topology}
    (device,) = topologies.get_topology_desc(platform="cuda", **options).devices
    place = SingleDeviceSharding(device)
    shapes = [(2, 1000, heads, head_dim) for heads in (4, 2, 2)]
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes)
    segments = jax.ShapeDtypeStruct((2, 1000), jnp.int32, sharding=place)

    def gradients(q, k, v, segments):
        def objective(q, k, v):
            return jnp.sum(packed_attention(q, k, v, segments, "tokamax", 128).astype(jnp.float32))

        return jax.grad(objective, argnums=(0, 1, 2))(q, k, v)

    with jax.default_device(device):
        traced = jax.jit(gradients).trace(q, k, v, segments)
        program = traced.lower(lowering_platforms=("cuda",)).compile()
    text = program.as_text()
    # The forward pass, and the gradients of queries and of keys and values.
    assert text.count(f'custom_call_target="{kernel}"') >= 2, f"{gpu}: {kernel} is not there"
    has_square = bool(re.search(r"[\[,](?:1000|1024),(?:1000|1024)\]", text))
    # The backward pass of tokamax's Triton kernel takes a mask of T x T.
    assert has_square == (kernel != MOSAIC), f"{gpu}: an array of T x T"
    assert "__cudnn" not in text, f"{gpu} wants cuDNN"


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_attention(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        compile_all()
