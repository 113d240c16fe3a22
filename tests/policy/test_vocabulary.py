"""The two weights as large as the vocabulary on a mesh: what is computed, and what the devices send."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_rig import collectives
from rounding import close_in_norm
from tiny_policy import NARROW, mesh_of, tiny

from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import batch_sharding, param_shardings
from calibadv_jax.policy.transformer import look_up

ROWS, LENGTH, CHUNK, WIDTH = 8, 12, 4, 16


def make_policy(tied, vocab, dtype=jnp.float32):
    shape = {"vocab_size": vocab, "hidden_size": WIDTH, "tie_word_embeddings": tied}
    return tiny(NARROW | shape, compute_dtype=dtype)


def objective(policy, chunk):
    """(params, hidden, tokens, targets) -> a scalar of the three outputs, the outputs; and gradients.

    Of the first rows few tokens are used, so that the devices have unequal work.
    """
    used = jnp.arange(LENGTH) < jnp.arange(ROWS)[:, None] * LENGTH // (ROWS - 1)

    def run(params, hidden, tokens, targets):
        decoder = policy.merge(params)
        if chunk:
            embedded = look_up(params["embed"]["embedding"], tokens, jnp.float32)
            logprobs, entropies = token_logprobs(decoder, hidden, targets, 0.7, chunk, used=used)
        else:
            embedded = params["embed"]["embedding"][tokens]
            every = jax.nn.log_softmax(decoder.logits(hidden) / 0.7, axis=-1)
            logprobs = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
            entropies = -jnp.sum(jnp.exp(every) * every, axis=-1)
        logprobs, entropies = jnp.where(used, logprobs, 0.0), jnp.where(used, entropies, 0.0)
        weight = jnp.cos(jnp.arange(LENGTH))
        total = jnp.sum(weight * logprobs) + jnp.sum(weight**2 * entropies) + jnp.sum(jnp.sin(embedded))
        return total, (logprobs, entropies, embedded)

    return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)


def inputs(policy):
    vocab = policy.architecture.vocab_size
    params = jax.jit(policy.init)(jax.random.key(0))
    params["embed"]["embedding"] *= 30  # far from uniform
    hidden = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
    tokens, targets = jax.random.randint(jax.random.key(2), (2, ROWS, LENGTH), 0, vocab)
    return params, hidden, tokens, targets


def on_mesh(policy, mesh, chunk):
    """The compiled objective on the mesh, and its inputs there."""
    params, *rest = inputs(policy)
    placed = jax.device_put(params, param_shardings(policy.abstract_params, mesh))
    rest = jax.device_put(rest, batch_sharding(mesh))
    shardings = param_shardings(policy.abstract_params, mesh), batch_sharding(mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(objective(policy, chunk), out_shardings=(None, shardings))
        return run.lower(placed, *rest).compile(), (placed, *rest)


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
    (_, expected), expected_gradients = jax.jit(objective(policy, 0))(*inputs(policy))
    compiled, placed = on_mesh(policy, mesh_of(**mesh), CHUNK)
    (_, actual), gradients = compiled(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)
    close_in_norm(gradients, expected_gradients)


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "tied"), [({"fsdp": 8}, True), ({"fsdp": 4, "tensor": 2}, False)], ids=str)
def test_head_is_gathered_once_a_direction(mesh, tied):
    vocab = 40
    policy = make_policy(tied, vocab)
    sizes = mesh_of(**mesh)
    text = on_mesh(policy, sizes, CHUNK)[0].as_text()
    part = vocab // sizes.shape["tensor"]
    whole = {f"f32[{part},{WIDTH}]", f"f32[{WIDTH},{part}]"}
    gathers = [inside for inside, shape in collectives(text, "all-gather") if shape in whole]
    assert gathers in ([False], [False, False]), collectives(text, "all-gather")
    columns = WIDTH // sizes.shape["fsdp"]
    scattered = {f"f32[{part},{columns}]", f"f32[{columns},{part}]"}
    assert [inside for inside, shape in collectives(text, "reduce-scatter") if shape in scattered] == [False]
    reduced = [shape for _, shape in collectives(text, "all-reduce")]
    assert not whole & set(reduced), reduced


@pytest.mark.medium
def test_look_up_moves_columns_instead_of_the_table():
    policy = make_policy(False, 40)
    mesh = mesh_of(fsdp=4, tensor=2)
    params, _, tokens, _ = inputs(policy)
    placed = jax.device_put(params, param_shardings(policy.abstract_params, mesh))["embed"]["embedding"]
    tokens = jax.device_put(tokens, batch_sharding(mesh))
    with jax.set_mesh(mesh):

        def run(table, tokens):
            return jnp.sum(jnp.sin(look_up(table, tokens, jnp.float32)))

        text = jax.jit(jax.grad(run), out_shardings=placed.sharding).lower(placed, tokens).compile().as_text()
    assert "all-to-all" in text
    moved = [shape for kind in ("all-gather", "all-reduce") for _, shape in collectives(text, kind)]
    assert moved and not any(re.match(r"\w+\[(40|20),", shape) for shape in moved), moved


@pytest.mark.parametrize(
    ("mesh", "rows"), [({}, ROWS), ({"fsdp": 4, "tensor": 2}, ROWS), ({"fsdp": 4, "tensor": 2}, 3)]
)
def test_bfloat16_look_up_gradients_sum_in_float32(mesh, rows):
    """Hundreds of additions of 1 to one row: bfloat16 would stop at 256. The devices do not divide 3 rows."""
    table, tokens = jnp.zeros((40, WIDTH)), jnp.full((rows, 128), 7)

    def total(table):
        return jnp.sum(look_up(table, tokens, jnp.bfloat16).astype(jnp.float32))

    if not mesh:
        gradient = jax.jit(jax.grad(total))(table)
    else:
        with jax.set_mesh(mesh_of(**mesh)):
            gradient = jax.jit(jax.grad(total))(table)
    np.testing.assert_array_equal(gradient[7], rows * 128)  # whole numbers, which float32 holds
    assert float(jnp.abs(gradient).sum()) == rows * 128 * WIDTH


@pytest.mark.medium
def test_bfloat16_head_gradients_sum_in_float32():
    """Over many chunks of equal states; rounded sums would lose the later ones."""
    policy = make_policy(False, 40, jnp.bfloat16)
    params = jax.jit(policy.init)(jax.random.key(0))
    hidden = jnp.ones((1, 1024, WIDTH), jnp.bfloat16)
    targets = jnp.zeros((1, 1024), jnp.int32)

    def total(kernel, hidden, targets):
        decoder = policy.merge(params | {"lm_head": {"kernel": kernel}})
        return jnp.sum(token_logprobs(decoder, hidden, targets, 1.0, 1)[0])

    kernel = params["lm_head"]["kernel"]
    many = jax.grad(total)(kernel, hidden, targets)
    pair = jax.grad(total)(kernel, hidden[:, :2], targets[:, :2])
    close_in_norm(many, 512 * pair, 1e-4)
