"""Versioned policy snapshots: how samplers get their weights.

One folder per version: an Orbax tree under ``params`` and a manifest that is written last. A folder
without a manifest is not a snapshot. One host publishes: every parameter must be addressable from it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json, write_json
from calibadv_jax.policy.sharding import placed_params
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import flatten, shape_problems, summary, unflatten
from calibadv_jax.snapshots.adapted import with_base
from calibadv_jax.snapshots.layout import damage_as_user_error, tensor_shapes

MANIFEST, TREE = "manifest.json", "params"
FORMAT = 1
HASHED_AT_ONCE = 4  # tensors; each is copied to the host, and SHA-256 runs outside Python's lock


class SnapshotStore:
    """Publishes snapshots under one folder and prunes old ones.

    Args:
        keep: newest versions that are kept.
        dtype: precision of the published parameters.
    """

    def __init__(self, folder: Path, keep: int, dtype: Any):
        self.folder, self.keep, self.dtype = folder.absolute(), keep, jnp.dtype(dtype).name
        self._cast = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), params))
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def publish(
        self,
        version: int,
        params: Params,
        *,
        hf_config: Mapping[str, Any],
        tokenizer_hash: str,
        base: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a version and returns its folder; when it returns, the snapshot is complete.

        Args:
            base: of parameters that are adapters alone, which stay in their precision; see `adapted`.

        This version and later ones that are there already came from a run that was since resumed at an
        earlier step: they are removed.
        """
        for stale in self.folder.glob("v*"):
            if _version(stale) >= version:
                _remove(stale)
        folder = self.folder / f"v{version:06d}"
        folder.mkdir(parents=True)
        cast = params if base else self._cast(params)
        self._checkpointer.save(folder / TREE, cast)
        tensors = {
            path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "sha256": digest}
            for (path, leaf), digest in zip(flatten(cast).items(), _digests(cast), strict=True)
        }
        manifest = {
            "format": FORMAT,
            "version": version,
            "tokenizer": tokenizer_hash,
            "config": dict(hf_config),
            "tensors": tensors,
        } | ({"base": dict(base) | {"dtype": self.dtype}} if base else {})
        write_json(folder / MANIFEST, manifest)
        for old in self._complete()[: -self.keep]:
            _remove(old)
        return folder

    def _complete(self) -> list[Path]:
        return sorted((path.parent for path in self.folder.glob(f"v*/{MANIFEST}")), key=_version)


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """What a snapshot holds: format, version, tokenizer (hash), config, tensors by dotted path.

    Raises:
        UserError: the snapshot is incomplete, or of another format.
    """
    path = snapshot / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{snapshot}: not a complete snapshot (no {MANIFEST}); use another or publish it again"
        )
    manifest = read_json(path, "publish the snapshot again")
    known = manifest.get("format")
    if known != FORMAT:
        raise UserError(f"{path}: format is {known!r}, not {FORMAT}; publish the snapshot with this version")
    return manifest


def load_snapshot(snapshot: Path, policy: Policy, mesh: Mesh | None, verify: bool = False) -> Params:
    """Parameters of a snapshot in the policy's shardings and `compute_dtype`: samplers do not train.

    Args:
        mesh: None puts everything on the first device.
        verify: compare every tensor with its hash in the manifest.

    Raises:
        UserError: incomplete, damaged, or of another policy (all differences are listed).
    """
    snapshot = snapshot.absolute()
    manifest, targets = read_manifest(snapshot), placed_params(policy.abstract_base, mesh)
    dtype = policy.numerics.compute_dtype
    if "base" in manifest:
        whole = unflatten(read_tensors(snapshot))
        _check_shapes(snapshot, tensor_shapes(whole), policy)
        return jax.tree.map(lambda leaf, to: jax.device_put(leaf.astype(dtype), to.sharding), whole, targets)
    tensors = manifest["tensors"]
    _check_shapes(snapshot, {path: tuple(entry["shape"]) for path, entry in tensors.items()}, policy)
    stored = unflatten(  # in the stored precision, so that the hashes can be compared
        {
            path: jax.ShapeDtypeStruct(target.shape, tensors[path]["dtype"], sharding=target.sharding)
            for path, target in flatten(targets).items()
        }
    )
    arguments = ocp.args.PyTreeRestore(
        item=stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored)
    )
    with (
        damage_as_user_error(f"{snapshot}: damaged snapshot, publish it again"),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        params = checkpointer.restore(snapshot / TREE, args=arguments)
    if verify:
        torn = [
            path
            for path, digest in zip(flatten(params), _digests(params), strict=True)
            if digest != tensors[path]["sha256"]
        ]
        if torn:
            raise UserError(
                f"{snapshot}: damaged snapshot, publish it again; {', '.join(torn)} differ from {MANIFEST}"
            )
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _check_shapes(snapshot: Path, found: Mapping[str, tuple[int, ...]], policy: Policy) -> None:
    problems = shape_problems(found, tensor_shapes(policy.abstract_base))
    if problems:
        raise UserError(
            f"{snapshot}: snapshot of another policy; {len(problems)} tensor(s) do not fit:"
            f" {summary(problems)}"
        )


def read_tensors(snapshot: Path) -> dict[str, np.ndarray]:
    """Host arrays of a snapshot by dotted path, in the stored precision, compared with their hashes.

    Of one that holds adapters alone, those of the whole policy.

    Raises:
        UserError: incomplete or damaged; or the base of the adapters is not there.
    """
    snapshot = snapshot.absolute()
    manifest = read_manifest(snapshot)
    tensors = manifest["tensors"]
    arguments = ocp.args.PyTreeRestore(
        restore_args=unflatten({path: ocp.RestoreArgs(restore_type=np.ndarray) for path in tensors})
    )
    with (
        damage_as_user_error(f"{snapshot}: damaged snapshot, publish it again"),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        found = flatten(checkpointer.restore(snapshot / TREE, args=arguments))
    stored = {path: tuple(entry["shape"]) for path, entry in tensors.items()}
    problems = shape_problems({path: array.shape for path, array in found.items()}, stored)
    problems += [
        f"{path} differs from {MANIFEST}"
        for path, digest in zip(found, _digests(found), strict=True)
        if path in tensors and digest != tensors[path]["sha256"]
    ]
    if problems:
        raise UserError(f"{snapshot}: damaged snapshot, publish it again; {summary(problems)}")
    return with_base(found, manifest, snapshot) if "base" in manifest else found


def _digests(params: Mapping[str, Any]) -> Iterator[str]:
    """SHA-256 of every tensor's bytes, row-major, in the order of `flatten`."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        yield from pool.map(_digest, flatten(params).values())


def _digest(leaf: jax.Array | np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data).hexdigest()


def _version(folder: Path) -> int:
    digits = folder.name[1:]
    return int(digits) if digits.isdigit() else -1


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # first: a half-removed folder must not look complete
    shutil.rmtree(folder)
