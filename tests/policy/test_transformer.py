"""The decoder: packed rows, cached rows and the mesh all compute the same function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rounding import close_in_norm
from tiny_policy import NARROW, WIDER, mesh_of, tiny

from calibadv_jax.policy.kernels.custom_gradients import RMSNorm, gated, rows_product
from calibadv_jax.policy.sharding import batch_sharding, param_shardings
from calibadv_jax.policy.transformer import Numerics

CONFIG = WIDER | {"vocab_size": 64}
LENGTH = 24


@pytest.fixture(scope="module")
def policy():
    return tiny(CONFIG)


@pytest.fixture(scope="module")
def params(policy):
    """Random parameters; embeddings large enough that attention is far from uniform."""
    params = jax.jit(policy.init)(jax.random.key(1))
    params["embed"]["embedding"] = params["embed"]["embedding"] * 30.0
    return params


@pytest.fixture(scope="module")
def forward(policy):
    """Jitted (params, tokens, positions, segment_ids) -> logits [B, T, V]."""

    @jax.jit
    def logits(params, tokens, positions, segment_ids):
        decoder = policy.merge(params)
        return decoder.logits(decoder(tokens, positions, segment_ids))

    return logits


def rows(batch, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 64, (batch, LENGTH)).astype(np.int32)
    return tokens, np.tile(np.arange(LENGTH, dtype=np.int32), (batch, 1)), np.ones((batch, LENGTH), np.int32)


def test_packed_segments_equal_separate_rows(forward, params):
    tokens, positions, segments = rows(2)
    separate = forward(params, tokens, positions, segments)
    packed, places, owner = np.zeros((3, 2, LENGTH), np.int32)
    for row, (start, end) in enumerate(((0, 9), (9, 20))):  # the rest of the first row is padding
        packed[0, start:end], places[0, start:end] = tokens[row, : end - start], np.arange(end - start)
        owner[0, start:end] = row + 1
    together = forward(params, packed, places, owner)
    np.testing.assert_allclose(together[0, :9], separate[0, :9], atol=1e-4)
    np.testing.assert_allclose(together[0, 9:20], separate[1, :11], atol=1e-4)


def test_token_sees_nothing_of_the_future(forward, params):
    """To the bit: one program, which multiplies what it may not see by 0."""
    tokens, *places = rows(2)
    before = forward(params, tokens, *places)
    after = forward(params, np.where(np.arange(LENGTH) < 10, tokens, (tokens + 1) % 64), *places)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert np.abs(before[:, 10:] - after[:, 10:]).min(axis=-1).max() > 0


@pytest.mark.medium
def test_rematerialised_chunked_attention_equals_plain(params):
    """The chunk does not divide the row, so that its padding is exercised too."""
    tokens, positions, _ = rows(2)
    segments = np.where(np.arange(LENGTH) < 13, 1, 2)[None].repeat(2, 0)
    weight = jax.random.normal(jax.random.key(2), (2, LENGTH, 64))

    def gradients_and_logits(policy):
        def objective(params):
            decoder = policy.merge(params)
            logits = decoder.logits(decoder(tokens, positions, segments))
            return jnp.mean(logits * weight), logits

        return jax.jit(jax.grad(objective, has_aux=True))(params)

    expected, logits = gradients_and_logits(tiny(CONFIG))
    gradients, chunked_logits = gradients_and_logits(tiny(CONFIG, attention_chunk=10, remat="full"))
    np.testing.assert_allclose(chunked_logits, logits, atol=1e-4)
    close_in_norm(gradients, expected)


@pytest.mark.medium
def test_eight_devices_equal_one(policy, forward, params):
    arrays = rows(8)
    expected = forward(params, *arrays)
    mesh = mesh_of(data=1, fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(policy.abstract_params, mesh))
        logits = forward(placed, *jax.device_put(arrays, batch_sharding(mesh)))
    kernel = placed["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert len(logits.sharding.device_set) == 8
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4)


def test_decoding_with_a_cache_equals_packed_rows(policy, forward, params):
    """Prefill of unequal lengths into chosen slots, then single tokens; a third slot stays untouched."""
    tokens, positions, segments = rows(2)
    expected = forward(params, tokens, positions, segments)
    prefilled, slots = np.array([7, 12]), np.array([2, 0])
    decode = jax.jit(lambda params, *args: policy.merge(params).decode(*args))
    logits = jax.jit(lambda params, hidden: policy.merge(params).logits(hidden))

    cache = policy.empty_cache(3, LENGTH + 4)
    block = int(prefilled.max())
    valid = np.arange(block) < prefilled[:, None]
    hidden, cache = decode(params, tokens[:, :block], positions[:, :block], valid, cache, slots)
    np.testing.assert_allclose(logits(params, hidden)[valid], expected[:, :block][valid], atol=1e-4)
    for offset in range(LENGTH - block):
        places = (prefilled + offset)[:, None]
        token = np.take_along_axis(tokens, places, 1)
        hidden, cache = decode(params, token, places, np.ones((2, 1), bool), cache, slots)
        target = np.take_along_axis(np.asarray(expected), places[..., None], 1)
        np.testing.assert_allclose(logits(params, hidden), target, atol=1e-4)
    assert all(not np.asarray(part)[:, 1].any() for stack in cache for part in stack)


def test_invalid_token_is_not_written():
    """Three tokens of which the last is padding, into row 2 of three; the row is written at 4 and 5."""
    policy = tiny(NARROW)
    params, cache = jax.jit(policy.init)(jax.random.key(0)), policy.empty_cache(3, 9)
    decode = jax.jit(lambda params, *args: policy.merge(params).decode(*args))
    valid, slots = np.array([[True, True, False]]), np.array([2])
    _, (stack,) = decode(params, np.array([[1, 2, 3]]), np.array([[4, 5, 6]]), valid, cache, slots)
    for array in stack:  # [L, S, K, T, H]
        assert np.argwhere(np.asarray(array)[0].any(axis=(1, 3))).tolist() == [[2, 4], [2, 5]]


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


def test_product_gate_and_norm_equal_their_formulas():
    assert_same(rows_product, lambda x, w: jnp.einsum("btd,df->btf", x, w), draw(0, 2, 5, 7), draw(1, 7, 3))
    assert_same(gated, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, draw(0, 2, 5, 7), draw(1, 2, 5, 7))

    def apply(kind):
        graph, _ = nnx.split(kind(8, epsilon=0.1, rngs=nnx.Rngs(0)))
        return lambda x, scale: nnx.merge(graph, {"scale": scale})(x)

    for shape in ((2, 5, 8), (2, 5, 3, 8)):
        assert_same(apply(RMSNorm), apply(nnx.RMSNorm), draw(0, *shape), draw(1, 8))


def test_half_precision_stays_half_precision():
    x, weights = draw(0, 2, 5, 8).astype(jnp.bfloat16), draw(1, 8, 3).astype(jnp.bfloat16)
    norm = RMSNorm(8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for function in (lambda x: rows_product(x, weights), lambda x: gated(x, x), norm):
        out, pull = jax.vjp(function, x)
        assert out.dtype == pull(out)[0].dtype == jnp.bfloat16


def test_half_precision_products_are_summed_in_float32_and_rounded_once():
    """Asked for it in this way, XLA's CPU compiler uses the bfloat16 instructions of the CPU."""
    x, weights = draw(0, 2, 5, 8).astype(jnp.bfloat16), draw(1, 8, 3).astype(jnp.bfloat16)
    out, pull = jax.vjp(rows_product, x, weights)
    exact, exact_pull = jax.vjp(rows_product, x.astype(jnp.float32), weights.astype(jnp.float32))
    gradients = (out, *pull(out))
    expected = (exact, *exact_pull(out.astype(jnp.float32)))
    for gradient, wide in zip(gradients, expected, strict=True):
        assert np.array_equal(gradient, wide.astype(jnp.bfloat16))

    def objective(x, weights):
        return jnp.sum(rows_product(x, weights).astype(jnp.float32))

    program = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(x, weights).as_text()
    products = re.findall(r"dot_general.*: \((.*)\) -> (.*)", program)
    assert len(products) == 3
    for operands, result in products:
        assert operands.count("bf16") == 2 and result.endswith("xf32>")


def test_weight_gradients_contract_one_axis():
    """Of both operands the first: neither is transposed. What JAX derives by itself sums over two axes."""
    gradient = jax.grad(lambda x, weights: jnp.sum(rows_product(x, weights) ** 2), argnums=1)
    program = str(jax.make_jaxpr(gradient)(draw(0, 2, 5, 7), draw(1, 7, 3)))
    assert "dimension_numbers=(([0], [0]), ([], []))" in program
    derived = jax.grad(lambda x, w: jnp.sum(jnp.einsum("btd,df->btf", x, w) ** 2), argnums=1)
    assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" in str(
        jax.make_jaxpr(derived)(draw(0, 2, 5, 7), draw(1, 7, 3))
    )
    kinds = {kernel: Numerics(kernel=kernel).product for kernel in ("splash", "triton", "cudnn", "xla")}
    assert kinds.pop("xla") is rows_product and set(kinds.values()) == {jax.lax.dot_general}
