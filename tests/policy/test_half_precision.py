"""In bfloat16 the matrix products are rounded, and nothing after them: logits and their sums are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.transformer import Numerics, Policy

VOCAB = 300


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def decoder(request):
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": request.param,
    }
    policy = Policy(architecture_from_hf(config), Numerics(compute_dtype=jnp.bfloat16))
    return policy.merge(jax.jit(policy.init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def hidden():
    return (2 * jax.random.normal(jax.random.key(1), (1, 6, 32))).astype(jnp.bfloat16)


@pytest.mark.medium
def test_logits_are_float32(decoder, hidden):
    assert decoder.logits(hidden).dtype == jnp.float32


@pytest.mark.medium
@pytest.mark.parametrize("chunk", [4, 64])
def test_log_probabilities_are_those_of_float32(decoder, hidden, chunk):
    """Summed in bfloat16 the probabilities of 300 tokens would be off by a percent."""
    logits = np.asarray(decoder.logits(hidden), np.float64) / 0.7
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = jnp.asarray([[0, 7, 299, 12, 150, 3]])
    logprobs, entropies = token_logprobs(decoder, hidden, targets, 0.7, chunk)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    chosen = np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, chosen, atol=2e-5)
    np.testing.assert_allclose(entropies, -(np.exp(expected) * expected).sum(-1), atol=2e-5)


def test_parameters_stay_as_they_are_stored(decoder):
    assert decoder.embed.embedding[...].dtype == jnp.float32
