"""Log-probabilities and look-up, the two users of weights as large as the vocabulary.

Against the textbook formulas, on one device and on a mesh: values, memory, and what the devices send.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_rig import collectives
from rounding import close_in_norm
from tiny_policy import NARROW, SHAPE, mesh_of, tiny

from calibadv_jax.policy.embedding import look_up
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import batch_sharding, param_shardings

ROWS, LENGTH, WIDTH, VOCAB, TEMPERATURE = 8, 21, 16, 53, 0.7


def make_policy(tied=False, vocab=VOCAB, dtype=jnp.float32):
    shape = {"vocab_size": vocab, "hidden_size": WIDTH, "tie_word_embeddings": tied}
    return tiny(NARROW | shape, compute_dtype=dtype)


def make_inputs(policy, rows=ROWS):
    params = jax.device_get(jax.jit(policy.init)(jax.random.key(0)))
    params["embed"]["embedding"] = params["embed"]["embedding"] * np.float32(30)  # far from uniform
    rng = np.random.default_rng(1)
    hidden = 5 * rng.normal(size=(rows, LENGTH, WIDTH)).astype(np.float32)
    vocab = policy.architecture.vocab_size
    tokens, targets = rng.integers(0, vocab, (2, rows, LENGTH), np.int32)
    return params, *map(jnp.asarray, (hidden, tokens, targets))


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def inputs(policy):
    return make_inputs(policy, rows=2)


def plain(decoder, hidden, targets):
    every = jax.nn.log_softmax(decoder.logits(hidden) / TEMPERATURE, axis=-1)
    logprobs = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
    return logprobs, -jnp.sum(jnp.exp(every) * every, axis=-1)


def objective(policy, chunk, used=None):
    """(params, hidden, tokens, targets) -> a scalar of the three outputs, the outputs; and gradients.

    A chunk of 0 takes the plain formulas.
    """

    def run(params, hidden, tokens, targets):
        decoder, table = policy.merge(params), params["embed"]["embedding"]
        if chunk:
            embedded = look_up(table, tokens, jnp.float32)
            # States without a number, where nothing is used, reach no value and no gradient.
            hidden = hidden if used is None else jnp.where(used[..., None], hidden, jnp.nan)
            outputs = token_logprobs(decoder, hidden, targets, TEMPERATURE, chunk, used=used)
        else:
            embedded, outputs = table[tokens], plain(decoder, hidden, targets)
        if used is not None:
            outputs = tuple(jnp.where(used, values, 0.0) for values in outputs)
        weight = jnp.cos(jnp.arange(LENGTH))
        total = jnp.sum(weight * outputs[0]) + jnp.sum(weight**2 * outputs[1]) + jnp.sum(jnp.sin(embedded))
        return total, (*outputs, embedded)

    return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual[0][1], expected[0][1])
    close_in_norm(actual[1], expected[1])


@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.0])
def test_chunks_equal_the_plain_formula(policy, inputs, share):
    """With gradients. The chunk does not divide the tokens, so that its padding is exercised too."""
    used = None if share is None else np.random.default_rng(3).random((2, LENGTH)) < share
    actual, expected = (jax.jit(objective(policy, chunk, used))(*inputs) for chunk in (2, 0))
    assert_same(actual, expected)
    logprobs, entropies, _ = actual[0][1]
    assert logprobs.dtype == entropies.dtype == jnp.float32
    if share == 0:
        assert not np.any(actual[1][0]["lm_head"]["kernel"]) and not np.any(actual[1][1])
    if share is None:
        assert float(logprobs.max()) < 0 < float(entropies.min())


def test_unused_tokens_give_no_gradient(policy, inputs):
    """States without a number stand there: they reach no parameter."""
    params, hidden, _, targets = inputs
    used = jnp.zeros((2, LENGTH), bool)

    def total(params, hidden):
        states = jnp.full_like(hidden, jnp.nan)
        outputs = token_logprobs(policy.merge(params), states, targets, TEMPERATURE, 4, used=used)
        return sum(jnp.sum(jnp.where(used, values, 0.0)) for values in outputs)

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(params, hidden)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def largest_with_vocabulary(program):
    """Elements of the largest array of a program that has an axis of VOCAB."""
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", str(program))}
    return max(math.prod(shape) for shape in shapes if VOCAB in shape)


@pytest.mark.parametrize(("chunk", "whole"), [(4, False), (0, True)])
def test_logits_of_all_tokens_never_exist_at_once(policy, inputs, chunk, whole):
    """The plain formula shows that the search would find them."""
    largest = largest_with_vocabulary(jax.make_jaxpr(objective(policy, chunk))(*inputs))
    assert largest >= 2 * 4 * VOCAB
    assert (largest >= 2 * LENGTH * VOCAB) is whole


@pytest.mark.medium
@pytest.mark.parametrize("chunk", [8, LENGTH])
def test_reported_entropies_have_no_gradient(policy, inputs, chunk):
    params, hidden, _, targets = inputs

    def gradient(weight, entropy_gradient):
        def run(hidden):
            out = token_logprobs(policy.merge(params), hidden, targets, TEMPERATURE, chunk, entropy_gradient)
            return jnp.sum(jnp.sin(out[0])) + weight * jnp.sum(out[1] ** 2), out

        return jax.jit(jax.grad(run, has_aux=True))(hidden)

    (whole, every), (dropped, values), (alone, _) = gradient(1, True), gradient(1, False), gradient(0, True)
    np.testing.assert_allclose(every[1], values[1], atol=1e-4)
    close_in_norm(dropped, alone)
    assert np.abs(np.asarray(whole) - np.asarray(dropped)).max() > 1e-3


@pytest.mark.medium
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [4, 64])
def test_log_probabilities_of_bfloat16_are_summed_in_float32(tied, chunk):
    """Summed in bfloat16 the probabilities of 300 tokens would be off by a percent."""
    config = SHAPE | {"vocab_size": 300, "tie_word_embeddings": tied}
    policy = tiny(config, compute_dtype=jnp.bfloat16)
    params = jax.jit(policy.init)(jax.random.key(0))
    hidden = (2 * np.random.default_rng(1).normal(size=(1, 6, 32))).astype(jnp.bfloat16)
    targets = np.array([[0, 7, 299, 12, 150, 3]])

    @jax.jit
    def both(params, hidden, targets):
        decoder = policy.merge(params)
        return decoder.logits(hidden), token_logprobs(decoder, hidden, targets, TEMPERATURE, chunk)

    logits, (logprobs, entropies) = both(params, hidden, targets)
    assert logits.dtype == params["embed"]["embedding"].dtype == jnp.float32
    logits = np.asarray(logits, np.float64) / TEMPERATURE
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logprobs.dtype == entropies.dtype == jnp.float32
    chosen = np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, chosen, atol=2e-5)
    np.testing.assert_allclose(entropies, -(np.exp(expected) * expected).sum(-1), atol=2e-5)


# --- On a mesh ---


def on_mesh(policy, mesh):
    """The compiled objective on the mesh, and its inputs there.

    Of the first rows few tokens are used, so that the devices have unequal work.
    """
    used = np.arange(LENGTH) < np.arange(ROWS)[:, None] * LENGTH // (ROWS - 1)
    shardings = param_shardings(policy.abstract_params, mesh), batch_sharding(mesh)
    params, *arrays = make_inputs(policy)
    placed = jax.device_put(params, shardings[0]), *jax.device_put(arrays, shardings[1])
    with jax.set_mesh(mesh):
        run = jax.jit(objective(policy, 4, used), out_shardings=(None, shardings))
        return run.lower(*placed).compile(), placed, used


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mesh", "tied", "vocab"),
    [
        ({"fsdp": 4, "tensor": 2}, True, 40),
        ({"data": 2, "fsdp": 2, "tensor": 2}, False, 40),
        ({"fsdp": 2, "tensor": 4}, False, 37),  # which no axis divides
        ({"data": 8, "fsdp": 1}, True, 37),
    ],
    ids=str,
)
def test_mesh_computes_the_plain_formula(mesh, tied, vocab):
    policy = make_policy(tied, vocab)
    compiled, placed, used = on_mesh(policy, mesh_of(**mesh))
    assert_same(compiled(*placed), jax.jit(objective(policy, 0, used))(*make_inputs(policy)))


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "tied"), [({"fsdp": 8}, True), ({"fsdp": 4, "tensor": 2}, False)], ids=str)
def test_head_is_gathered_once_a_direction(mesh, tied):
    """And no table of the look-up, which moves columns."""
    vocab, mesh = 40, mesh_of(**mesh)
    text = on_mesh(make_policy(tied, vocab), mesh)[0].as_text()
    part, columns = vocab // mesh.shape["tensor"], WIDTH // mesh.shape["fsdp"]
    whole = {f"f32[{part},{WIDTH}]", f"f32[{WIDTH},{part}]"}
    gathers = [inside for inside, shape in collectives(text, "all-gather") if shape in whole]
    assert gathers in ([False], [False, False]), collectives(text, "all-gather")
    scattered = {f"f32[{part},{columns}]", f"f32[{columns},{part}]"}
    assert [inside for inside, shape in collectives(text, "reduce-scatter") if shape in scattered] == [False]
    reduced = [shape for _, shape in collectives(text, "all-reduce")]
    assert not whole & set(reduced) and "all-to-all" in text, reduced


@pytest.mark.medium
def test_look_up_moves_columns_and_not_the_table():
    policy, mesh = make_policy(vocab=40), mesh_of(fsdp=4, tensor=2)
    params, _, tokens, _ = make_inputs(policy)
    table = jax.device_put(params, param_shardings(policy.abstract_params, mesh))["embed"]["embedding"]
    tokens = jax.device_put(tokens, batch_sharding(mesh))

    def total(table, tokens):
        return jnp.sum(jnp.sin(look_up(table, tokens, jnp.float32)))

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(total), out_shardings=table.sharding)
        text = gradient.lower(table, tokens).compile().as_text()
    assert "all-to-all" in text
    moved = [shape for kind in ("all-gather", "all-reduce") for _, shape in collectives(text, kind)]
    assert moved and not any(re.match(r"\w+\[(40|20),", shape) for shape in moved), moved


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [({"devices": 1}, ROWS), ({"fsdp": 4, "tensor": 2}, ROWS), ({"fsdp": 4, "tensor": 2}, 3)],
)
def test_bfloat16_look_up_gradients_sum_in_float32(mesh, rows):
    """Hundreds of additions of 1 to one row: bfloat16 would stop at 256. The devices do not divide 3 rows."""
    table, tokens = jnp.zeros((40, WIDTH)), jnp.full((rows, 128), 7)
    with jax.set_mesh(mesh_of(**mesh)):
        run = jax.grad(lambda table: jnp.sum(look_up(table, tokens, jnp.bfloat16).astype(jnp.float32)))
        gradient = jax.jit(run)(table)
    np.testing.assert_array_equal(gradient[7], rows * 128)  # whole numbers, which float32 holds
    assert float(jnp.abs(gradient).sum()) == rows * 128 * WIDTH


@pytest.mark.medium
def test_bfloat16_head_gradients_sum_in_float32():
    """Over many chunks of equal states; rounded sums would lose the later ones."""
    policy = make_policy(vocab=40, dtype=jnp.bfloat16)
    params = jax.jit(policy.init)(jax.random.key(0))

    def gradient(count):
        def total(kernel):
            decoder = policy.merge(params | {"lm_head": {"kernel": kernel}})
            hidden, targets = jnp.ones((1, count, WIDTH), jnp.bfloat16), jnp.zeros((1, count), jnp.int32)
            return jnp.sum(token_logprobs(decoder, hidden, targets, 1.0, 1)[0])

        return jax.jit(jax.grad(total))(params["lm_head"]["kernel"])

    close_in_norm(gradient(1024), 512 * gradient(2), 1e-4)
