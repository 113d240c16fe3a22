"""Low-rank adapters (LoRA) beside the frozen products of the layers.

Own code: Qwix 0.1.8 identifies a weight by its array and a module by its Python frames, but here layers are
merged anew inside a scan. It also wraps one method of a model, where learner and sampler each have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

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

    @property
    def scale(self) -> float:
        return self.alpha / self.rank  # the factor of the two matrices' product


def split(params: Params) -> tuple[Params, Params]:
    """Split nested parameters into the base, and the adapters with a critic's head; leaves of any kind."""
    base: Params = {}
    added: Params = {}
    for path, leaf in flatten(params).items():
        is_added = path.endswith((LORA_A, LORA_B)) or path.startswith("value_head.")
        (added if is_added else base)[path] = leaf
    return unflatten(base), unflatten(added)


def merge_params(base: Params, added: Params) -> Params:
    """Join the results of `split`; no array is copied."""
    return unflatten(flatten(base) | flatten(added))


def merged(params: Params, scale: float, dtype: Any) -> Params:
    """Put kernel + lora_a @ lora_b * scale in place of adapters, summed in float32 and rounded once."""
    flat, results = flatten(params), {}
    for path, leaf in flatten(split(params)[0]).items():
        module = path.removesuffix("kernel")
        lora_a, lora_b = flat.get(module + LORA_A), flat.get(module + LORA_B)
        results[path] = leaf.astype(dtype) if lora_a is None else _summed(leaf, lora_a, lora_b, scale, dtype)
    return unflatten(results)


@partial(jax.jit, static_argnums=(3, 4))
def _summed(kernel: Array, lora_a: Array, lora_b: Array, scale: float, dtype: Any) -> Array:
    """Sum kernel [L, D, F] and lora_a [L, D, r] @ lora_b [L, r, F] * scale, in `dtype`."""

    def layer(parts: tuple[Array, ...]) -> Array:
        weights, first, second = (part.astype(jnp.float32) for part in parts)
        change = jnp.matmul(first, second * scale, precision=jax.lax.Precision.HIGHEST)
        return (weights + change).astype(dtype)

    return jax.lax.map(layer, (kernel, lora_a, lora_b))
