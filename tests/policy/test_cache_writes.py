"""Which columns of a KV cache a token may touch."""

import jax
import numpy as np

from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def test_invalid_token_is_not_written():
    """Three tokens of which the last is padding, into row 2 of three; the row is written at 4 and 5."""
    policy = Policy(architecture_from_hf(CONFIG), Numerics())
    params = jax.jit(policy.init)(jax.random.key(0))
    tokens, positions = np.array([[1, 2, 3]]), np.array([[4, 5, 6]])
    valid, slots = np.array([[True, True, False]]), np.array([2])
    decode = jax.jit(lambda params, *args: policy.merge(params).decode(*args))
    _, (stack,) = decode(params, tokens, positions, valid, policy.empty_cache(3, 9), slots)
    for array in stack:  # [L, S, K, T, H]
        written = np.argwhere(np.asarray(array)[0].any(axis=(1, 3)))
        assert written.tolist() == [[2, 4], [2, 5]]
