"""Snapshots of adapters alone: their reader adds them to the base, which it reads from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import joined, merged
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import flatten, unflatten
from calibadv_jax.snapshots.huggingface import read_base_tensors, weights_hash


def with_base(adapters: Mapping[str, np.ndarray], manifest: Mapping[str, Any], snapshot: Path) -> Any:
    """Host arrays of all parameters by dotted path: base + adapters, in the precision of a merged snapshot.

    Args:
        adapters: by dotted path, in float32.
        manifest: of the snapshot. Its "base" says where the base lies, its hash and precision, what the
            adapters are multiplied with, and the precision of the sum.

    Raises:
        UserError: the base is not there, or another model lies there.
    """
    base = manifest["base"]
    folder = Path(base["folder"])
    way_out = "mount it there for the worker too, or set policy.lora.snapshots=merged"
    if not folder.is_dir():
        raise UserError(f"{snapshot}: the base of its adapters, {folder}, is not there; {way_out}")
    if weights_hash(folder) != base["sha256"]:
        raise UserError(f"{snapshot}: {folder} is another model than the base of its adapters; {way_out}")
    policy = Policy(architecture_from_hf(manifest["config"], f"{snapshot}: config"), Numerics())
    frozen = read_base_tensors(folder, policy, jnp.dtype(base["base_dtype"]))
    whole = merged(joined(frozen, unflatten(adapters)), base["scale"], jnp.dtype(base["dtype"]))
    return {path: np.asarray(leaf) for path, leaf in flatten(whole).items()}
