"""tokamax's attention for packed rows: its Triton kernel, interpreted, beside the XLA kernel; gradients too.

Its Mosaic kernels for Hopper and Blackwell cannot be interpreted by JAX 0.11 (products of warp groups are not
simulated): tests/test_cuda.py compiles them, and tests/policy/test_on_gpu.py runs them on a GPU.
"""

import logging
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import close_in_norm
from test_attention import rows

from calibadv_jax.policy.attention import packed_attention

pytest.importorskip("tokamax", reason="tokamax is not installed; it needs JAX 0.11.1 and Python 3.12")
from jax.experimental import pallas as pl
from tokamax._src import config as tokamax_config
from tokamax._src.ops.attention.pallas_triton import PallasTritonFlashAttention
from tokamax._src.pallas import block

from calibadv_jax.policy.kernels.tokamax_kernels import segment_starts, tokamax_attention

pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """tokamax's Triton kernels are run operation by operation on the CPU."""
    pallas_call, program_id = pl.pallas_call, pl.program_id

    def interpreted_call(kernel, *arguments, grid_spec, **options):
        def with_ids_outside_of_loops(*refs):
            # The interpreter does not know the number of a program inside of a loop.
            ids = [program_id(axis) for axis in range(len(grid_spec.grid))]

            def number(axis):
                return ids[axis] if axis < len(ids) else program_id(axis)

            with mock.patch.object(pl, "program_id", number):
                kernel(*refs)

        del options["compiler_params"]  # Triton's
        call = with_ids_outside_of_loops
        return pallas_call(call, *arguments, grid_spec=grid_spec, interpret=True, **options)

    monkeypatch.setattr(block.pl, "pallas_call", interpreted_call)
    with tokamax_config.cross_compile(True):  # no GPU is asked for
        yield


def segments_of(name, length):
    """Segment ids int32 [1, length], each a run of one number."""
    columns = np.arange(length)
    if name == "one":
        return np.ones((1, length), np.int32)
    if name == "many short":
        return (columns // 3 + 1)[None].astype(np.int32)
    ids = np.minimum(columns // (length // 3 + 1) + 1, 3)
    return np.where(columns < length - 5, ids, 0)[None].astype(np.int32)  # three, and padding


@pytest.mark.parametrize(
    ("length", "segments", "head_dim"),
    [(131, "one", 64), (131, "many short", 64), (200, "three", 128), (7, "three", 64), (256, "one", 128)],
)
def test_values_and_gradients_are_those_of_the_xla_kernel(length, segments, head_dim):
    q, k, v, _ = rows(length, length, num_heads=4, num_kv=2, head_dim=head_dim, batch=1)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    segment_ids = segments_of(segments, length)

    def compute(attend, arrays):
        def objective(q, k, v):
            out = attend(q, k, v).astype(jnp.float32)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(*arrays)

    kernel = PallasTritonFlashAttention()
    gradients, out = compute(lambda *qkv: tokamax_attention(*qkv, segment_ids, kernel), halves)
    exact = [x.astype(jnp.float32) for x in halves]
    expected_gradients, expected = compute(
        lambda *qkv: packed_attention(*qkv, segment_ids, "xla", 1024), exact
    )
    assert out.shape == q.shape
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3
    close_in_norm(out, expected, 5e-3)
    close_in_norm(tuple(x.astype(jnp.float32) for x in gradients), expected_gradients, 1e-2)


def test_kernel_that_was_not_tuned_is_not_announced(caplog):
    logging.getLogger("absl").warning("Autotuning cache miss for %s", "Kernel")
    logging.getLogger("absl").warning("another warning")
    assert caplog.messages == ["another warning"]


def test_first_column_of_each_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [4, 4, 4, 4, 4, 4], [1, 2, 3, 3, 0, 0]])
    expected = [[0, 0, 2, 2, 2, 5], [0] * 6, [0, 1, 2, 2, 4, 4]]
    np.testing.assert_array_equal(segment_starts(segments), expected)


IMPORTS = """
import sys
import calibadv_jax.policy.kernels.tokamax_kernels
import tokamax._src.ops.attention.pallas_mosaic_gpu, tokamax._src.ops.attention.pallas_triton
print([name for name in sys.modules if name.startswith("jax.experimental.pallas.ops.gpu")])
"""


def test_kernels_of_auto_do_not_import_the_deprecated_ones():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
