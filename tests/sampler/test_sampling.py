"""How the next tokens are drawn from logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from calibadv_jax.sampler.sampling import sample_tokens


@pytest.mark.parametrize(("top_p", "top_k", "allowed"), [(1.0, 2, {0, 1}), (0.55, 0, {0, 1}), (0.01, 0, {0})])
def test_filters_keep_the_best_tokens(top_p, top_k, allowed):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]).repeat(400, 0))
    tokens, logprobs = sample_tokens(
        logits,
        jnp.arange(400, dtype=jnp.uint32),
        jnp.zeros(400, jnp.int32),
        jnp.ones(400),
        jnp.full(400, top_p),
        jnp.full(400, top_k, jnp.int32),
        filtered=True,
    )
    assert set(np.asarray(tokens).tolist()) == allowed
    np.testing.assert_allclose(logprobs, np.asarray(logits)[0, np.asarray(tokens)], atol=1e-6)


def test_of_equally_likely_tokens_greedy_takes_the_first():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0], [-jnp.inf, -jnp.inf, 0.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    zeros = jnp.zeros(3)
    tokens, _ = sample_tokens(
        logits, jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32), zeros, zeros, zeros, filtered=False
    )
    assert tokens.tolist() == [1, 2, 0]


@pytest.mark.medium
def test_frequencies_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.2, 0.05, 0.0])
    count = 20_000
    tokens, _ = sample_tokens(
        jnp.log(jnp.asarray(probabilities, jnp.float32))[None].repeat(count, 0),
        jnp.arange(count, dtype=jnp.uint32),
        jnp.zeros(count, jnp.int32),
        jnp.ones(count),
        jnp.ones(count),
        jnp.zeros(count, jnp.int32),
        filtered=False,
    )
    observed = np.bincount(np.asarray(tokens), minlength=5) / count
    np.testing.assert_allclose(observed, probabilities, atol=0.015)
