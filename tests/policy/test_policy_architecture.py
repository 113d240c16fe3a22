"""Shapes read from config.json, and what is refused."""

from copy import deepcopy

import jax
import numpy as np
import pytest
from tiny_policy import LLAMA3
from transformers import AutoConfig

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import RopeScaling, architecture_from_hf
from calibadv_jax.policy.rotary import inverse_frequencies, rotary_embeddings
from calibadv_jax.policy.transformer import Numerics, Policy

BASE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
BASE |= {"num_hidden_layers": 3, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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
    """A layer has four 16x16 attention matrices, three 16x24; then the 16x40 head; 2 operations each."""
    flops = architecture_from_hf(BASE | {"model_type": "qwen2"}).flops_per_token
    assert flops(0) == 2 * (3 * (4 * 16 * 16 + 3 * 16 * 24) + 16 * 40)
    assert flops(10) == flops(0) + 3 * 2 * (2 * 16 * 10)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_attention_heads": 64, "hidden_size": 512},
        {"num_key_value_heads": None},
        {"num_key_value_heads": None, "num_attention_heads": 64, "hidden_size": 512},
        {"num_key_value_heads": 8, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 3e4}},
    ],
)
def test_absent_fields_have_defaults_of_transformers(model_type, fields):
    fields = BASE | {"num_attention_heads": 32, "hidden_size": 256} | fields
    config = AutoConfig.for_model(model_type, **deepcopy(fields))
    architecture = architecture_from_hf(fields | {"model_type": model_type})
    rope, scaling = config.rope_parameters, RopeScaling(8.0, 1.0, 4.0, 64)
    assert (
        vars(architecture).items()
        >= {
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "tie_word_embeddings": config.tie_word_embeddings,
            "out_bias": getattr(config, "attention_bias", False),
            "mlp_bias": getattr(config, "mlp_bias", False),
        }.items()
    )


def test_both_spellings_of_rope_are_read():
    llama = BASE | {"model_type": "llama"}
    old = architecture_from_hf(llama | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = architecture_from_hf(llama | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new != architecture_from_hf(llama | {"rope_theta": 5e5})
    assert old.rope_theta == 5e5 and old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_qwen2_never_has_an_output_bias():
    assert not architecture_from_hf(BASE | {"model_type": "qwen2", "attention_bias": True}).out_bias


@pytest.mark.parametrize(("inner", "outer", "length"), [(64, None, 64), (None, None, 512), (64, 128, 128)])
def test_original_length_of_llama3_is_found(inner, outer, length):
    name = "original_max_position_embeddings"
    config = BASE | {"model_type": "llama", "max_position_embeddings": 512, name: outer}
    scaling = architecture_from_hf(config | {"rope_scaling": LLAMA3 | {name: inner}}).rope_scaling
    assert scaling.original_length == length


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported are qwen2, qwen3, llama"),
        ({}, "model_type is None"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "llama", "hidden_size": None}, "field 'hidden_size' is missing"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic"}},
            "'dynamic'; .*Unless the model was .* remove it",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "'linear'; .*native context length"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn' lacks original_max"),
        ({"model_type": "qwen2", "rope_scaling": YARN | {"factor": None}}, "'yarn' lacks factor; add it"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}}, "is 'gptq'; quantised"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, "'llama3' lacks factor, low_freq"),
    ],
)
def test_unsupported_architecture_is_refused(fields, words):
    with pytest.raises(UserError, match=f"policy/config.json: .*{words}"):
        architecture_from_hf(BASE | fields, "policy/config.json")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_position_embeddings": 512, "original_max_position_embeddings": None},
        {"attention_factor": 0.7},
        {"mscale": 0.707, "mscale_all_dim": 0.5},
        {"beta_fast": 16, "beta_slow": 2, "factor": 8.0},
        {"truncate": False},
        {"rope_theta": 1e6, "head_dim": 128},
        {"factor": None, "max_position_embeddings": 256},
        {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
        {"factor": 1.0},
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_yarn_scaling_equals_transformers(field, fields):
    pytest.importorskip("torch")
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    outer = {"max_position_embeddings": 64, "head_dim": 32, "rope_theta": 100.0}
    outer |= {name: value for name, value in fields.items() if name in outer}
    inner = YARN | {name: value for name, value in fields.items() if name not in outer}
    inner = {name: value for name, value in inner.items() if value is not None or name == "factor"}
    upstream = Qwen3Config(**{**outer, "rope_parameters": {**inner, "rope_theta": outer["rope_theta"]}})
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](upstream, "cpu")
    architecture = architecture_from_hf(BASE | outer | {"model_type": "qwen3", field: inner})
    np.testing.assert_allclose(np.asarray(inverse_frequencies(architecture)), expected.numpy(), rtol=2e-6)
    assert architecture.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = rotary_embeddings(architecture, np.zeros((1, 1), np.int32))
    np.testing.assert_allclose(cos, factor, rtol=1e-6)
    assert not sin.any()


def test_llama3_scaling_equals_transformers_in_all_three_bands():
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_parameters": LLAMA3 | {"rope_theta": 100.0}}
    upstream = LlamaConfig(hidden_size=32, num_attention_heads=1, **deepcopy(rope))
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](upstream, "cpu")
    assert factor == 1.0
    config = BASE | {"model_type": "llama", "head_dim": 32, "rope_theta": 100.0}
    plain, scaled = (
        np.asarray(inverse_frequencies(architecture_from_hf(config | keys))) for keys in ({}, rope)
    )
    np.testing.assert_allclose(scaled, expected.numpy(), rtol=1e-6)
    stretch = plain / scaled
    bands = [stretch == 1, (stretch > 1) & (stretch < 8), np.isclose(stretch, 8)]
    assert [int(band.sum()) for band in bands] == [4, 5, 7]


def test_llama3_bands_are_those_of_the_wavelengths():
    """High frequencies stay, low ones are divided by the factor, those between lie between."""
    config = BASE | {"model_type": "llama", "head_dim": 32, "rope_theta": 100.0}
    plain = np.asarray(inverse_frequencies(architecture_from_hf(config)))
    scaled = np.asarray(inverse_frequencies(architecture_from_hf(config | {"rope_scaling": LLAMA3})))
    wavelengths = 2 * np.pi / plain
    high, low = wavelengths < 16, wavelengths > 64
    between = ~high & ~low
    assert [int(band.sum()) for band in (high, between, low)] == [4, 5, 7]
    np.testing.assert_array_equal(scaled[high], plain[high])
    assert ((plain / 8 < scaled) & (scaled < plain))[between].all()
    np.testing.assert_allclose(scaled[low], plain[low] / 8)
