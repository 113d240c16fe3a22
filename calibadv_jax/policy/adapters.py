"""Low-rank adapters (LoRA) beside the frozen matrices of the layers.

Qwix 0.1.8 is not used. It identifies a weight by its array and a module by its Python frames, but here layers
are merged anew inside a scan. It also wraps one method of a model, where learner and sampler each have one.
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

# The last names of the paths of an adapter's two parameters.
LORA_A = "lora_a"
LORA_B = "lora_b"
VALUE_HEAD_PREFIX = "value_head."


@dataclass(frozen=True)
class Adapters:
    """Rank, scale and places of the adapters.

    Attributes:
        rank: r, width between the two matrices of an adapter.
        alpha: the matrices' product is multiplied by alpha / rank.
        targets: names of the matrices with an adapter, out of LORA_TARGETS of the config.
        base_dtype: dtype of the frozen parameters.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_dtype: str

    @classmethod
    def from_config(cls, config: LoraConfig) -> Adapters | None:
        """Return the adapters of a config.

        Args:
            config: the section `policy.lora`.

        Returns:
            The adapters, with sorted targets; None if the rank is 0, where all parameters are trained.
        """
        if not config.rank:
            return None
        targets = tuple(sorted(config.targets))
        return cls(config.rank, config.alpha, targets, config.base_dtype)

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank


def split(params: Params) -> tuple[Params, Params]:
    """Split parameters into the base and what is added to it.

    Args:
        params: nested dict with leaves of any kind.

    Returns:
        The base, and the adapters together with a critic's value head, both nested. The second dict is empty
        if there is neither. No array is copied.
    """
    base: Params = {}
    added: Params = {}
    for path, leaf in flatten(params).items():
        is_adapter = path.endswith((LORA_A, LORA_B))
        is_value_head = path.startswith(VALUE_HEAD_PREFIX)
        if is_adapter or is_value_head:
            added[path] = leaf
        else:
            base[path] = leaf
    return unflatten(base), unflatten(added)


def merge_params(base: Params, added: Params) -> Params:
    """Join the two results of `split` into one nested dict.

    Args:
        base: nested parameters.
        added: nested parameters with other paths; {} for none.

    Returns:
        A new nested dict with the leaves of both; no array is copied.
    """
    return unflatten(flatten(base) | flatten(added))


def fold_adapters(params: Params, scale: float, dtype: Any) -> Params:
    """Fold the adapters into the matrices beside them.

    Args:
        params: nested parameters, with or without adapters.
        scale: factor of lora_a @ lora_b.
        dtype: of the results.

    Returns:
        The base's parameters in `dtype`, with kernel + lora_a @ lora_b * scale in place of a kernel that has
        an adapter. The sum is computed in float32 and rounded once.
    """
    flat = flatten(params)
    base, _ = split(params)
    results: Params = {}
    for path, leaf in flatten(base).items():
        module = path.removesuffix("kernel")
        lora_a = flat.get(module + LORA_A)
        if lora_a is None:
            results[path] = leaf.astype(dtype)
        else:
            results[path] = _fold_adapter(leaf, lora_a, flat[module + LORA_B], scale, dtype)
    return unflatten(results)


@partial(jax.jit, static_argnums=(3, 4))
def _fold_adapter(kernel: Array, lora_a: Array, lora_b: Array, scale: float, dtype: Any) -> Array:
    """Return kernel [L, D, F] + lora_a [L, D, r] @ lora_b [L, r, F] * scale in `dtype`, layer by layer."""

    def fold_layer(matrices: tuple[Array, Array, Array]) -> Array:
        """Return the sum of one layer's matrices, [D, F]."""
        layer_kernel, layer_a, layer_b = (matrix.astype(jnp.float32) for matrix in matrices)
        change = jnp.matmul(layer_a, layer_b * scale, precision=jax.lax.Precision.HIGHEST)  # [D, F]
        return (layer_kernel + change).astype(dtype)

    return jax.lax.map(fold_layer, (kernel, lora_a, lora_b))
