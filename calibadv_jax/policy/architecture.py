"""Decoder shapes, read from a HuggingFace ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import UserError

SUPPORTED = ("qwen2", "qwen3", "llama")
# Head dimension of a Qwen3 config.json without head_dim. The other types derive it from hidden_size.
QWEN3_HEAD_DIM = 128
# Key-value heads of a Qwen config.json without num_key_value_heads. Where the field is null, and in Llama's
# config.json, the number is that of the query heads.
QWEN_KV_HEADS = 32
DEFAULT_RMS_NORM_EPS = 1e-6
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rotary embeddings (``rope_type: llama3``).

    Attributes:
        factor: divisor of the low frequencies.
        low_freq_factor: frequencies with fewer periods than this in `original_length` are divided.
        high_freq_factor: frequencies with more periods than this in `original_length` are kept.
        original_length: context length of the pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretching of rotary embeddings (``rope_type: yarn``, arXiv 2309.00071).

    Attributes:
        factor: divisor of the low frequencies.
        original_length: context length of the pretraining, in tokens.
        attention_factor: factor of the cosines and sines.
        beta_fast: dimensions that turn more often than this within `original_length` keep their frequency.
        beta_slow: the frequencies of dimensions that turn less often than this are divided.
        truncate: whether the bounds between the two are rounded to whole dimensions.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Architecture:
    """Sizes and variants of a decoder.

    Attributes:
        model_type: HuggingFace's name of the family, one of SUPPORTED.
        vocab_size: V, tokens of the vocabulary.
        hidden_size: D, width of the hidden states.
        intermediate_size: inner width of the MLP.
        num_layers: number of decoder layers.
        num_heads: N, query heads.
        num_kv_heads: K, key-value heads; each serves N / K query heads.
        head_dim: H, width of a head.
        rms_norm_eps: added to the mean square before its root is taken.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3's or YaRN's scaling of the rotary frequencies; None: unscaled.
        tie_word_embeddings: whether the output head is the embedding table.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        out_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the three matrices of the MLP have a bias.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
    """

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
    rope_scaling: RopeScaling | YarnScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def layer_matrix_elements(self) -> int:
        """Number of elements of one layer's matrices: four of the attention, three of the MLP."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return attention + mlp

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without adapters."""
        biases = 0
        if self.qkv_bias:
            biases += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.out_bias:
            biases += self.hidden_size
        if self.mlp_bias:
            biases += 2 * self.intermediate_size + self.hidden_size
        norms = 2 * self.hidden_size
        if self.qk_norm:
            norms += 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size
        if not self.tie_word_embeddings:
            embeddings *= 2
        final_norm = self.hidden_size
        return self.num_layers * (self.layer_matrix_elements + biases + norms) + embeddings + final_norm

    def flops_per_token(self, context: float) -> float:
        """Return a forward pass' floating-point operations for one token.

        Each element of the layers' matrices and of the output head costs two operations. Attention costs 4 N
        H operations a layer for each token of the context. Norms, biases and the look-up of the embedding
        count as 0.

        Args:
            context: number of tokens that the token attends to; it may be a fraction, such as a mean over a
                row.

        Returns:
            The number of operations.
        """
        matrices = self.num_layers * self.layer_matrix_elements + self.vocab_size * self.hidden_size
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * context
        return 2.0 * (matrices + attention)


def architecture_from_hf(config: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Translate a HuggingFace ``config.json`` as transformers 4 and 5 write it.

    An absent field has the default of the model type's class in transformers. Sizes have no default.

    Args:
        config: the parsed file.
        source: its path, for error messages.

    Returns:
        The shapes of the decoder.

    Raises:
        UserError: if the model type, the activation or the rope_type is not supported, the weights are
            quantised, sliding-window attention is on, or a size or a field of the rope scaling is missing.
    """
    _refuse_unsupported(config, source)
    model_type = config["model_type"]
    num_heads = _size(config, "num_attention_heads", source)
    rope_theta, rope_scaling = _rope(config, source)
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        model_type=model_type,
        vocab_size=_size(config, "vocab_size", source),
        hidden_size=_size(config, "hidden_size", source),
        intermediate_size=_size(config, "intermediate_size", source),
        num_layers=_size(config, "num_hidden_layers", source),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, num_heads, source),
        rms_norm_eps=float(config.get("rms_norm_eps") or DEFAULT_RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        out_bias=model_type != "qwen2" and attention_bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
    )


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise UserError(f"{source}: model_type is {model_type!r}; supported are {', '.join(SUPPORTED)}")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UserError(
            f"{source}: quantization_config is {method!r}; quantised or integer weights are not supported:"
            " give the folder of the unquantised model, or remove the field if they are not"
        )
    if config.get("use_sliding_window"):
        raise UserError(f"{source}: use_sliding_window is on, which is not supported; set it to false")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{source}: hidden_act is {activation!r}; only 'silu' is supported")


def _size(config: Mapping[str, Any], name: str, source: str) -> int:
    size = config.get(name)
    if size is None:
        raise UserError(f"{source}: field {name!r} is missing")
    return int(size)


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if "num_key_value_heads" in config:
        return int(config["num_key_value_heads"] or num_heads)
    is_qwen = config["model_type"] != "llama"
    if is_qwen and num_heads % QWEN_KV_HEADS == 0:
        return QWEN_KV_HEADS
    return num_heads


def _head_dim(config: Mapping[str, Any], num_heads: int, source: str) -> int:
    head_dim = config.get("head_dim")
    if head_dim:
        return int(head_dim)
    if config["model_type"] == "qwen3":
        return QWEN3_HEAD_DIM
    return _size(config, "hidden_size", source) // num_heads


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of config.json that describes the rotary embeddings.

    It is rope_scaling before transformers 5, and rope_parameters from then on. transformers, too, reads the
    first where a file has both.

    Args:
        config: the content of config.json.

    Returns:
        A copy of the field; empty without one.
    """
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | YarnScaling | None]:
    """Return the base of the rotary frequencies and their scaling."""
    parameters = rope_fields(config)
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROPE_THETA)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "llama3":
        return theta, _llama3_scaling(config, parameters, source)
    if rope_type == "yarn":
        return theta, _yarn_scaling(config, parameters, source)
    raise UserError(
        f"{source}: rope_type is {rope_type!r}; supported are 'default', 'llama3' and 'yarn'. Unless the"
        " model was trained with the scaling, remove it there (rope_scaling or rope_parameters): the model"
        " then has its native context length"
    )


def _yarn_scaling(config: Mapping[str, Any], parameters: Mapping[str, Any], source: str) -> YarnScaling:
    length_field = "original_max_position_embeddings"
    positions = config.get("max_position_embeddings")
    original_length = config.get(length_field) or parameters.get(length_field) or positions
    if original_length is None:
        raise UserError(f"{source}: rope_type 'yarn' lacks {length_field}; add it")
    factor = parameters.get("factor")
    if factor is None and positions is not None:
        factor = positions / original_length
    if factor is None:
        raise UserError(f"{source}: rope_type 'yarn' lacks factor; add it")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(float(factor), parameters)
    truncate = parameters.get("truncate")
    return YarnScaling(
        factor=float(factor),
        original_length=int(original_length),
        attention_factor=float(attention_factor),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=True if truncate is None else bool(truncate),
    )


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    """Return the factor of the cosines and sines that follows from the factor of the frequencies."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale = parameters.get("mscale")
    mscale_all_dim = parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _llama3_scaling(config: Mapping[str, Any], parameters: Mapping[str, Any], source: str) -> RopeScaling:
    length_field = "original_max_position_embeddings"
    fields: dict[str, Any] = {
        "factor": parameters.get("factor"),
        "low_freq_factor": parameters.get("low_freq_factor"),
        "high_freq_factor": parameters.get("high_freq_factor"),
        length_field: config.get(length_field)
        or parameters.get(length_field)
        or config.get("max_position_embeddings"),
    }
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise UserError(f"{source}: rope_type 'llama3' lacks {', '.join(missing)}; add them")
    return RopeScaling(
        factor=float(fields["factor"]),
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
        original_length=int(fields[length_field]),
    )
