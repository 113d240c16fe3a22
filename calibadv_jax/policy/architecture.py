"""Decoder shapes, read from a HuggingFace ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import UserError

SUPPORTED = ("qwen2", "qwen3", "llama")
QWEN3_HEAD_DIM = 128  # of a config.json without head_dim; that of the others follows from hidden_size
QWEN_KV_HEADS = 32  # of a Qwen config.json without num_key_value_heads; null means all heads, as in Llama's


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rotary embeddings (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class Architecture:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def layer_matrices(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        biases = self.qkv_bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        biases += self.out_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (self.layer_matrices + biases + norms) + embeddings + self.hidden_size

    def flops_per_token(self, context: float) -> float:
        """Return a forward pass' floating-point operations for a token that attends to `context` others."""
        matrices = self.num_layers * self.layer_matrices + self.vocab_size * self.hidden_size
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * context
        return 2.0 * (matrices + attention)


def architecture_from_hf(config: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Translate a HuggingFace ``config.json`` (transformers 4 and 5); UserError if it is not supported.

    Absent fields have the defaults of the model type's class in transformers; sizes have none.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise UserError(f"{source}: model_type is {model_type!r}; supported are {', '.join(SUPPORTED)}")
    if config.get("use_sliding_window"):
        raise UserError(f"{source}: use_sliding_window is on, which is not supported; set it to false")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{source}: hidden_act is {config['hidden_act']!r}; only 'silu' is supported")

    def need(name: str) -> int:
        if config.get(name) is None:
            raise UserError(f"{source}: field {name!r} is missing")
        return int(config[name])

    num_heads, is_llama = need("num_attention_heads"), model_type == "llama"
    num_kv_heads = config.get("num_key_value_heads")
    if "num_key_value_heads" not in config and not is_llama and num_heads % QWEN_KV_HEADS == 0:
        num_kv_heads = QWEN_KV_HEADS
    head_dim = QWEN3_HEAD_DIM if model_type == "qwen3" else need("hidden_size") // num_heads
    theta, scaling = _rope(config, source)
    bias = bool(config.get("attention_bias", False))
    return Architecture(
        model_type=model_type,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(num_kv_heads or num_heads),
        head_dim=int(config.get("head_dim") or head_dim),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or bias,
        out_bias=model_type != "qwen2" and bias,
        mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
    )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    # transformers, too, takes rope_scaling where both are there.
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{source}: rope_type is {kind!r}; supported are 'default' and 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    needed: dict[str, Any] = {name: parameters.get(name) for name in names}
    length = "original_max_position_embeddings"
    needed[length] = config.get(length) or parameters.get(length) or config.get("max_position_embeddings")
    if missing := [name for name, value in needed.items() if value is None]:
        raise UserError(f"{source}: rope_type 'llama3' lacks {', '.join(missing)}; add them")
    factor, low, high, original = needed.values()
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))
