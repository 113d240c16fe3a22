"""Tests must not depend on how a CPU rounds: how to compare numbers, and a mode that rounds otherwise.

Programs of other shapes, meshes or CPUs add the same numbers in another order. So values and gradients are
compared by `close_in_norm`, and parameters after steps of SGD: AdamW makes a full step in a direction that
rounding chose where a gradient is nearly zero. Bits are compared where both sides are one program with the
same inputs. How to see on one CPU that a test keeps to this::

    pytest --perturb tests/learner  # see `perturb`
    XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type= --xla_cpu_max_isa=SSE4_2" pytest tests/learner
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.learner.learner import Learner
from calibadv_jax.policy.kernels import custom_gradients


def close_in_norm(actual: Any, expected: Any, relative: float = 1e-5) -> None:
    """Check that no leaf is further off than `relative` of the whole tree's norm.

    Of the whole tree and not of the leaf: some gradients are zero but for rounding, that of a key's bias
    for one. Float32 keeps 6e-8 of a number; the default leaves room for sums of a few hundred.
    """
    pairs = jax.tree.map(lambda *leaves: [np.asarray(leaf, np.float64) for leaf in leaves], actual, expected)
    pairs = dict(jax.tree_util.tree_leaves_with_path(pairs, is_leaf=lambda node: isinstance(node, list)))
    norm = np.sqrt(sum(np.sum(other**2) for _, other in pairs.values()))
    allowed = relative * (norm or 1.0)
    apart = {name: np.linalg.norm(leaf - other) for name, (leaf, other) in pairs.items()}
    far = {jax.tree_util.keystr(name): gap for name, gap in apart.items() if not gap <= allowed}  # NaN too
    assert not far, f"of norm {norm:.3g}, further off than {allowed:.3g}: {far}"


def perturb() -> None:
    """Let programs of other shapes and meshes round differently, by a unit in the last place.

    This concerns the results of the layers' products, and the gradients that the optimizer takes, in the
    scale of a parameter's largest. One program rounds the same every time.
    """
    plain_product, plain_step = custom_gradients._product, Learner._applied

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        out = plain_product(x, weights)
        return out * (1 + _noise(out, (x.shape, weights.shape)))

    def applied(self: Learner, state: Any, gradients: Any) -> Any:
        def moved(leaf: jax.Array) -> jax.Array:
            size = jnp.abs(leaf).max()
            return jnp.where(leaf == 0, leaf, leaf + size * _noise(leaf, (leaf.shape, self.options.offload)))

        return plain_step(self, state, jax.tree.map(moved, gradients))

    custom_gradients._product, Learner._applied = product, applied  # type: ignore[assignment, method-assign]


def _noise(like: jax.Array, program: tuple[Any, ...]) -> np.ndarray:
    """One unit in the last place of 1, up, down or not at all, for each index of the last axis."""
    mesh = jax.sharding.get_abstract_mesh()
    rng = np.random.default_rng(zlib.crc32(repr((program, mesh.shape)).encode()))
    return rng.integers(-1, 2, like.shape[-1:]).astype(like.dtype) * jnp.finfo(like.dtype).eps
