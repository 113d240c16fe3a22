"""Identities of the update: packing, microbatches, meshes, masks."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rounding import close_in_norm
from tiny_policy import GROUPED, NARROW, mesh_of, row_logits, single_device, tiny

from calibadv_jax.config import LossConfig, OptimizerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Sample, pack, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import negative_log_likelihood, policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule

VOCAB = 40


@pytest.fixture(scope="module")
def policy():
    config = GROUPED | {"vocab_size": VOCAB, "tie_word_embeddings": False}
    return tiny(config, remat="full")


@pytest.fixture(scope="module")
def one_device():
    return single_device()


def samples(count=9):
    """Random samples, with values of tokens that are not trained, too."""
    rng, made = np.random.default_rng(0), []
    for length in rng.integers(6, 20, count):
        mask = rng.random(length) < 0.6
        mask[:3], mask[-1] = False, True
        advantages, logprobs = rng.normal(size=(2, length)).astype(np.float32)
        made.append(Sample(rng.integers(0, VOCAB, length).astype(np.int32), mask, advantages, -abs(logprobs)))
    return made


def sgd_step(policy, mesh, batches, loss, **options):
    """One plain gradient step: the change of the parameters is the negative gradient."""
    learner = Learner(policy, optax.sgd(1.0), mesh, LearnerOptions(**{"rows": 4} | options))
    state = learner.init(init_params(policy, mesh, 0))
    before = jax.device_get(state["params"])
    state, metrics = learner.update(state, batches, loss)
    return jax.tree.map(np.subtract, before, jax.device_get(state["params"])), metrics


def assert_same(actual, expected):
    close_in_norm(actual[0], expected[0])
    assert actual[1] == {
        name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in expected[1].items()
    }


LOSS = policy_gradient(LossConfig(entropy_coef=0.01, importance_cap=2.0), on_policy=False)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("sizes", "rows", "aggregation"),
    [
        ({"devices": 1}, 4, "token_mean"),
        ({"devices": 1}, 2, "sequence_mean"),
        ({"fsdp": 4, "tensor": 2}, 4, "token_mean"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, "sequence_mean"),
    ],
)
def test_packing_microbatches_and_mesh_change_no_step(policy, one_device, sizes, rows, aggregation):
    single, packed = pack(samples(), 19, aggregation), pack(samples(), 24, aggregation)
    assert rows <= len(packed.tokens) < len(single.tokens)
    expected = sgd_step(policy, one_device, [single], LOSS, rows=len(single.tokens))
    assert_same(sgd_step(policy, mesh_of(**sizes), [packed], LOSS, rows=rows), expected)


@pytest.mark.timeout(300)
def test_computed_microbatches_are_counted(policy, one_device):
    batch = pack(samples(), 24)
    learner, counts = Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(2)), []
    put, number = learner._put, -(-len(batch.tokens) // 2)

    def put_when_computed(microbatch):
        while learner.microbatches()[0] < len(counts) % number:
            pass
        counts.append(learner.microbatches())
        return put(microbatch)

    learner._put = put_when_computed
    params = init_params(policy, one_device, 0)
    learner.logprobs(params, batch)
    learner.update(learner.init(params), [batch], LOSS)
    assert counts == [(done, number) for done in range(number)] * 2
    assert learner.microbatches() == (0, 0)


@pytest.fixture(scope="module")
def learner(policy, one_device):
    return Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(4))


def negative_gradient(learner, batches, loss):
    """The change of the parameters by one step of SGD."""
    state = learner.init(init_params(learner.policy, learner.mesh, 0))
    before = jax.device_get(state["params"])
    state, _ = learner.update(state, batches, loss)
    return jax.tree.map(np.subtract, jax.device_get(state["params"]), before)


@pytest.mark.medium
def test_untrained_tokens_have_no_influence(learner):
    """To the bit: one program, whose inputs differ only where they are multiplied by 0."""
    clean = []
    for sample in samples():
        advantages, logprobs = sample.advantages * sample.mask, sample.logprobs * sample.mask
        clean.append(dataclasses.replace(sample, advantages=advantages, logprobs=logprobs))
    expected = negative_gradient(learner, [pack(clean, 32)], LOSS)
    actual = negative_gradient(learner, [pack(samples(), 32)], LOSS)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_gradient_of_untrained_logprobs_is_exactly_zero():
    batch = pack(samples(), 32)

    def total(logprobs):
        return LOSS(logprobs, np.zeros_like(batch.weights), batch, None)[0]

    gradient = np.asarray(jax.grad(total)(np.full_like(batch.weights, -1.0)))
    assert not gradient[batch.weights == 0].any()
    assert gradient[batch.weights > 0].any()


@pytest.mark.medium
def test_recomputed_logprobs_are_those_of_the_loss(learner):
    batch = pack(samples(), 32)
    params = init_params(learner.policy, learner.mesh, 0)
    logprobs = learner.logprobs(params, batch)
    assert logprobs.shape == batch.tokens.shape
    _, metrics = learner.update(learner.init(params), [batch], negative_log_likelihood)
    assert metrics["actor/loss"] == pytest.approx(-float(np.sum(batch.weights * logprobs)), abs=1e-5)


@pytest.mark.medium
def test_non_finite_advantage_is_skipped(policy, one_device):
    batch = pack(samples(), 32)
    batch.advantages[0, 3] = np.nan
    batch.weights[0, 3] = 0.1
    learner = Learner(policy, optax.adamw(0.1), one_device, LearnerOptions(4))
    state = learner.init(init_params(policy, one_device, 0))
    before = jax.device_get(state)
    state, metrics = learner.update(state, [batch], LOSS)
    assert metrics["actor/skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))


@pytest.mark.medium
def test_on_policy_step_is_that_with_recomputed_logprobs(learner):
    batch = pack(samples(), 32)
    batch.old_logprobs[:] = learner.logprobs(init_params(learner.policy, learner.mesh, 0), batch)
    on_policy, recomputed = (
        negative_gradient(learner, [batch], policy_gradient(LossConfig(), on_policy=on_policy))
        for on_policy in (True, False)
    )
    close_in_norm(on_policy, recomputed)


@pytest.mark.medium
def test_reported_entropy_costs_no_gradient(policy, one_device):
    """By the floating-point operations of the lowered update."""
    plain = policy_gradient(LossConfig(), on_policy=True)

    def without_metrics(*arguments):
        return plain(*arguments)[0], {}

    def with_bonus_of_nothing(logprobs, entropies, batch, reference):
        total, metrics = plain(logprobs, entropies, batch, reference)
        return total + 0.0 * jnp.sum(entropies), metrics

    def flops(loss, chunk, entropy_gradient=False):
        options = LearnerOptions(4, logprob_chunk=chunk, entropy_gradient=entropy_gradient)
        learner = Learner(policy, optax.sgd(1.0), one_device, options)
        return learner.lower_update(32, loss).cost_analysis()["flops"]

    for chunk in (8, 32):
        metrics = flops(plain, chunk) - flops(without_metrics, chunk)
        gradient = flops(with_bonus_of_nothing, chunk, True) - flops(plain, chunk)
        assert gradient > metrics / 2 > 0, (chunk, gradient, metrics)


@pytest.mark.medium
def test_entropy_bonus_has_its_gradient(learner):
    """The step with the bonus, less the step without it, is the step that raises the mean entropy."""
    batch, policy = pack(samples(), 32), learner.policy
    bonus, plain = (
        negative_gradient(learner, [batch], policy_gradient(LossConfig(entropy_coef=coefficient), True))
        for coefficient in (0.5, 0.0)
    )

    def mean_entropy(params):
        decoder = policy.merge(params)
        hidden = decoder(batch.tokens, batch.positions, batch.segment_ids)
        logprobs = jax.nn.log_softmax(decoder.logits(hidden))
        return -jnp.sum(batch.weights[..., None] * jnp.exp(logprobs) * logprobs)

    params = init_params(policy, learner.mesh, 0)
    expected = jax.tree.map(lambda leaf: 0.5 * leaf, jax.jit(jax.grad(mean_entropy))(params))
    close_in_norm(jax.tree.map(np.subtract, bonus, plain), jax.device_get(expected))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-3


@pytest.mark.medium
def test_update_by_rows_of_two_widths(policy, one_device, monkeypatch):
    """The microbatch of narrow rows has more of them; the step is that of one batch."""
    made = samples(12)
    weights = token_weights(made, "token_mean")
    expected = sgd_step(policy, one_device, [pack(made, 32)], LOSS)
    parts = [pack(made[:5], 32, weights=weights[:5]), pack(made[5:], 20, weights=weights[5:])]
    shapes, values = [], Learner._values

    def noting(learner, base, params, microbatch, used=None):
        shapes.append(microbatch.tokens.shape)
        return values(learner, base, params, microbatch, used)

    monkeypatch.setattr(Learner, "_values", noting)
    actual = sgd_step(policy, one_device, parts, LOSS, rows=2, pack_length=40, logprob_chunk=8)
    assert shapes == [(2, 32), (4, 20)]
    assert_same(actual, expected)


@pytest.mark.medium
def test_entropy_bonus_moves_the_policy(policy, one_device):
    """As the only term of the loss."""
    batch, loss = pack(samples(), 32), policy_gradient(LossConfig(entropy_coef=0.5), True)
    batch.advantages[:] = 0
    change, metrics = sgd_step(policy, one_device, [batch], loss)
    assert float(optax.tree.norm(change)) == pytest.approx(metrics["actor/grad_norm"], rel=1e-3)
    assert metrics["actor/grad_norm"] > 1e-4


@pytest.mark.parametrize(
    ("sizes", "rows", "key", "fitting"),
    [
        ({"fsdp": 8}, 12, "sft.rows", 16),
        ({"fsdp": 8}, 4, "learner.microbatch_rows", 8),
        ({"data": 2, "fsdp": 4}, 4, "learner.microbatch_rows", 8),
        ({"data": 8, "fsdp": 1}, 1, "learner.microbatch_rows", 8),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, "learner.microbatch_rows", 4),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 1, "learner.microbatch_rows", 2),
    ],
)
def test_rows_must_fill_the_mesh(policy, sizes, rows, key, fitting):
    mesh = mesh_of(**sizes)
    with pytest.raises(UserError, match=f"^{key} is {rows}, .* set it to {fitting}$"):
        LearnerOptions(rows, rows_key=key).check(policy, mesh)
    LearnerOptions(fitting).check(policy, mesh)


@pytest.mark.parametrize(
    ("sizes", "rows", "shards"),
    [
        ({"data": 2, "fsdp": 4}, 4, 8),
        ({"data": 8, "fsdp": 1}, 1, 8),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, 4),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 1, 2),
    ],
)
def test_learner_refuses_rows_that_do_not_fill_the_mesh(policy, sizes, rows, shards):
    with pytest.raises(UserError) as caught:
        Learner(policy, optax.sgd(1.0), mesh_of(**sizes), LearnerOptions(rows))
    assert str(caught.value) == (
        f"learner.microbatch_rows is {rows}, but must be a multiple of mesh.data x mesh.fsdp ="
        f" {shards} devices: set it to {shards}"
    )


@pytest.mark.medium
def test_number_of_microbatches_needs_no_compilation(policy, one_device):
    learner = Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(1))
    state = learner.init(init_params(policy, one_device, 0))
    for count in (3, 20, 9):
        state, _ = learner.update(state, [pack(samples(count), 32)], LOSS)
    assert learner._accumulate[LOSS]._cache_size() == learner._apply._cache_size() == 1
    assert int(state["updates"]) == 3


@pytest.fixture(scope="module")
def tied_policy():
    return tiny(NARROW | {"num_key_value_heads": 2, "tie_word_embeddings": True})


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("muon", 1)])
def test_matrices_and_moments_are_split_over_the_mesh(tied_policy, name, moments):
    """Moments of a matrix: two of Adam, one momentum of Muon. The embedding has Adam's two."""
    mesh, config = mesh_of(fsdp=4, tensor=2), OptimizerConfig(name=name)
    learner = Learner(tied_policy, make_optimizer(config, make_schedule(config, 10)), mesh, LearnerOptions(4))
    state, counts = learner.init(init_params(tied_policy, mesh, 0)), Counter()
    planned = dict(jax.tree_util.tree_leaves_with_path(learner.abstract_state))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        assert leaf.sharding == planned[path].sharding  # a checkpoint comes back to the same places
        if leaf.ndim > 1 and "kernel" in str(path) or leaf.shape == (16, 8):
            is_split = leaf.addressable_shards[0].data.size * 8 == leaf.size
            counts[f"{path[-2].key}/{path[-1].key}" if is_split else "whole"] += 1
    kernels = {f"{module}/kernel": moments + 1 for module in ("gate", "up", "down", "q", "k", "v", "o")}
    assert counts == kernels | {"embed/embedding": 3}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_placed_as_their_parameter(tied_policy, name):
    mesh, config = mesh_of(fsdp=4, tensor=2), OptimizerConfig(name=name)
    optimizer = make_optimizer(config, make_schedule(config, 10))
    abstract = Learner(tied_policy, optimizer, mesh, LearnerOptions(4)).abstract_state
    moments = jax.tree_util.tree_leaves_with_path(abstract["opt_state"])
    for path, param in jax.tree_util.tree_leaves_with_path(abstract["params"]):
        own = [leaf for key, leaf in moments if key[-len(path) :] == path and leaf.shape == param.shape]
        assert own and all(leaf.sharding == param.sharding for leaf in own)


SPECS = {
    "mlp/gate/kernel": P(None, "fsdp", "tensor"),
    "mlp/up/kernel": P(None, "fsdp", "tensor"),
    "mlp/down/kernel": P(None, "tensor", "fsdp"),
    "attn/q/kernel": P(None, "fsdp", "tensor"),
    "attn/o/kernel": P(None, "tensor", "fsdp"),
    "embed/embedding": P("tensor", "fsdp"),
}


@pytest.mark.parametrize("tail", SPECS)
def test_matrix_is_split_along_its_axes(tied_policy, tail):
    learner = Learner(tied_policy, optax.sgd(1.0), mesh_of(fsdp=4, tensor=2), LearnerOptions(4))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(learner.abstract_state["params"])
    }
    (leaf,) = [leaf for path, leaf in leaves.items() if path.endswith(tail)]
    assert leaf.sharding.spec == SPECS[tail]


@pytest.mark.medium
def test_logprobs_and_loss_are_those_of_the_temperature(tied_policy):
    """Against the decoder's logits, in a row that the chunk does not divide."""
    mesh = single_device()
    learner = Learner(tied_policy, optax.sgd(0.5), mesh, LearnerOptions(1, temperature=0.5, logprob_chunk=4))
    params = init_params(tied_policy, mesh, 0)
    params["embed"]["embedding"] = params["embed"]["embedding"] * 30  # far from uniform
    tokens = np.random.default_rng(0).integers(0, 16, 7).astype(np.int32)
    nothing = np.zeros(7, np.float32)
    batch = pack([Sample(tokens, np.arange(7) > 2, nothing, nothing)], 7)
    table = np.asarray(jax.nn.log_softmax(row_logits(tied_policy, params, tokens[None])[0] / 0.5))
    assert np.ptp(table) > 1
    expected = table[np.arange(6), tokens[1:]]
    np.testing.assert_allclose(learner.logprobs(params, batch)[0, :6], expected, atol=1e-4)
    entropy = float(-np.mean(np.sum(np.exp(table[2:6]) * table[2:6], axis=-1)))
    before = jax.tree.map(jnp.copy, params)
    state, metrics = learner.update(learner.init(params), [batch], negative_log_likelihood)
    moved = optax.tree.norm(jax.tree.map(lambda a, b: a - b, before, state["params"]))
    assert metrics == {
        "actor/loss": pytest.approx(-float(expected[2:].mean()), abs=1e-4),
        "sft/entropy": pytest.approx(entropy, abs=1e-4),
        "actor/grad_norm": pytest.approx(2 * float(moved), rel=1e-3),
        "actor/skipped": 0,
    }
    assert int(state["updates"]) == 1


def test_update_has_no_array_of_length_by_length(one_device):
    chunked = tiny(GROUPED | {"vocab_size": VOCAB}, attention_chunk=256)
    learner = Learner(chunked, optax.sgd(1.0), one_device, LearnerOptions(1, logprob_chunk=256))
    text = learner.lower_update(1536, LOSS).as_text()
    assert "1536" in text and not re.search(r"1536(x\d+)*x1536x", text)


@pytest.mark.medium
def test_memory_of_an_update_is_linear_in_the_row_length(one_device):
    chunked = tiny(
        GROUPED | {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        compute_dtype=jnp.bfloat16,
        remat="full",
        attention_chunk=256,
    )
    options = LearnerOptions(1, logprob_chunk=256, entropy_gradient=False)
    learner = Learner(chunked, optax.adam(1e-3), one_device, options)
    loss = policy_gradient(LossConfig(), on_policy=True)
    short, middle, long = (
        learner.lower_update(length, loss).compile().memory_analysis().temp_size_in_bytes
        for length in (2048, 8192, 32768)
    )
    assert long - middle == pytest.approx(4 * (middle - short), rel=0.1)
    assert long < 32768 * 32768  # one byte for each pair of tokens would be more
