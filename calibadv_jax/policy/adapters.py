"""Low-rank adapters (LoRA) beside the frozen products of the layers.

Own code: Qwix 0.1.8 identifies a weight by its array and a module by its Python frames, but here layers are
merged anew inside a scan. It also wraps one method of a model, where learner and sampler each have one.
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
    """Rank, scale and places of the adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of LORA_TARGETS
    base_dtype: str  # of the frozen parameters

    @classmethod
    def from_config(cls, config: LoraConfig) -> Adapters | None:
        """Return None if everything is trained."""
        if not config.rank:
            return None
        return cls(config.rank, config.alpha, tuple(sorted(config.targets)), config.base_dtype)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adapters:
        """Read the values of `as_dict`."""
        return cls(**dict(values) | {"targets": tuple(values["targets"])})

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"targets": list(self.targets)}

    @property
    def scale(self) -> float:
        """The factor of the two matrices' product."""
        return self.alpha / self.rank


class Linear(nnx.Linear):
    """Flax's linear layer plus x @ lora_a @ lora_b * scale, if `adapters` has this `target`.

    With adapters, `param_dtype` is theirs, and the layer's own parameters have their `base_dtype`.
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
    """Split nested parameters into the base, and the adapters with a critic's head; leaves of any kind."""
    base: Params = {}
    adapters: Params = {}
    for path, leaf in flatten(params).items():
        is_trained = path.endswith((LORA_A, LORA_B)) or path.startswith("value_head.")
        (adapters if is_trained else base)[path] = leaf
    return unflatten(base), unflatten(adapters)


def joined(base: Mapping[str, Any], more: Mapping[str, Any]) -> Params:
    """Join the two results of `split` in one nested dict. No array is copied."""
    return unflatten(flatten(base) | flatten(more))


def merged(params: Mapping[str, Any], scale: float, dtype: Any) -> Params:
    """Return parameters without adapters that compute the same: kernel + lora_a @ lora_b * scale.

    The sum is computed in float32, one layer at a time, and rounded to `dtype` once.
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
    """Sum kernel [L, D, F] and first [L, D, r] @ second [L, r, F] * scale, in `dtype`."""

    def layer(parts: tuple[jax.Array, ...]) -> jax.Array:
        weights, a, b = (part.astype(jnp.float32) for part in parts)
        change = jnp.matmul(a, b * scale, precision=jax.lax.Precision.HIGHEST)
        return (weights + change).astype(dtype)

    return jax.lax.map(layer, (kernel, first, second))


def count(abstract: Mapping[str, Any]) -> int:
    """Count the elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in flatten(abstract).values())
