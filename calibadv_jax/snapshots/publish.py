"""Versioned policy snapshots: how samplers get their weights.

One folder per version: an Orbax tree under ``params`` and a manifest that is written last. A folder
without a manifest is not a snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from calibadv_jax.errors import UserError
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import flatten, unflatten

MANIFEST = "manifest.json"
FORMAT = 1


class SnapshotStore:
    """Publishes snapshots under one folder and prunes old ones.

    Args:
        keep: newest versions that stay.
        dtype: precision of the published parameters.
    """

    def __init__(self, folder: Path, keep: int, dtype: Any):
        self.folder, self.keep, self.dtype = folder.absolute(), keep, dtype
        self._cast = jax.jit(lambda params: jax.tree.map(lambda p: p.astype(dtype), params))
        self._checkpointer = ocp.PyTreeCheckpointer()

    def publish(
        self,
        version: int,
        params: Params,
        *,
        step: int,
        hf_config: Mapping[str, Any],
        tokenizer_hash: str,
    ) -> Path:
        """Writes a version and returns its folder. An older attempt at the same version is replaced."""
        folder = self.folder / f"v{version:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        cast = self._cast(params)
        self._checkpointer.save(folder / "params", cast)
        manifest = {
            "format": FORMAT,
            "version": version,
            "step": step,
            "tokenizer": tokenizer_hash,
            "config": dict(hf_config),
            "tensors": {
                path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "sha256": _digest(leaf)}
                for path, leaf in flatten(cast).items()
            },
        }
        unfinished = folder / (MANIFEST + ".unfinished")
        unfinished.write_text(json.dumps(manifest), encoding="utf-8")
        os.replace(unfinished, folder / MANIFEST)
        self._prune()
        return folder

    def latest(self) -> Path | None:
        """The newest complete snapshot."""
        complete = self._complete()
        return complete[-1] if complete else None

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"v*/{MANIFEST}"))

    def _prune(self) -> None:
        for old in self._complete()[: -self.keep]:
            (old / MANIFEST).unlink()  # first: a half-removed folder must not look complete
            shutil.rmtree(old)


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """The manifest of a snapshot.

    Raises:
        UserError: the snapshot is incomplete, or of another format.
    """
    path = snapshot / MANIFEST
    if not path.is_file():
        raise UserError(f"{snapshot}: incomplete snapshot (no {MANIFEST}); publish it again or use another one")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: format {manifest.get('format')!r} instead of {FORMAT}")
    return manifest


def load_snapshot(snapshot: Path, policy: Policy, mesh: Mesh, verify: bool = False) -> Params:
    """Parameters of a snapshot in the policy's shardings and parameter precision.

    Args:
        verify: compare every tensor with its hash in the manifest.

    Raises:
        UserError: incomplete, torn, or of another policy; all differences are listed.
    """
    snapshot = snapshot.absolute()
    tensors = read_manifest(snapshot)["tensors"]
    abstract = flatten(policy.abstract_params)
    problems = [f"missing {path}" for path in abstract if path not in tensors]
    problems += [f"unexpected {path}" for path in tensors if path not in abstract]
    problems += [
        f"{path} has shape {tensors[path]['shape']} instead of {list(leaf.shape)}"
        for path, leaf in abstract.items()
        if path in tensors and tensors[path]["shape"] != list(leaf.shape)
    ]
    if problems:
        raise UserError(f"{snapshot}: not a snapshot of this policy: {'; '.join(problems)}")
    shardings = param_shardings(policy.abstract_params, mesh)
    arguments = jax.tree.map(
        lambda leaf, at: ocp.ArrayRestoreArgs(sharding=at, dtype=None), policy.abstract_params, shardings
    )
    try:
        params = ocp.PyTreeCheckpointer().restore(snapshot / "params", restore_args=arguments)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{snapshot}: torn snapshot: {' '.join(str(error).split())[:300]}") from error
    if verify:
        torn = [path for path, leaf in flatten(params).items() if _digest(leaf) != tensors[path]["sha256"]]
        if torn:
            raise UserError(f"{snapshot}: torn snapshot: content differs from {MANIFEST} in {', '.join(torn)}")
    dtypes = {path: leaf.dtype for path, leaf in abstract.items()}
    return unflatten({path: leaf.astype(dtypes[path]) for path, leaf in flatten(params).items()})


def _digest(leaf: jax.Array) -> str:
    """SHA-256 of an array's bytes; needs the whole array on one host."""
    return hashlib.sha256(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data).hexdigest()
