"""Tests must not depend on how a CPU rounds: how to compare numbers.

Programs of other shapes, meshes or CPUs add the same numbers in another order. So values and gradients are
compared by `close_in_norm`, and parameters after steps of SGD: AdamW makes a full step in a direction that
rounding chose where a gradient is nearly zero. Bits are compared where both sides are one program with the
same inputs. How to see on one CPU that a test keeps to this::

    XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type= --xla_cpu_max_isa=SSE4_2" pytest tests/learner
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


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
