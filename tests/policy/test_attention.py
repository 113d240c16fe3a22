"""Every attention kernel against the plain formula: packed rows, grouped heads, lengths that fit no block."""

import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from rounding import close_in_norm
from tiny_policy import mesh_of

from calibadv_jax.config import PolicyConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy import attention
from calibadv_jax.policy.attention import best_kernel, packed_attention
from calibadv_jax.policy.kernels.splash import splash_attention
from calibadv_jax.policy.kernels.triton import triton_attention
from calibadv_jax.policy.sharding import MESH_AXES
from calibadv_jax.policy.transformer import Numerics

KERNELS = {
    "xla": lambda *rows: packed_attention(*rows, "xla", 1024),
    "blockwise 7": lambda *rows: packed_attention(*rows, "xla", 7),
    "blockwise 16": lambda *rows: packed_attention(*rows, "xla", 16),
    "splash": functools.partial(splash_attention, interpret=True),
    "triton": functools.partial(triton_attention, interpret=True),
}


def reference(q, k, v, segments):
    """float64, one query at a time."""
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(q.shape[:3]):
        visible = [t for t in range(query + 1) if segments[row, t] == segments[row, query]]
        keys, values = (np.float64(x[row, visible, head * k.shape[2] // q.shape[2]]) for x in (k, v))
        scores = keys @ np.float64(q[row, query, head]) / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights / weights.sum() @ values
    return out


def rows(seed, length, num_heads=4, num_kv=2, head_dim=16, batch=2):
    """q, k, v, and up to four segments of random lengths, of which the last is padding in some rows."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, heads, head_dim) for heads in (num_heads, num_kv, num_kv)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    starts = rng.integers(1, length + 1, (batch, 3, 1))
    segments = np.sum(np.arange(length) >= starts, axis=1, dtype=np.int32) + 1
    segments[::2][segments[::2] == 4] = 0
    return q, k, v, segments


SHAPES = [(3, (4, 2)), (48, (3, 3)), (101, (4, 1))]  # length, heads
CASES = [(kernel, *shape) for kernel in ("xla", "blockwise 7", "blockwise 16") for shape in SHAPES]
CASES += [
    pytest.param(*case, marks=pytest.mark.medium)  # slow to interpret
    for case in (("splash", 101, (4, 2)), ("triton", 3, (3, 3)), ("triton", 101, (4, 2)))
]


@pytest.mark.parametrize(("kernel", "length", "heads"), CASES)
def test_values_are_those_of_the_formula(kernel, heads, length):
    q, k, v, segments = rows(length, length, *heads)
    out = jax.jit(KERNELS[kernel])(q, k, v, segments)
    np.testing.assert_allclose(out, reference(q, k, v, segments), atol=2e-5)


@pytest.mark.parametrize("kernel", ["xla", "blockwise 7", "blockwise 16"])
def test_short_rows_with_padding_have_the_values_of_the_formula(kernel):
    q, k, v, _ = rows(3, 3)
    segments = np.array([[1, 1, 2], [1, 0, 0]], np.int32)
    out = jax.jit(KERNELS[kernel])(q, k, v, segments)
    np.testing.assert_allclose(out, reference(q, k, v, segments), atol=2e-5)


MEDIUM = [pytest.param(name, marks=pytest.mark.medium) for name in ("blockwise 16", "splash", "triton")]


@pytest.mark.parametrize("kernel", ["blockwise 7", *MEDIUM])
def test_gradients_are_those_of_the_plain_kernel(kernel):
    q, k, v, segments = rows(7, 101)

    def gradients(attend):
        run = jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, segments))), argnums=(0, 1, 2))
        return jax.jit(run)(q, k, v)

    close_in_norm(gradients(KERNELS[kernel]), gradients(KERNELS["xla"]))


def test_half_precision_keeps_its_dtype_and_its_values():
    q, k, v, segments = rows(3, 64)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    exact = reference(*(np.asarray(x, np.float32) for x in halves), segments)
    for name in ("xla", "blockwise 16", "triton"):
        out = jax.jit(KERNELS[name])(*halves, segments)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.03)


@pytest.mark.parametrize(("ends", "first"), [([64] * 16 + [32] * 16 + [64] * 32, 16), ([], 0)])
def test_blocks_of_others_are_not_visited(ends, first):
    """NaN values there would show, however well they are masked: a trunk and two branches, two segments."""
    q, k, v, _ = rows(5, 64)
    segments = np.repeat(np.array([[1] * 32 + [2] * 32], np.int32), 2, 0)
    v[:, first:32] = np.nan
    out = np.isnan(packed_attention(q, k, v, segments, "xla", 16, np.repeat([ends], 2, 0) if ends else None))
    sees_nan = (np.arange(64) >= first) & (np.arange(64) < 32)
    np.testing.assert_array_equal(out, np.broadcast_to(sees_nan[None, :, None, None], out.shape))


@pytest.mark.medium
@pytest.mark.parametrize(("kernel", "tensor"), [("xla", 1), ("xla", 2), ("xla", 4), ("splash", 4)])
def test_mesh_with_few_heads_computes_the_same(kernel, tensor, monkeypatch):
    """Gradients too. Splash is interpreted; the XLA kernel works in blocks."""
    monkeypatch.setattr(
        "calibadv_jax.policy.kernels.splash.splash_attention",
        functools.partial(splash_attention, interpret=True),
    )
    q, k, v, segments = rows(9, 40, batch=8)

    def objective(q, k, v):
        out = packed_attention(q, k, v, segments, kernel, 16)
        return jnp.sum(jnp.sin(out)), out

    compute = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)
    alone = jax.jit(compute)(q, k, v)
    with jax.set_mesh(mesh_of(data=1, fsdp=-1, tensor=tensor)):
        meshed = jax.jit(compute)(q, k, v)
    close_in_norm(meshed, alone)


@pytest.mark.parametrize(
    ("kernel", "platform"), [("xla", "cpu"), ("xla", "cuda"), ("splash", "tpu"), ("triton", "cuda")]
)
def test_no_array_of_length_by_length_exists(kernel, platform):
    """In the lowered program of values and gradients."""
    length = 1536
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def objective(q, k, v, segments):
        return jnp.sum(packed_attention(q, k, v, segments, kernel, 512).astype(jnp.float32))

    # JAX 0.11 and later ask which GPU a Triton kernel is for; of the mesh only its device matters here.
    device = AbstractDevice("NVIDIA H100", 132, "gpu") if platform == "cuda" else None
    mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
    with use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(objective, argnums=(0, 1, 2))).trace(*shapes, segments)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert str(length) in text
    assert not re.search(rf"{length}(x\d+)*x{length}x", text)


@pytest.mark.parametrize(
    ("version", "backend", "dtype", "capability", "kernel"),
    [
        ((0, 10, 2), "cpu", "bfloat16", 0.0, "xla"),
        ((0, 10, 2), "tpu", "bfloat16", 0.0, "splash"),
        ((0, 10, 2), "gpu", "bfloat16", 9.0, "triton"),
        ((0, 10, 2), "gpu", "float32", 8.6, "triton"),
        ((0, 11, 2), "tpu", "float32", 0.0, "splash"),
        ((0, 11, 2), "gpu", "bfloat16", 7.5, "xla"),  # Turing
        ((0, 11, 2), "gpu", "bfloat16", 8.6, "tokamax"),
        ((0, 11, 2), "gpu", "bfloat16", 9.0, "tokamax"),
        ((0, 12, 0), "gpu", "bfloat16", 10.0, "tokamax"),
        ((0, 12, 0), "gpu", "bfloat16", 12.0, "xla"),  # RTX 50xx
        ((0, 12, 0), "gpu", "float32", 9.0, "xla"),
        ((0, 12, 0), "gpu", "bfloat16", 0.0, "xla"),  # AMD, or unknown
    ],
)
def test_auto_takes_the_kernel_that_runs_on_the_device(
    version, backend, dtype, capability, kernel, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert best_kernel(backend, dtype, capability) == kernel


def test_auto_asks_the_default_device(monkeypatch):
    assert Numerics.from_config(PolicyConfig()).kernel == best_kernel(jax.default_backend(), "bfloat16")
    assert Numerics.from_config(PolicyConfig(attention="cudnn")).kernel == "cudnn"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert Numerics.from_config(PolicyConfig()).kernel == "tokamax"
    assert Numerics.from_config(PolicyConfig(compute_dtype="float32")).kernel == "xla"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tokamax on this GPU, which is not installed: pip install"):
        Numerics.from_config(PolicyConfig())


AUTO_PROGRAM = """
import sys
import jax, jax.numpy as jnp
from calibadv_jax.policy.attention import packed_attention
q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
packed_attention(q, q, q, jnp.ones((1, 8), jnp.int32), "xla", 4)
print(sorted(name for name in sys.modules if "pallas.ops.gpu" in name or name == "tokamax"))
"""


@pytest.mark.medium
def test_kernels_that_are_not_chosen_are_not_imported():
    done = subprocess.run([sys.executable, "-c", AUTO_PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mask_of_a_cache_is_as_small_as_its_scores(monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 1)  # one row at a time
    shapes = (6, 5, 4, 8), (6, 2, 70, 8), (6, 2, 70, 8), (6, 5)
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert "[6,1,5,70]" not in str(jax.make_jaxpr(attention.cached_attention)(*abstract))
