"""Products, norms and gates with gradients of their own against what JAX derives from the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rounding import close_in_norm

from calibadv_jax.policy.kernels.custom_gradients import RMSNorm, gated, rows_product
from calibadv_jax.policy.transformer import Numerics


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_same(custom, plain, *inputs):
    """Values, and gradients by every input of a scalar that depends on every value."""

    def both(function):
        def objective(*inputs):
            out = function(*inputs)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(objective, argnums=tuple(range(len(inputs))), has_aux=True))(*inputs)

    close_in_norm(both(custom), both(plain))


def test_product_equals_plain_product():
    assert_same(rows_product, lambda x, w: jnp.einsum("btd,df->btf", x, w), draw(0, 2, 5, 7), draw(1, 7, 3))


def test_gate_equals_its_formula():
    assert_same(gated, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, draw(0, 2, 5, 7), draw(1, 2, 5, 7))


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 3, 8)])
def test_norm_equals_flaxs(shape):
    def apply(kind):
        graph, _ = nnx.split(kind(8, epsilon=0.1, rngs=nnx.Rngs(0)))
        return lambda x, scale: nnx.merge(graph, {"scale": scale})(x)

    assert_same(apply(RMSNorm), apply(nnx.RMSNorm), draw(0, *shape), draw(1, 8))


def test_half_precision_stays_half_precision():
    x, weights = draw(0, 2, 5, 8).astype(jnp.bfloat16), draw(1, 8, 3).astype(jnp.bfloat16)
    norm = RMSNorm(8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for function in (lambda x: rows_product(x, weights), lambda x: gated(x, x), norm):
        out, pull = jax.vjp(function, x)
        assert out.dtype == pull(out)[0].dtype == jnp.bfloat16


def test_weight_gradients_contract_one_axis():
    """Of both operands the first: neither is transposed. What JAX derives by itself sums over two axes."""

    def contracted(product):
        def objective(x, weights):
            return jnp.sum(product(x, weights, (((2,), (0,)), ((), ()))) ** 2)

        program = jax.make_jaxpr(jax.grad(objective, argnums=1))(draw(0, 2, 5, 7), draw(1, 7, 3))
        return str(program)

    assert "dimension_numbers=(([0], [0]), ([], []))" in contracted(rows_product)
    assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" in contracted(jax.lax.dot_general)


@pytest.mark.parametrize("kernel", ["splash", "triton", "cudnn"])
def test_other_backends_keep_jaxs_own_products(kernel):
    assert Numerics(kernel=kernel).product is jax.lax.dot_general
    assert Numerics(kernel="xla").product is rows_product
