"""Chunked log-probabilities against the textbook formula, and what they keep in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import close_in_norm
from tiny_policy import NARROW, SHAPE, tiny

from calibadv_jax.policy.logprobs import token_logprobs

BATCH, LENGTH, VOCAB, TEMPERATURE = 2, 21, 53, 0.7


@pytest.fixture(scope="module")
def policy():
    config = NARROW | {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16}
    return tiny(config)


@pytest.fixture(scope="module")
def inputs(policy):
    params = jax.jit(policy.init)(jax.random.key(0))
    hidden = 5.0 * jax.random.normal(jax.random.key(1), (BATCH, LENGTH, 16))
    targets = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, VOCAB)
    return params, hidden, targets


def objective(policy, chunk):
    """(params, hidden, targets) -> a scalar that depends on every output, and the outputs."""

    def run(params, hidden, targets):
        decoder = policy.merge(params)
        if chunk:
            logprobs, entropies = token_logprobs(decoder, hidden, targets, TEMPERATURE, chunk)
        else:
            every = jax.nn.log_softmax(decoder.logits(hidden) / TEMPERATURE, axis=-1)
            logprobs = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
            entropies = -jnp.sum(jnp.exp(every) * every, axis=-1)
        weight = jnp.cos(jnp.arange(LENGTH))
        return jnp.sum(weight * logprobs) + jnp.sum(weight**2 * entropies), (logprobs, entropies)

    return run


def gradients(policy, chunk):
    return jax.value_and_grad(objective(policy, chunk), argnums=(0, 1), has_aux=True)


def test_chunks_equal_the_direct_formula_with_gradients(policy, inputs):
    """A chunk of all rows does not divide the tokens, so that its padding is exercised too."""
    (_, direct), expected = jax.jit(gradients(policy, 0))(*inputs)
    (_, chunked), actual = jax.jit(gradients(policy, 2))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), chunked, direct)
    close_in_norm(actual, expected)
    assert chunked[0].dtype == chunked[1].dtype == jnp.float32
    assert float(direct[0].max()) < 0 < float(direct[1].min())


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_only_used_tokens_are_computed(policy, inputs, share):
    """States without a number stand where nothing is wanted: they reach no value and no gradient."""
    params, hidden, targets = inputs
    used = jax.random.uniform(jax.random.key(3), (BATCH, LENGTH)) < share

    def run(params, hidden, chunk):
        decoder = policy.merge(params)
        if chunk:
            holes = jnp.where(used[..., None], hidden, jnp.nan)
            outputs = token_logprobs(decoder, holes, targets, TEMPERATURE, chunk, used=used)
        else:
            outputs = token_logprobs(decoder, hidden, targets, TEMPERATURE, LENGTH)
        logprobs, entropies = (jnp.where(used, values, 0.0) for values in outputs)
        return jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropies**2), (logprobs, entropies)

    compute = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), static_argnums=2)
    (_, expected), expected_gradients = compute(params, hidden, 0)
    (_, actual), gradients = compute(params, hidden, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)
    if share:
        close_in_norm(gradients, expected_gradients)
    else:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def largest_with_vocabulary(jaxpr):
    """Elements of the largest intermediate that has an axis of VOCAB, all nested programs included."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = getattr(variable.aval, "shape", ())
            if VOCAB in shape:
                largest = max(largest, int(np.prod(shape)))
        for value in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(value):
                largest = max(largest, largest_with_vocabulary(getattr(value, "jaxpr", value)))
    return largest


@pytest.mark.parametrize(("chunk", "whole"), [(4, False), (0, True)])
def test_logits_of_all_tokens_never_exist_at_once(policy, inputs, chunk, whole):
    """The direct formula shows that the search would find them."""
    program = jax.make_jaxpr(gradients(policy, chunk))(*inputs)
    largest = largest_with_vocabulary(program.jaxpr)
    assert largest >= BATCH * 4 * VOCAB
    assert (largest >= BATCH * LENGTH * VOCAB) is whole


@pytest.mark.medium
@pytest.mark.parametrize("chunk", [8, pytest.param(LENGTH, marks=pytest.mark.medium)])
def test_reported_entropies_have_no_gradient(policy, inputs, chunk):
    params, hidden, targets = inputs

    def run(hidden, entropy_gradient):
        out = token_logprobs(policy.merge(params), hidden, targets, TEMPERATURE, chunk, entropy_gradient)
        return jnp.sum(jnp.sin(out[0])) + jnp.sum(out[1] ** 2), out

    compute = jax.jit(jax.grad(run, has_aux=True), static_argnums=1)
    (kept, all_values), (dropped, values) = compute(hidden, True), compute(hidden, False)
    np.testing.assert_allclose(all_values[1], values[1], atol=1e-4)
    alone = jax.grad(lambda hidden: jnp.sum(jnp.sin(run(hidden, True)[1][0])))(hidden)
    close_in_norm(dropped, alone)
    assert np.abs(np.asarray(kept) - np.asarray(dropped)).max() > 1e-3


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def half_decoder(request):
    config = SHAPE | {"vocab_size": 300, "tie_word_embeddings": request.param}
    policy = tiny(config, compute_dtype=jnp.bfloat16)
    return policy.merge(jax.jit(policy.init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def half_hidden():
    return (2 * jax.random.normal(jax.random.key(1), (1, 6, 32))).astype(jnp.bfloat16)


@pytest.mark.medium
def test_logits_are_float32(half_decoder, half_hidden):
    assert half_decoder.logits(half_hidden).dtype == jnp.float32


@pytest.mark.medium
@pytest.mark.parametrize("chunk", [4, 64])
def test_log_probabilities_are_those_of_float32(half_decoder, half_hidden, chunk):
    """Summed in bfloat16 the probabilities of 300 tokens would be off by a percent."""
    logits = np.asarray(half_decoder.logits(half_hidden), np.float64) / 0.7
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = jnp.asarray([[0, 7, 299, 12, 150, 3]])
    logprobs, entropies = token_logprobs(half_decoder, half_hidden, targets, 0.7, chunk)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    chosen = np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, chosen, atol=2e-5)
    np.testing.assert_allclose(entropies, -(np.exp(expected) * expected).sum(-1), atol=2e-5)


def test_parameters_stay_as_they_are_stored(half_decoder):
    assert half_decoder.embed.embedding[...].dtype == jnp.float32
