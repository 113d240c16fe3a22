"""How the next tokens are drawn from logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_rig import check_filter

from calibadv_jax.sampler import sampling
from calibadv_jax.sampler.sampling import sample_tokens


def arguments(logits, top_p=1.0, top_k=0, temperature=1.0, position=0):
    """Arguments of `sample_tokens` but the last; the seed of a row is its number."""
    rows = len(logits)
    positions = np.full(rows, position, np.int32)
    temperatures = np.full(rows, temperature, np.float32)
    filters = np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int32)
    seeds = np.arange(rows, dtype=np.uint32)
    return np.asarray(logits, np.float32), seeds, positions, temperatures, *filters


jitted = jax.jit(sample_tokens, static_argnames="filtered")


FOUR = np.array([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(("top_p", "top_k", "allowed"), [(1.0, 2, {0, 1}), (0.55, 0, {0, 1}), (0.01, 0, {0})])
def test_filters_keep_the_best_tokens(top_p, top_k, allowed):
    logits = np.log(FOUR)[None].repeat(400, 0)
    tokens, logprobs = jitted(*arguments(logits, top_p, top_k), filtered=True)
    assert set(np.asarray(tokens).tolist()) == allowed
    np.testing.assert_allclose(logprobs, logits[0, np.asarray(tokens)], atol=1e-6)


@pytest.mark.parametrize("with_other_rows", [False, True])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "allowed"),
    [
        # Probabilities at temperature 2: 0.38, 0.29, 0.21, 0.12; at temperature 0.5: 0.68, 0.25, 0.06, 0.01.
        (1.0, 0.7, 0, {0, 1}),
        (2.0, 0.7, 0, {0, 1, 2}),
        (2.0, 0.6, 0, {0, 1}),
        (0.5, 0.6, 0, {0}),
        (2.0, 1.0, 3, {0, 1, 2}),
        (2.0, 0.7, 2, {0, 1}),
        (2.0, 0.5, 3, {0, 1}),
        (0.0, 0.7, 3, {0}),
    ],
)
def test_nucleus_is_that_of_the_temperature(temperature, top_p, top_k, allowed, with_other_rows):
    """Also where other rows have other settings, and where both filters are on."""
    logits = np.log(FOUR)[None].repeat(400, 0)
    rows = arguments(logits, top_p, top_k, temperature)
    if with_other_rows:
        others = arguments(logits, 0.3, 1, 7.0)
        rows = tuple(
            np.stack(pair, 1).reshape(800, *pair[0].shape[1:]) for pair in zip(rows, others, strict=True)
        )
    tokens, logprobs = jitted(*rows, filtered=True)
    step = 2 if with_other_rows else 1
    tokens, logprobs = np.asarray(tokens)[::step], np.asarray(logprobs)[::step]
    assert set(tokens.tolist()) == allowed
    scaled = FOUR ** (1 / (temperature or 1.0))
    np.testing.assert_allclose(logprobs, np.log(scaled / scaled.sum())[tokens], atol=1e-5)


def test_filter_compares_logits_that_it_sorts():
    check_filter(jax.devices()[0])


def test_best_token_stays_if_logits_are_recomputed():
    """As where a compiler computes the logits once for the sort and once, higher or lower, for the rest."""
    logits = jnp.array([[0.0, 2.0, 1.0, -3.0]])
    best, ones = jnp.array([1]), jnp.ones(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "sort", lambda array, **options: array[:, jnp.array([1, 2, 0, 3])] + 1e-6)
        mask = sampling._filter_mask(logits, best, ones[:, None], ones, ones.astype(jnp.int32))
    assert mask.tolist() == [[False, True, False, False]]


def test_small_vocabulary_is_drawn_with_one_number():
    """The figures of docs/results.md were drawn so."""
    rows, vocab = 200, 4096
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, vocab)), jnp.float32)
    tokens, _ = sample_tokens(*arguments(logits, position=3), filtered=False)
    keys = [jax.random.fold_in(jax.random.key(seed), 3) for seed in range(rows)]
    uniform = np.array([jax.random.uniform(key, ()) for key in keys])
    cumulative = np.asarray(jnp.cumsum(jnp.exp(jax.nn.log_softmax(logits)), axis=-1))
    np.testing.assert_array_equal(tokens, (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1))


@pytest.mark.medium
def test_frequencies_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.2, 0.05, 0.0])
    count = 20_000
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)[None].repeat(count, 0)
    tokens, _ = jitted(*arguments(logits), filtered=False)
    frequencies = np.bincount(np.asarray(tokens), minlength=5) / count
    np.testing.assert_allclose(frequencies, probabilities, atol=0.015)
    assert frequencies[4] == 0


def test_token_without_probability_is_never_drawn():
    """The cumulative sum of a token without weight may be larger than the sum before it, by rounding."""
    rng = np.random.default_rng(0)
    weights = np.where(rng.random(2000) < 0.5, rng.random(2000), 0).astype(np.float32)
    weights[-500:] = 0
    cumulative = np.asarray(jnp.cumsum(weights))
    assert ((weights[1:] == 0) & (np.diff(cumulative) != 0)).any()
    uniform = np.append(cumulative / cumulative[-1], np.float32(1))  # 1 is above all that is drawn
    tokens = sampling._inverse_transform(jnp.tile(weights, (len(uniform), 1)), jnp.asarray(uniform))
    assert (weights[np.asarray(tokens)] > 0).all()


def drawn_shares(weights):
    """The share of all 2**23 numbers of `jax.random.uniform` that draw each index, float64 [N].

    Counted at the ends of the indices' intervals, which are compared with `_inverse_transform` itself.
    """
    row = jnp.asarray(weights)[None]
    cumulative = np.asarray(jnp.cumsum(row, axis=-1))[0]
    reach = np.maximum.accumulate(np.where(weights > 0, cumulative, -np.inf))
    ends = np.searchsorted(UNIFORM * cumulative[-1], reach)
    some = np.linspace(0, len(weights) - 1, 7).astype(int)
    last = np.minimum(ends[some], len(UNIFORM) - 1)
    tokens = jax.vmap(lambda number: sampling._inverse_transform(row, number[None])[0])(UNIFORM[last])
    np.testing.assert_array_equal(tokens, np.searchsorted(ends, last, side="right"))
    return np.diff(ends, prepend=0) / len(UNIFORM)


UNIFORM = np.arange(2**23, dtype=np.float32) * np.float32(2**-23)


@pytest.mark.medium
def test_large_vocabularies_are_drawn_as_reported(monkeypatch):
    """Total variation between the drawn and the reported probabilities, without sampling noise."""
    vocab = 151_936
    logits = 2 * np.random.default_rng(0).normal(size=(1, vocab))
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))
    key = jax.random.key(0)[None]
    parts, numbers, real = [], set(), sampling._inverse_transform

    def recorded(weights, uniform):
        parts.append(np.asarray(weights))
        numbers.add(float(uniform[0]))
        return real(weights, uniform)

    monkeypatch.setattr(sampling, "_inverse_transform", recorded)
    sampling._draw(jnp.exp(logprobs), key)
    monkeypatch.undo()
    blocks = parts[0][0]
    assert len(parts) == len(numbers) == 2 and parts[1].shape == (1, sampling.BLOCK)
    inside = np.pad(np.exp(logprobs[0]), (0, -vocab % sampling.BLOCK)).reshape(len(blocks), -1)
    np.testing.assert_allclose(inside.sum(-1), blocks, rtol=1e-5)
    assert any(np.allclose(parts[1][0], block, rtol=1e-6) for block in inside)
    shares = np.concatenate(
        [p * drawn_shares(block) for p, block in zip(drawn_shares(blocks), inside, strict=True)]
    )
    variation = np.abs(shares[:vocab] - np.exp(logprobs[0].astype(np.float64))).sum() / 2
    assert variation < 3e-5


def test_greedy_takes_the_first_best_token():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0], [-jnp.inf, -jnp.inf, 0.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    tokens, logprobs = jitted(*arguments(logits, temperature=0.0), filtered=False)
    assert tokens.tolist() == [1, 2, 0]
    plain = np.asarray(jax.nn.log_softmax(logits))[np.arange(3), np.asarray(tokens)]  # at temperature 1
    np.testing.assert_allclose(logprobs, plain, atol=1e-6)
