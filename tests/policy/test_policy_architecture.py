"""Shapes read from config.json, and what is refused."""

import dataclasses

import jax
import pytest
from tiny_policy import LLAMA3

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import RopeScaling, architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy

BASE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen2", "num_key_value_heads": 2},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    ],
)
def test_num_parameters_counts_what_the_decoder_has(fields):
    architecture = architecture_from_hf(BASE | fields)
    leaves = jax.tree.leaves(Policy(architecture, Numerics()).abstract_params)
    assert architecture.num_parameters == sum(leaf.size for leaf in leaves)


def test_flops_per_token_by_hand():
    architecture = architecture_from_hf(BASE | {"model_type": "qwen2"})
    # a layer: four 16x16 attention matrices, three 16x24; then the 16x40 head; 2 operations each
    matrices = 3 * (4 * 16 * 16 + 3 * 16 * 24) + 16 * 40
    assert architecture.flops_per_token(0) == 2 * matrices
    assert architecture.flops_per_token(10) == 2 * matrices + 3 * 2 * (2 * 16 * 10)


def test_both_spellings_of_rope_are_read():
    old = BASE | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = BASE | {"model_type": "llama", "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    first, second = architecture_from_hf(old), architecture_from_hf(new)
    assert first == second
    assert first.rope_theta == 5e5 and first.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert dataclasses.replace(first, rope_scaling=None) != first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported are qwen2, qwen3, llama"),
        ({}, "model_type is None"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "llama", "hidden_size": None}, "field 'hidden_size' is missing"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_what_the_decoder_can_not_do_is_refused_by_name(fields, words):
    with pytest.raises(UserError, match="policy/config.json: .*") as caught:
        architecture_from_hf(BASE | fields, "policy/config.json")
    assert words in str(caught.value)
