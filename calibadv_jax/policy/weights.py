"""The table of weights: our path, of stacked layers, <-> HuggingFace name, layout and logical axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

Region = tuple[slice, ...]  # of an array, one slice an axis

LISTED = 3  # differences that an error message names; the rest are counted


@dataclass(frozen=True)
class Weight:
    hf: str  # HuggingFace name; {layer} for stacked parameters
    axes: tuple[str, ...]  # logical axes of our array
    transposed: bool = False  # HuggingFace stores [out, in], we store [in, out]

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.hf


LAYER, PEFT = "model.layers.{layer}.", "base_model.model."  # prefixes of names


def _layer(name: str, axis: str) -> Weight:
    return Weight(LAYER + name, ("layers", axis))


def _product(module: str, name: str, inner: str, outer: str) -> dict[str, Weight]:
    """Return the weight of a layer's product, and the bias and the adapter that it may have."""
    adapter = f"{PEFT}{LAYER}{name}.lora_"
    return {
        f"{module}.kernel": Weight(f"{LAYER}{name}.weight", ("layers", inner, outer), transposed=True),
        f"{module}.bias": _layer(f"{name}.bias", "norm" if outer == "embed" else outer),
        f"{module}.lora_a": Weight(adapter + "A.weight", ("layers", inner, "rank"), transposed=True),
        f"{module}.lora_b": Weight(adapter + "B.weight", ("layers", "rank", outer), transposed=True),
    }


WEIGHTS: dict[str, Weight] = {
    "embed.embedding": Weight("model.embed_tokens.weight", ("vocab", "embed")),
    "layers.attn_norm.scale": _layer("input_layernorm.weight", "norm"),
    **_product("layers.attn.q", "self_attn.q_proj", "embed", "heads"),
    **_product("layers.attn.k", "self_attn.k_proj", "embed", "kv_heads"),
    **_product("layers.attn.v", "self_attn.v_proj", "embed", "kv_heads"),
    **_product("layers.attn.o", "self_attn.o_proj", "heads", "embed"),
    "layers.attn.q_norm.scale": _layer("self_attn.q_norm.weight", "norm"),
    "layers.attn.k_norm.scale": _layer("self_attn.k_norm.weight", "norm"),
    "layers.mlp_norm.scale": _layer("post_attention_layernorm.weight", "norm"),
    **_product("layers.mlp.gate", "mlp.gate_proj", "embed", "mlp"),
    **_product("layers.mlp.up", "mlp.up_proj", "embed", "mlp"),
    **_product("layers.mlp.down", "mlp.down_proj", "mlp", "embed"),
    "final_norm.scale": Weight("model.norm.weight", ("norm",)),
    "lm_head.kernel": Weight("lm_head.weight", ("embed", "vocab"), transposed=True),
    "value_head.kernel": Weight("score.weight", ("norm", "norm"), transposed=True),  # of a critic
}


def flatten(params: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested dict to {dotted path: leaf}."""
    return flatten_dict(params, sep=".")


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten_dict(dict(flat), sep=".")


def to_hf(params: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield HuggingFace names and host arrays, one layer at a time, of a nested dict of arrays."""
    for path, value in flatten(params).items():
        weight = WEIGHTS[path]
        array = np.asarray(value)
        for index, part in enumerate(array if weight.stacked else [array]):
            yield weight.hf.format(layer=index), part.T if weight.transposed else part


def hf_shapes(abstract: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return HuggingFace name -> shape, for a nested dict of arrays or ShapeDtypeStructs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in flatten(abstract).items():
        weight = WEIGHTS[path]
        num_layers, shape = (leaf.shape[0], leaf.shape[1:]) if weight.stacked else (1, leaf.shape)
        for index in range(num_layers):
            shapes[weight.hf.format(layer=index)] = shape[::-1] if weight.transposed else shape
    return shapes


def shape_problems(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Describe every missing, extra and misshapen tensor, short names first."""
    problems = []
    for name in sorted(shapes.keys() | expected.keys(), key=lambda name: (len(name), name)):
        if name not in shapes:
            problems.append(f"missing {name} {list(expected[name])}")
        elif name not in expected:
            problems.append(f"unexpected {name} {list(shapes[name])}")
        elif tuple(shapes[name]) != tuple(expected[name]):
            problems.append(f"{name} has shape {list(shapes[name])} instead of {list(expected[name])}")
    return problems


def summary(problems: Sequence[str]) -> str:
    """Join the first few problems and the count of the rest, on one line."""
    more = len(problems) - LISTED
    return "; ".join(problems[:LISTED]) + (f"; and {more} more" if more > 0 else "")


def from_hf(
    path: str, read: Callable[[str, Region], np.ndarray], num_layers: int, region: Region, dtype: Any
) -> np.ndarray:
    """Assemble a region of our parameter at `path` in `dtype`; `read` returns regions by HuggingFace name."""
    weight = WEIGHTS[path]
    layers, inner = (range(num_layers)[region[0]], region[1:]) if weight.stacked else (range(1), region)
    names = [weight.hf.format(layer=layer) for layer in layers]
    parts = [read(name, inner[::-1]).T if weight.transposed else read(name, inner) for name in names]
    if not weight.stacked:
        return np.ascontiguousarray(parts[0], dtype)
    return np.stack(parts, dtype=dtype, casting="unsafe")
