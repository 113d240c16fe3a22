"""Versioned policy snapshots: how samplers get their weights.

One folder per version: an Orbax tree under ``params`` and a manifest that is written last. A folder
without a manifest is not a snapshot. Of several processes that hold the parameters together, one writes.

The tree is written so that a worker has next to nothing to do: matrices lie as in HuggingFace's files, and
every tensor is one file that holds its bytes and nothing else (the only chunk of an uncompressed Zarr array).
Readers map these files into memory. So no copy is made before the one into the model, all workers of a
machine share the system's cache of them, and a tensor-parallel worker touches its part alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import check_literal, read_json, wrap_disk_errors, write_json
from calibadv_jax.policy.adapters import merge_params, merged
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import placed_params, replicated
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.policy.weights import WEIGHTS, flatten, shape_problems, summary, unflatten
from calibadv_jax.snapshots.checkpoint import tensor_shapes
from calibadv_jax.snapshots.huggingface import read_base_tensors
from calibadv_jax.snapshots.weight_files import weights_hash

MANIFEST, TREE = "manifest.json", "params"
FORMAT = 2
HASHED_AT_ONCE = min(16, os.cpu_count() or 1)  # tensors; SHA-256 and reading run outside Python's lock


class SnapshotStore:
    """Publishes snapshots in precision `dtype` under one folder, and keeps the newest `keep` versions."""

    def __init__(self, folder: Path, keep: int, dtype: Any):
        check_literal(folder)
        self.folder, self.keep, self.dtype = folder.absolute(), keep, jnp.dtype(dtype).name
        self._checkpointer = _raw_checkpointer()

    def publish(
        self,
        version: int,
        params: Params,
        *,
        hf_config: Mapping[str, Any],
        tokenizer_hash: str,
        base: Mapping[str, Any] | None = None,
        writes: bool = True,
    ) -> Path:
        """Write a complete version and return its folder; this version and later ones give way.

        All processes whose devices hold the parameters call this together; one of them `writes`. Adapters
        alone stay in their precision and have a `base`; see `_with_base`.
        """
        folder = self.folder / f"v{version:06d}"
        arrays = _on_host(params, None if base else self.dtype, writes)
        if not writes:
            return folder
        for stale in self.folder.glob("v*"):
            if snapshot_version(stale) >= version:
                _remove(stale)
        with wrap_disk_errors(folder), ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            folder.mkdir(parents=True)
            digests = pool.map(_digest, arrays.values())  # they are hashed while they are written
            self._checkpointer.save(folder / TREE, unflatten(arrays))
            tensors = {
                path: {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
                for (path, array), digest in zip(arrays.items(), digests, strict=True)
            }
        manifest = {
            "format": FORMAT,
            "version": version,
            "tokenizer": tokenizer_hash,
            "config": dict(hf_config),
            "tensors": tensors,
        } | ({"base": dict(base) | {"dtype": self.dtype}} if base else {})
        write_json(folder / MANIFEST, manifest)
        complete = sorted((path.parent for path in self.folder.glob(f"v*/{MANIFEST}")), key=snapshot_version)
        for old in complete[: -self.keep]:
            _remove(old)
        return folder


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """Return the manifest; UserError if the snapshot is incomplete, or of another format."""
    path, way_out = snapshot / MANIFEST, "publish the snapshot again"
    if not path.is_file():
        raise UserError(f"{snapshot}: not a complete snapshot (no {MANIFEST}); {way_out}")
    manifest = read_json(path, way_out)
    if (version := manifest.get("format")) != FORMAT:
        raise UserError(f"{path}: format is {version!r}, not {FORMAT}; {way_out}")
    return manifest


def load_snapshot(snapshot: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Return the parameters in the policy's shardings and `compute_dtype`; raises as `read_tensors`."""
    tensors = read_tensors(snapshot, policy=policy)
    targets, dtype = flatten(placed_params(policy.abstract_base, mesh)), policy.numerics.compute_dtype

    def placed(path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        # Copied: JAX may otherwise compute with the file's own bytes.
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda region: np.array(tensors[path][region], dtype, order="C")
        )

    return unflatten({path: placed(path, target) for path, target in targets.items()})


def read_tensors(
    snapshot: Path, share: slice = slice(None), policy: Policy | None = None
) -> dict[str, np.ndarray]:
    """Return a snapshot's host arrays by dotted path, in the stored precision, as views of its files.

    With adapters alone, those of the whole policy. A `share` of the tensors, largest first, is compared with
    their hashes; other workers of this machine compare the rest. Raises UserError if it is incomplete,
    damaged, or not of the `policy`; or the base of the adapters is not there.
    """
    manifest = read_manifest(snapshot)
    entries: dict[str, Any] = manifest["tensors"]
    tensors: dict[str, np.ndarray] = {}
    problems = []
    for path, entry in entries.items():
        file, dtype, shape = _file(snapshot, path, entries), jnp.dtype(entry["dtype"]), tuple(entry["shape"])
        expected = math.prod(shape) * dtype.itemsize
        if path not in WEIGHTS:
            problems.append(f"{path} is no parameter of a policy")
        elif not file.is_file():
            problems.append(f"{path} is missing")
        elif (size := file.stat().st_size) != expected:
            problems.append(f"{path} has {size} bytes instead of {expected}")
        else:  # "c": writable, as torch wants it; what is written never reaches the file
            tensors[path] = _turned(path, np.memmap(file, dtype, "c", shape=shape))
    _raise_damage(snapshot, problems)
    if policy and "base" not in manifest:  # before all tensors are hashed
        _check_shapes(snapshot, tensors, policy)
    large_first = sorted(entries, key=lambda path: -math.prod(entries[path]["shape"]))
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        differences = pool.map(partial(_difference, snapshot, entries), large_first[share])
        _raise_damage(snapshot, [line for line in differences if line])
    if "base" in manifest:
        tensors = _with_base(tensors, manifest, snapshot)
        if policy:
            _check_shapes(snapshot, tensors, policy)
    return tensors


def _difference(snapshot: Path, entries: Mapping[str, Any], path: str) -> str | None:
    """Return how the file of a tensor differs from its hash.

    It is read, not accessed through the mapping: there a failed disk or network would end the process. The
    mapping then finds it in the system's cache.
    """
    try:
        with _file(snapshot, path, entries).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if digest == entries[path]["sha256"] else f"{path} differs from {MANIFEST}"


def _file(snapshot: Path, path: str, entries: Mapping[str, Any]) -> Path:
    return snapshot / TREE / path / ".".join("0" * len(entries[path]["shape"]))


def _raise_damage(snapshot: Path, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{snapshot}: damaged snapshot, publish it again; {summary(problems)}")


def _check_shapes(snapshot: Path, tensors: Mapping[str, Any], policy: Policy) -> None:
    if problems := shape_problems(tensor_shapes(tensors), tensor_shapes(policy.abstract_base)):
        fault = f"{snapshot}: snapshot of another policy; {len(problems)} tensor(s) do not fit"
        raise UserError(f"{fault}: {summary(problems)}")


def _with_base(adapters: Mapping[str, np.ndarray], manifest: Mapping[str, Any], snapshot: Path) -> Any:
    """Return all parameters on the host by dotted path: base + float32 adapters, as in a merged snapshot.

    The "base" of the `manifest` holds its folder, hash and precision, and scale and precision of the sum.
    """
    base, folder = manifest["base"], Path(manifest["base"]["folder"])
    way_out = "mount it there for the worker too, or set policy.lora.snapshots=merged"
    if not folder.is_dir():
        raise UserError(f"{snapshot}: the base of its adapters, {folder}, is not there; {way_out}")
    if weights_hash(folder) != base["sha256"]:
        raise UserError(f"{snapshot}: {folder} is another model than the base of its adapters; {way_out}")
    policy = Policy(architecture_from_hf(manifest["config"], f"{snapshot}: config"), Numerics())
    frozen = read_base_tensors(folder, policy, jnp.dtype(base["base_dtype"]))
    whole = merged(merge_params(frozen, unflatten(adapters)), base["scale"], jnp.dtype(base["dtype"]))
    return {path: np.asarray(leaf) for path, leaf in flatten(whole).items()}


def _raw_checkpointer() -> ocp.Checkpointer:
    """Return a checkpointer that writes every array as one uncompressed file, without a copy in memory."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax warns where it is missing
    )
    logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())
    process = jax.process_index()  # of several processes, one writes: Orbax must not wait for the others
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry, multiprocessing_options=alone
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _turned(path: str, array: Any) -> Any:
    return array.swapaxes(-1, -2) if WEIGHTS[path].transposed else array


@partial(jax.jit, static_argnames=("dtype", "sharding"))
def _laid_out(
    flat: dict[str, jax.Array], dtype: str | None, sharding: NamedSharding | None = None
) -> dict[str, jax.Array]:
    """Return parameters in the layout, the dtype (None: unchanged) and the sharding of a snapshot."""
    leaves = {path: _turned(path, leaf.astype(dtype or leaf.dtype)) for path, leaf in flat.items()}
    return leaves if sharding is None else jax.lax.with_sharding_constraint(leaves, sharding)


def _on_host(params: Params, dtype: str | None, writes: bool) -> dict[str, np.ndarray]:
    """Return host arrays of `_laid_out`; nothing if this process does not write."""
    flat = flatten(params)
    if all(leaf.is_fully_addressable for leaf in flat.values()):
        leaves = _laid_out(flat, dtype)
        for leaf in leaves.values():
            leaf.copy_to_host_async()  # all of them, before the first is waited for
        return {path: np.asarray(leaf) for path, leaf in leaves.items()}
    arrays = {}
    for path, leaf in flat.items():  # one by one: a device holds one tensor whole, and not the policy
        whole = _laid_out({path: leaf}, dtype, replicated(leaf.sharding.mesh))
        if writes:
            arrays[path] = np.asarray(whole[path])
    return arrays


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def snapshot_version(folder: Path) -> int:
    """Return the version of a snapshot by its folder's name, such as v000012; -1 for another name."""
    digits = folder.name[1:]
    return int(digits) if digits.isdigit() else -1


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # first: a half-removed folder must not look complete
    shutil.rmtree(folder)
