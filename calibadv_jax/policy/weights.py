"""The weight-name table: our parameter path <-> HuggingFace name, layout and logical axes.

`layers` parameters are stacked on a leading axis here, and one tensor a layer in HuggingFace's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from calibadv_jax.core.errors import UserError

Region = tuple[slice, ...]  # of an array, one slice an axis

LISTED = 3  # differences that an error message names; the rest are counted


@dataclass(frozen=True)
class Weight:
    """Name and layout of a parameter."""

    hf: str  # HuggingFace name; {layer} for stacked parameters
    axes: tuple[str, ...]  # logical axes of our array
    transposed: bool = False  # HuggingFace stores [out, in], we store [in, out]

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.hf


def _layer(name: str, *axes: str, transposed: bool = False) -> Weight:
    return Weight("model.layers.{layer}." + name, ("layers", *axes), transposed)


def _with_adapters(table: dict[str, Weight]) -> dict[str, Weight]:
    """Add the adapters that the stacked products may have, named as in PEFT's files."""
    extended = dict(table)
    for path, weight in table.items():
        if weight.stacked and weight.transposed:
            layers, inner, outer = weight.axes
            name = PEFT + weight.hf.removesuffix("weight")
            module = path.removesuffix("kernel")
            extended[module + "lora_a"] = Weight(name + "lora_A.weight", (layers, inner, "rank"), True)
            extended[module + "lora_b"] = Weight(name + "lora_B.weight", (layers, "rank", outer), True)
    return extended


PEFT = "base_model.model."  # what PEFT's names begin with
_PLAIN: dict[str, Weight] = {
    "embed.embedding": Weight("model.embed_tokens.weight", ("vocab", "embed")),
    "layers.attn_norm.scale": _layer("input_layernorm.weight", "norm"),
    "layers.attn.q.kernel": _layer("self_attn.q_proj.weight", "embed", "heads", transposed=True),
    "layers.attn.k.kernel": _layer("self_attn.k_proj.weight", "embed", "kv_heads", transposed=True),
    "layers.attn.v.kernel": _layer("self_attn.v_proj.weight", "embed", "kv_heads", transposed=True),
    "layers.attn.o.kernel": _layer("self_attn.o_proj.weight", "heads", "embed", transposed=True),
    "layers.attn.q.bias": _layer("self_attn.q_proj.bias", "heads"),
    "layers.attn.k.bias": _layer("self_attn.k_proj.bias", "kv_heads"),
    "layers.attn.v.bias": _layer("self_attn.v_proj.bias", "kv_heads"),
    "layers.attn.o.bias": _layer("self_attn.o_proj.bias", "norm"),
    "layers.attn.q_norm.scale": _layer("self_attn.q_norm.weight", "norm"),
    "layers.attn.k_norm.scale": _layer("self_attn.k_norm.weight", "norm"),
    "layers.mlp_norm.scale": _layer("post_attention_layernorm.weight", "norm"),
    "layers.mlp.gate.kernel": _layer("mlp.gate_proj.weight", "embed", "mlp", transposed=True),
    "layers.mlp.up.kernel": _layer("mlp.up_proj.weight", "embed", "mlp", transposed=True),
    "layers.mlp.down.kernel": _layer("mlp.down_proj.weight", "mlp", "embed", transposed=True),
    "layers.mlp.gate.bias": _layer("mlp.gate_proj.bias", "mlp"),
    "layers.mlp.up.bias": _layer("mlp.up_proj.bias", "mlp"),
    "layers.mlp.down.bias": _layer("mlp.down_proj.bias", "norm"),
    "final_norm.scale": Weight("model.norm.weight", ("norm",)),
    "lm_head.kernel": Weight("lm_head.weight", ("embed", "vocab"), transposed=True),
    "value_head.kernel": Weight("score.weight", ("norm", "norm"), transposed=True),  # of a critic
}
WEIGHTS = _with_adapters(_PLAIN)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict to {dotted path: leaf}."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest {dotted path: leaf}."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return nested


def to_hf(params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield HuggingFace names and host arrays, one layer at a time, of a nested dict of arrays."""
    for path, value in flatten(params).items():
        weight = WEIGHTS[path]
        array = np.asarray(value)
        for index, part in enumerate(array) if weight.stacked else [(0, array)]:
            yield weight.hf.format(layer=index), part.T if weight.transposed else part


def hf_shapes(abstract: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return HuggingFace name -> shape, for a nested dict of arrays or ShapeDtypeStructs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in flatten(abstract).items():
        weight = WEIGHTS[path]
        shape = leaf.shape[1:] if weight.stacked else leaf.shape
        for index in range(leaf.shape[0] if weight.stacked else 1):
            shapes[weight.hf.format(layer=index)] = shape[::-1] if weight.transposed else shape
    return shapes


def check_hf(shapes: Mapping[str, tuple[int, ...]], abstract: Mapping[str, Any], source: str) -> None:
    """Compare a checkpoint's HuggingFace names and shapes with the policy's.

    Raises UserError with the first missing, extra and misshapen tensors and the count of the rest.
    """
    problems = shape_problems(shapes, hf_shapes(abstract))
    if problems:
        raise UserError(f"{source}: {len(problems)} tensor(s) do not fit config.json: {summary(problems)}")


def shape_problems(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Describe every missing, extra and misshapen tensor, the three kinds in turn, short names first."""
    names = sorted(shapes.keys() | expected.keys(), key=lambda name: (len(name), name))
    missing = [f"missing {name} {list(expected[name])}" for name in names if name not in shapes]
    unexpected = [f"unexpected {name} {list(shapes[name])}" for name in names if name not in expected]
    misshapen = [
        f"{name} has shape {list(shapes[name])} instead of {list(expected[name])}"
        for name in names
        if name in shapes and name in expected and tuple(shapes[name]) != tuple(expected[name])
    ]
    return [problem for problem in chain(*zip_longest(missing, unexpected, misshapen)) if problem]


def summary(problems: Sequence[str]) -> str:
    """Join the first few problems and the count of the rest, on one line."""
    rest = len(problems) - LISTED
    return "; ".join(problems[:LISTED]) + (f"; and {rest} more" if rest > 0 else "")


def from_hf(
    path: str, read: Callable[[str, Region], np.ndarray], num_layers: int, region: Region, dtype: Any
) -> np.ndarray:
    """Assemble a region of our parameter at dotted `path`, in `dtype`.

    Args:
        read: (HuggingFace name, region of that tensor) -> host array.
        region: of our array; nothing else is read.
    """
    weight = WEIGHTS[path]
    layers, inner = (range(num_layers)[region[0]], region[1:]) if weight.stacked else (range(1), region)
    hf_region = inner[::-1] if weight.transposed else inner
    tensors = [read(weight.hf.format(layer=layer), hf_region) for layer in layers]
    parts = [tensor.T if weight.transposed else tensor for tensor in tensors]
    if not weight.stacked:
        return np.ascontiguousarray(parts[0], dtype)
    stacked: np.ndarray = np.stack(parts, dtype=dtype, casting="unsafe")
    return stacked
