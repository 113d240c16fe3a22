"""The update's memory grows with the tokens of a row, not with their square."""

import jax
import jax.numpy as jnp
import optax
import pytest

from calibadv_jax.config import LossConfig, MeshConfig
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy


@pytest.mark.medium
def test_temporary_memory_is_linear_in_the_row_length():
    config = {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    numerics = Numerics(compute_dtype=jnp.bfloat16, remat="full", attention_chunk=256)
    policy = Policy(architecture_from_hf(config), numerics)
    mesh = make_mesh(MeshConfig(fsdp=1), devices=jax.devices()[:1])
    learner = Learner(
        policy, optax.adam(1e-3), mesh, LearnerOptions(1, logprob_chunk=256, entropy_gradient=False)
    )
    loss = policy_gradient(LossConfig(), on_policy=True)
    lengths = (2048, 8192, 32768)
    short, middle, long = (
        learner.lower_update(length, loss).compile().memory_analysis().temp_size_in_bytes
        for length in lengths
    )
    assert long - middle == pytest.approx(4 * (middle - short), rel=0.1)
    assert long < 32768 * 32768  # one byte for each pair of tokens would be more
