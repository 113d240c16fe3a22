"""The table of weights: our paths of stacked layers beside HuggingFace's names, layouts and logical axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

Region = tuple[slice, ...]  # a part of an array: one slice for each axis

MAX_LISTED_PROBLEMS = 3  # An error message names so many differences and counts the rest.
LAYER_PREFIX = "model.layers.{layer}."  # prefix of HuggingFace's names of a layer's tensors
PEFT_PREFIX = "base_model.model."  # prefix of PEFT's names of adapters


@dataclass(frozen=True)
class Weight:
    """Name and layout of one of our parameters in HuggingFace's files.

    Attributes:
        hf: HuggingFace's name; it contains ``{layer}`` if our parameter stacks all layers.
        axes: logical axes of our array, as in `sharding.RULES`.
        transposed: whether HuggingFace stores [out, in] where we store [in, out].
    """

    hf: str
    axes: tuple[str, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading axis of layers."""
        return "{layer}" in self.hf


def _layer_vector(name: str, axis: str) -> Weight:
    return Weight(LAYER_PREFIX + name, ("layers", axis))


def _layer_matrix(module: str, name: str, inner: str, outer: str) -> dict[str, Weight]:
    """Return the entries of a layer's matrix [inner, outer], and of the bias and adapter it may have."""
    hf_module = LAYER_PREFIX + name
    adapter = PEFT_PREFIX + hf_module
    # A bias along the hidden states is added to whole states, so it is not split.
    bias_axis = "norm" if outer == "embed" else outer
    return {
        f"{module}.kernel": Weight(f"{hf_module}.weight", ("layers", inner, outer), transposed=True),
        f"{module}.bias": _layer_vector(f"{name}.bias", bias_axis),
        f"{module}.lora_a": Weight(f"{adapter}.lora_A.weight", ("layers", inner, "rank"), transposed=True),
        f"{module}.lora_b": Weight(f"{adapter}.lora_B.weight", ("layers", "rank", outer), transposed=True),
    }


WEIGHTS: dict[str, Weight] = {
    "embed.embedding": Weight("model.embed_tokens.weight", ("vocab", "embed")),
    "layers.attn_norm.scale": _layer_vector("input_layernorm.weight", "norm"),
    **_layer_matrix("layers.attn.q", "self_attn.q_proj", "embed", "heads"),
    **_layer_matrix("layers.attn.k", "self_attn.k_proj", "embed", "kv_heads"),
    **_layer_matrix("layers.attn.v", "self_attn.v_proj", "embed", "kv_heads"),
    **_layer_matrix("layers.attn.o", "self_attn.o_proj", "heads", "embed"),
    "layers.attn.q_norm.scale": _layer_vector("self_attn.q_norm.weight", "norm"),
    "layers.attn.k_norm.scale": _layer_vector("self_attn.k_norm.weight", "norm"),
    "layers.mlp_norm.scale": _layer_vector("post_attention_layernorm.weight", "norm"),
    **_layer_matrix("layers.mlp.gate", "mlp.gate_proj", "embed", "mlp"),
    **_layer_matrix("layers.mlp.up", "mlp.up_proj", "embed", "mlp"),
    **_layer_matrix("layers.mlp.down", "mlp.down_proj", "mlp", "embed"),
    "final_norm.scale": Weight("model.norm.weight", ("norm",)),
    "lm_head.kernel": Weight("lm_head.weight", ("embed", "vocab"), transposed=True),
    # The head of a critic.
    "value_head.kernel": Weight("score.weight", ("norm", "norm"), transposed=True),
}


def flatten(params: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested dict.

    Args:
        params: nested dict whose keys have no dot.

    Returns:
        {dotted path: leaf}, such as "layers.attn.q.kernel".
    """
    return flatten_dict(params, sep=".")


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest a flat dict: the inverse of `flatten`.

    Args:
        flat: {dotted path: leaf}.

    Returns:
        A nested dict with the same leaves.
    """
    return unflatten_dict(dict(flat), sep=".")


def to_hf(params: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a HuggingFace folder, one layer at a time.

    Args:
        params: nested dict of arrays.

    Yields:
        HuggingFace's name, and the array on the host in HuggingFace's layout.
    """
    for path, value in flatten(params).items():
        weight = WEIGHTS[path]
        array = np.asarray(value)
        tensors = array if weight.stacked else [array]
        for layer, tensor in enumerate(tensors):
            yield weight.hf.format(layer=layer), tensor.T if weight.transposed else tensor


def hf_shapes(abstract: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each HuggingFace tensor.

    Args:
        abstract: nested dict of arrays or ShapeDtypeStructs in our layout.

    Returns:
        Shapes in HuggingFace's layout, by HuggingFace's name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in flatten(abstract).items():
        weight = WEIGHTS[path]
        if weight.stacked:
            num_layers, *inner_sizes = leaf.shape
            shape = tuple(inner_sizes)
        else:
            num_layers = 1
            shape = leaf.shape
        if weight.transposed:
            shape = shape[::-1]
        for layer in range(num_layers):
            shapes[weight.hf.format(layer=layer)] = shape
    return shapes


def shape_problems(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Describe every missing, unexpected and misshapen tensor.

    Args:
        shapes: shapes of a file's tensors, by name.
        expected: the shapes that the policy needs, by name.

    Returns:
        One phrase for each difference, short names first; empty if there is none.
    """
    problems = []
    names = sorted(shapes.keys() | expected.keys(), key=lambda name: (len(name), name))
    for name in names:
        if name not in shapes:
            problems.append(f"missing {name} {list(expected[name])}")
        elif name not in expected:
            problems.append(f"unexpected {name} {list(shapes[name])}")
        elif tuple(shapes[name]) != tuple(expected[name]):
            problems.append(f"{name} has shape {list(shapes[name])} instead of {list(expected[name])}")
    return problems


def summarise_problems(problems: Sequence[str]) -> str:
    """Join problems on one line, the first MAX_LISTED_PROBLEMS in full.

    Args:
        problems: phrases, from `shape_problems`.

    Returns:
        The phrases, and the count of the rest; "" if there is no problem.
    """
    listed = "; ".join(problems[:MAX_LISTED_PROBLEMS])
    num_more = len(problems) - MAX_LISTED_PROBLEMS
    if num_more > 0:
        return f"{listed}; and {num_more} more"
    return listed


def from_hf(
    path: str,
    read: Callable[[str, Region], np.ndarray],
    num_layers: int,
    region: Region,
    dtype: Any,
) -> np.ndarray:
    """Assemble a region of one of our parameters from HuggingFace's tensors.

    Args:
        path: dotted path of our parameter.
        read: returns a region of a tensor, given HuggingFace's name and a region in HuggingFace's layout.
        num_layers: layers of the policy.
        region: the part to assemble, in our layout.
        dtype: of the result.

    Returns:
        A contiguous array in our layout.
    """
    weight = WEIGHTS[path]

    def read_tensor(name: str, inner: Region) -> np.ndarray:
        """Return a region of a HuggingFace tensor in our layout."""
        if weight.transposed:
            return read(name, inner[::-1]).T
        return read(name, inner)

    if not weight.stacked:
        return np.ascontiguousarray(read_tensor(weight.hf, region), dtype)
    layer_slice, *inner_slices = region
    inner = tuple(inner_slices)
    layers = range(num_layers)[layer_slice]
    tensors = [read_tensor(weight.hf.format(layer=layer), inner) for layer in layers]
    return np.stack(tensors, dtype=dtype, casting="unsafe")
