"""Rotary frequencies against transformers, with some in every band of Llama 3's scaling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import inverse_frequencies

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 32,
    "rope_theta": 100.0,
}


def test_llama3_scaling_equals_transformers_in_all_three_bands():
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    upstream = LlamaConfig(
        hidden_size=32, num_attention_heads=1, rope_parameters=SCALING | {"rope_theta": 100.0}
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](upstream, "cpu")
    assert factor == 1.0
    plain = np.asarray(inverse_frequencies(architecture_from_hf(CONFIG)))
    scaled = np.asarray(inverse_frequencies(architecture_from_hf(CONFIG | {"rope_scaling": SCALING})))
    np.testing.assert_allclose(scaled, expected.numpy(), rtol=1e-6)
    wavelengths = 2 * math.pi / plain
    bands = [wavelengths < 16, (wavelengths >= 16) & (wavelengths <= 64), wavelengths > 64]
    assert [int(band.sum()) for band in bands] == [4, 5, 7]
    np.testing.assert_array_equal(scaled[bands[0]], plain[bands[0]])
    assert ((plain / 8 < scaled) & (scaled < plain))[bands[1]].all()
    np.testing.assert_allclose(scaled[bands[2]], plain[bands[2]] / 8)
