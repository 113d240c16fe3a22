"""Low-rank adapters (LoRA): what a frozen layer's product gets besides, and how the two become one weight.

Own code, since Qwix 0.1.8 does not fit this decoder. It finds a product's weight by the identity of an array
and its module by the Python frames above it; here the layers are merged anew inside a scan, and on the CPU
their products are a function with a gradient of its own. It also wraps one method of a model, where the
learner and the sampler each have one, and gives adapters the precision of the base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from calibadv_jax.config import LoraConfig
from calibadv_jax.policy.weights import flatten, unflatten

Params = dict[str, Any]

LORA_A, LORA_B = "lora_a", "lora_b"  # last names of an adapter's two parameters


@dataclass(frozen=True)
class Adapters:
    """Which products have adapters, and of what shape."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of LORA_TARGETS
    base_dtype: str  # of the frozen parameters

    @classmethod
    def from_config(cls, config: LoraConfig) -> Adapters | None:
        """None where everything is trained."""
        if not config.rank:
            return None
        return cls(config.rank, config.alpha, tuple(sorted(config.targets)), config.base_dtype)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adapters:
        """Back from `as_dict`."""
        return cls(**dict(values) | {"targets": tuple(values["targets"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"targets": list(self.targets)}

    @property
    def scale(self) -> float:
        """What the two matrices' product is multiplied with."""
        return self.alpha / self.rank


class Linear(nnx.Linear):
    """Flax's, which its adapter, if it has one, changes by x @ lora_a @ lora_b * scale.

    Args:
        adapters: of the whole policy, or None.
        target: the name of this product among theirs.
        param_dtype: of what is trained. With adapters, all that this class's parent holds is frozen and has
            their `base_dtype`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        adapters: Adapters | None,
        target: str,
        param_dtype: Any,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        base_dtype = param_dtype if adapters is None else jnp.dtype(adapters.base_dtype)
        super().__init__(in_features, out_features, param_dtype=base_dtype, rngs=rngs, **options)
        self.scale = 0.0
        if adapters is not None and target in adapters.targets:
            self.scale = adapters.scale
            # As PEFT draws it: evenly within 1 / sqrt(in_features). The product is 0 at first.
            drawn = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            self.lora_a = nnx.Param(drawn(rngs.lora(), (in_features, adapters.rank), param_dtype))
            self.lora_b = nnx.Param(jnp.zeros((adapters.rank, out_features), param_dtype))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        out = super().__call__(inputs, out_sharding)
        if not self.scale:
            return out
        dimensions = ((inputs.ndim - 1,), (0,)), ((), ())
        first, second = self.lora_a[...], self.lora_b[...] * self.scale
        x = inputs.astype(out.dtype)
        for matrix in (first, second):
            x = self.dot_general(x, matrix.astype(out.dtype), dimensions)
        return out + x


def split(params: Mapping[str, Any]) -> tuple[Params, Params]:
    """The base and the adapters of nested parameters, a critic's head among them; leaves of any kind."""
    flat = flatten(params)
    names = {path for path in flat if _last(path) in (LORA_A, LORA_B) or path.startswith("value_head.")}
    base = {path: leaf for path, leaf in flat.items() if path not in names}
    return unflatten(base), unflatten({path: flat[path] for path in flat if path in names})


def joined(base: Mapping[str, Any], more: Mapping[str, Any]) -> Params:
    """Both in one nested dict: the way back from `split`. No array is copied."""
    return unflatten(flatten(base) | flatten(more))


def merged(params: Mapping[str, Any], scale: float, dtype: Any) -> Params:
    """Parameters without adapters that compute the same, in `dtype`: kernel + lora_a @ lora_b * scale.

    The sum is made in float32, one layer at a time, and rounded once.
    """
    base, adapters = (flatten(part) for part in split(params))

    def of(path: str, leaf: jax.Array) -> jax.Array:
        module = path.removesuffix("kernel")
        if module + LORA_A not in adapters:
            return leaf.astype(dtype)
        return _summed(leaf, adapters[module + LORA_A], adapters[module + LORA_B], scale, dtype)

    return unflatten({path: of(path, leaf) for path, leaf in base.items()})


@partial(jax.jit, static_argnums=(3, 4))
def _summed(kernel: jax.Array, first: jax.Array, second: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """kernel [L, D, F], first [L, D, r], second [L, r, F] -> [L, D, F] of `dtype`."""

    def layer(parts: tuple[jax.Array, ...]) -> jax.Array:
        weights, a, b = (part.astype(jnp.float32) for part in parts)
        change = jnp.matmul(a, b * scale, precision=jax.lax.Precision.HIGHEST)
        return (weights + change).astype(dtype)

    return jax.lax.map(layer, (kernel, first, second))


def count(abstract: Mapping[str, Any]) -> int:
    """Elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in flatten(abstract).values())


def _last(path: str) -> str:
    return path.rpartition(".")[2]
