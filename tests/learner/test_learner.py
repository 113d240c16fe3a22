"""Identities of the update: packing, microbatches, meshes, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rounding import close_in_norm
from tiny_policy import GROUPED, NARROW, mesh_of, single_device, tiny

from calibadv_jax.config import LossConfig, OptimizerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Sample, pack, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.losses import negative_log_likelihood, policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule

VOCAB = 40


@pytest.fixture(scope="module")
def policy():
    config = GROUPED | {"vocab_size": VOCAB, "tie_word_embeddings": False}
    return tiny(config, remat="full")


@pytest.fixture(scope="module")
def one_device():
    return single_device()


def sample(rng, length, prompt=3):
    mask = rng.random(length) < 0.6
    mask[:prompt] = False
    mask[-1] = True
    return Sample(
        rng.integers(0, VOCAB, length).astype(np.int32),
        mask,
        rng.normal(size=length).astype(np.float32) * mask,
        (-rng.random(length).astype(np.float32)) * mask,
    )


def samples(count=9, seed=0):
    rng = np.random.default_rng(seed)
    return [sample(rng, int(rng.integers(6, 20))) for _ in range(count)]


def sgd_step(policy, mesh, batch, rows, loss, seed=0):
    """One plain gradient step, so that parameters differ by exactly -gradient."""
    learner = Learner(policy, optax.sgd(1.0), mesh, LearnerOptions(rows))
    state = learner.init(init_params(policy, mesh, seed))
    before = jax.device_get(state["params"])
    state, metrics = learner.update(state, [batch], loss)
    after = jax.device_get(state["params"])
    return jax.tree.map(lambda a, b: b - a, after, before), metrics


LOSS = policy_gradient(LossConfig(entropy_coef=0.01, importance_cap=2.0), on_policy=False)


def test_packed_rows_equal_one_sample_a_row(policy, one_device):
    chosen = samples()
    packed, metrics = sgd_step(policy, one_device, pack(chosen, 32), 4, LOSS)
    long_rows = pack(chosen, 32)
    single = pack(chosen, 19)
    assert long_rows.tokens.shape[0] < single.tokens.shape[0]
    apart, metrics_apart = sgd_step(policy, one_device, single, single.tokens.shape[0], LOSS)
    close_in_norm(packed, apart)
    assert metrics["actor/loss"] == pytest.approx(metrics_apart["actor/loss"], abs=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_microbatches_equal_the_batch(policy, one_device, aggregation):
    batch = pack(samples(), 24, aggregation)
    whole, metrics = sgd_step(policy, one_device, batch, batch.tokens.shape[0], LOSS)
    split, metrics_split = sgd_step(policy, one_device, batch, 2, LOSS)
    close_in_norm(whole, split)
    for name in metrics:
        assert metrics[name] == pytest.approx(metrics_split[name], rel=1e-5, abs=1e-5), name


@pytest.mark.medium
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_eight_devices_equal_one(policy, one_device, sizes):
    batch = pack(samples(), 24)
    alone, metrics = sgd_step(policy, one_device, batch, 4, LOSS)
    sharded, sharded_metrics = sgd_step(policy, mesh_of(**sizes), batch, 4, LOSS)
    close_in_norm(alone, sharded)
    assert metrics.keys() == sharded_metrics.keys()
    for name, value in metrics.items():
        assert sharded_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.medium
def test_untrained_tokens_have_no_influence(policy, one_device):
    """Advantages, log-probabilities and targets under a False mask change nothing at all.

    Not a bit: one program, whose inputs differ only where they are multiplied by 0.
    """
    chosen = samples()
    rng = np.random.default_rng(1)
    noisy = [
        Sample(
            s.tokens,
            s.mask,
            np.where(s.mask, s.advantages, rng.normal(size=len(s.mask))).astype(np.float32),
            np.where(s.mask, s.logprobs, rng.normal(size=len(s.mask))).astype(np.float32),
        )
        for s in chosen
    ]
    clean, _ = sgd_step(policy, one_device, pack(chosen, 32), 4, LOSS)
    same, _ = sgd_step(policy, one_device, pack(noisy, 32), 4, LOSS)
    jax.tree.map(np.testing.assert_array_equal, clean, same)


def test_recomputed_logprobs_match_the_loss(policy, one_device):
    chosen = samples()
    batch = pack(chosen, 32)
    learner = Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(4))
    params = init_params(policy, one_device, 0)
    logprobs = learner.logprobs(params, batch)
    assert logprobs.shape == batch.tokens.shape
    expected = -float(np.sum(batch.weights * logprobs))
    _, metrics = learner.update(learner.init(params), [batch], negative_log_likelihood)
    assert metrics["actor/loss"] == pytest.approx(expected, abs=1e-5)


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
    assert learner.microbatches() == (0, 0) and learner.updates == 1


def test_non_finite_gradient_is_skipped(policy, one_device):
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
def test_unused_entropy_gradient_is_not_computed(policy, one_device):
    plain = policy_gradient(LossConfig(), on_policy=True)

    def without_metrics(*arguments):
        return plain(*arguments)[0], {}

    def with_bonus_of_nothing(logprobs, entropies, batch, reference):
        total, metrics = plain(logprobs, entropies, batch, reference)
        return total + 0.0 * jnp.sum(entropies), metrics

    def flops(loss, chunk, entropy_gradient=False):
        learner = Learner(
            policy,
            optax.sgd(1.0),
            one_device,
            LearnerOptions(4, logprob_chunk=chunk, entropy_gradient=entropy_gradient),
        )
        return learner.lower_update(32, loss).cost_analysis()["flops"]

    for chunk in (8, 32):
        metrics = flops(plain, chunk) - flops(without_metrics, chunk)
        gradient = flops(with_bonus_of_nothing, chunk, True) - flops(plain, chunk)
        assert gradient > metrics / 2 > 0, (chunk, gradient, metrics)


@pytest.mark.medium
def test_entropy_bonus_has_its_gradient(policy, one_device):
    """The step with the bonus, less the step without it, is the step that raises the mean entropy."""
    batch = pack(samples(), 32)
    bonus, _ = sgd_step(policy, one_device, batch, 4, policy_gradient(LossConfig(entropy_coef=0.5), True))
    plain, _ = sgd_step(policy, one_device, batch, 4, policy_gradient(LossConfig(), True))
    params = jax.device_get(init_params(policy, one_device, 0))

    def mean_entropy(params):
        decoder = policy.merge(params)
        hidden = decoder(batch.tokens, batch.positions, batch.segment_ids)
        every = jax.nn.log_softmax(decoder.logits(hidden))
        return -jnp.sum(batch.weights[..., None] * jnp.exp(every) * every)

    expected = jax.tree.map(lambda g: -0.5 * g, jax.jit(jax.grad(mean_entropy))(params))
    close_in_norm(jax.tree.map(np.subtract, bonus, plain), expected)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-3


@pytest.mark.parametrize(
    ("sizes", "rows", "key", "message"),
    [
        ({"fsdp": 8}, 4, "learner.microbatch_rows", "= 8 devices: set it to 8"),
        ({"fsdp": 8}, 12, "sft.rows", "= 8 devices: set it to 16"),
        ({"data": 2, "fsdp": 4}, 4, "learner.microbatch_rows", "= 8 devices: set it to 8"),
        ({"data": 8, "fsdp": 1}, 1, "learner.microbatch_rows", "= 8 devices: set it to 8"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, "learner.microbatch_rows", "= 4 devices: set it to 4"),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 1, "learner.microbatch_rows", "= 2 devices: set it to 2"),
    ],
)
def test_rows_must_fill_the_mesh(policy, sizes, rows, key, message):
    mesh = mesh_of(**sizes)
    with pytest.raises(UserError, match=f"{key} is {rows}, but must be a multiple of .* {message}"):
        LearnerOptions(rows, rows_key=key).check(policy, mesh)
    LearnerOptions(int(message.rpartition(" ")[2])).check(policy, mesh)


@pytest.mark.medium
def test_number_of_microbatches_needs_no_compilation(policy, one_device):
    learner = Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(1))
    state = learner.init(init_params(policy, one_device, 0))
    for count in (3, 20, 9):
        state, _ = learner.update(state, [pack(samples(count), 32)], LOSS)
    assert learner._accumulate[LOSS]._cache_size() == learner._apply._cache_size() == 1
    assert int(state["updates"]) == 3


TIED_CONFIG = NARROW | {"num_key_value_heads": 2, "tie_word_embeddings": True}
SPECS = {  # of the leaves that are split, by the end of their path
    "mlp/gate/kernel": P(None, "fsdp", "tensor"),
    "mlp/up/kernel": P(None, "fsdp", "tensor"),
    "mlp/down/kernel": P(None, "tensor", "fsdp"),
    "attn/q/kernel": P(None, "fsdp", "tensor"),
    "attn/o/kernel": P(None, "tensor", "fsdp"),
    "embed/embedding": P("tensor", "fsdp"),
}


@pytest.fixture(scope="module")
def tied_policy():
    return tiny(TIED_CONFIG)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_and_moments_are_split_over_the_mesh(tied_policy, name):
    mesh = mesh_of(fsdp=4, tensor=2)
    config = OptimizerConfig(name=name)
    learner = Learner(tied_policy, make_optimizer(config, make_schedule(config, 10)), mesh, LearnerOptions(4))
    state = learner.init(init_params(tied_policy, mesh, 0))
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(tied_policy.abstract_params)
    }
    counts = dict.fromkeys(SPECS, 0)
    abstract = jax.tree_util.tree_leaves(learner.abstract_state())
    for (path, leaf), planned in zip(jax.tree_util.tree_leaves_with_path(state), abstract, strict=True):
        assert leaf.sharding == planned.sharding  # a checkpoint comes back to the same places
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        for tail, expected in SPECS.items():
            (size,) = (size for parameter, size in sizes.items() if parameter.endswith(tail))
            if where.endswith(tail) and leaf.size == size:
                assert leaf.sharding.spec == expected, where
                assert leaf.addressable_shards[0].data.size * 8 == leaf.size, where
                counts[tail] += 1
    adam = {tail: 3 for tail in SPECS}  # the parameter and two moments
    matrices = {tail: 2 for tail in SPECS if "kernel" in tail}  # Muon keeps one momentum
    assert counts == (adam if name == "adamw" else adam | matrices)


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

    def logits(params):
        decoder = tied_policy.merge(params)
        return decoder.logits(decoder(batch.tokens, batch.positions, batch.segment_ids))[0]

    table = np.asarray(jax.nn.log_softmax(jax.jit(logits)(params) / 0.5))
    assert np.ptp(table) > 1
    expected = table[np.arange(6), tokens[1:]]
    np.testing.assert_allclose(learner.logprobs(params, batch)[0, :6], expected, atol=1e-4)
    entropy = float(-np.mean(np.sum(np.exp(table[2:6]) * table[2:6], axis=-1)))
    before = jax.tree.map(jnp.copy, params)
    state, metrics = learner.update(learner.init(params), [batch], negative_log_likelihood)
    assert metrics["actor/loss"] == pytest.approx(-float(expected[2:].mean()), abs=1e-4)
    assert metrics["sft/entropy"] == pytest.approx(entropy, abs=1e-4)
    moved = jax.tree.map(lambda a, b: a - b, before, state["params"])
    assert float(optax.tree.norm(moved)) == pytest.approx(0.5 * metrics["actor/grad_norm"], rel=1e-3)
    assert int(state["updates"]) == 1
    assert metrics["actor/skipped"] == 0


@pytest.mark.medium
def test_temporary_memory_is_linear_in_the_row_length():
    config = GROUPED | {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    policy = tiny(config, compute_dtype=jnp.bfloat16, remat="full", attention_chunk=256)
    options = LearnerOptions(1, logprob_chunk=256, entropy_gradient=False)
    learner = Learner(policy, optax.adam(1e-3), single_device(), options)
    loss = policy_gradient(LossConfig(), on_policy=True)
    short, middle, long = (
        learner.lower_update(length, loss).compile().memory_analysis().temp_size_in_bytes
        for length in (2048, 8192, 32768)
    )
    assert long - middle == pytest.approx(4 * (middle - short), rel=0.1)
    assert long < 32768 * 32768  # one byte for each pair of tokens would be more


@pytest.mark.medium
def test_rows_of_two_widths_in_one_update(policy, one_device):
    """The microbatch of narrow rows has more of them; the step is that of one batch."""
    chosen = samples(12)
    weights = token_weights(chosen, "token_mean")
    expected, expected_metrics = sgd_step(policy, one_device, pack(chosen, 32), 4, LOSS)
    parts = [pack(chosen[:5], 32, weights=weights[:5]), pack(chosen[5:], 16 + 4, weights=weights[5:])]
    learner = Learner(policy, optax.sgd(1.0), one_device, LearnerOptions(2, row_length=40, logprob_chunk=8))
    shapes = []
    values = learner._values

    def seen(base, params, microbatch, used):
        shapes.append(microbatch.tokens.shape)
        return values(base, params, microbatch, used)

    learner._values = seen
    state = learner.init(init_params(policy, one_device, 0))
    before = jax.device_get(state["params"])
    state, metrics = learner.update(state, parts, LOSS)
    assert shapes == [(2, 32), (4, 20)]
    close_in_norm(jax.tree.map(lambda a, b: b - a, jax.device_get(state["params"]), before), expected)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
