"""Versioned policy snapshots: how samplers get their weights.

The way of a new policy to a vLLM worker: `run/state.py` (`RunState.publish`) after each step, this module
(writes the snapshot), `sampler/vllm_sampler.py` (pauses the worker and names the folder),
`snapshots/vllm_engine.py` (inside the worker: checks hashes, names, shapes, tokenizer and version before it
touches the model, then loads), and back in `RunState.publish` a probe that compares log-probabilities.

One folder per version: an Orbax tree under ``params`` and a manifest that is written last. A folder
without a manifest is not a snapshot. Of several processes that hold the parameters together, one writes.

The tree is written so that a worker has next to nothing to do: matrices are stored as in HuggingFace's files,
and every tensor is one file that holds its bytes and nothing else (the only chunk of an uncompressed Zarr
array). Readers map these files into memory. So no copy is made before the one into the model, all workers of
a machine share the system's cache of them, and a tensor-parallel worker touches its part alone.
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
from calibadv_jax.policy.adapters import fold_adapters, merge_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import placed_params, replicated
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.policy.weights import WEIGHTS, flatten, shape_problems, summarise_problems, unflatten
from calibadv_jax.snapshots.checkpoint import tensor_shapes
from calibadv_jax.snapshots.huggingface import read_base_tensors
from calibadv_jax.snapshots.weight_files import weights_hash

MANIFEST = "manifest.json"
TREE = "params"
FORMAT = 2  # number of this format; other ones are refused
REPUBLISH = "publish the snapshot again"
# Number of tensors that are hashed at once; SHA-256 and reading run outside Python's lock.
HASHED_AT_ONCE = min(16, os.cpu_count() or 1)


class SnapshotStore:
    """Publishes snapshots under one folder, and keeps the newest versions.

    Attributes:
        folder: the absolute path of the folder.
        keep: number of newest versions that stay.
        dtype: name of the precision of published parameters.
    """

    def __init__(self, folder: Path, keep: int, dtype: Any):
        """Prepare to publish; the folder is made with the first snapshot.

        Args:
            folder: its path.
            keep: number of newest versions that stay.
            dtype: precision of published parameters.

        Raises:
            ValueError: the path has characters that Orbax takes for a pattern.
        """
        check_literal(folder)
        self.folder = folder.absolute()
        self.keep = keep
        self.dtype = jnp.dtype(dtype).name
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
        """Write a complete version; this version and later ones that exist are removed before.

        All processes whose devices hold the parameters call this together; one of them writes.

        Args:
            version: of the policy.
            params: all parameters, or the adapters alone, which stay in their precision.
            hf_config: fields of config.json.
            tokenizer_hash: hash of the vocabulary.
            base: of adapters alone, what `read_tensors` needs to merge them: the `folder` of the base, the
                `sha256` of its weights, its precision `base_dtype`, and the `scale` of the adapters. None:
                `params` are all parameters.
            writes: whether this process is the one that writes.

        Returns:
            The version's folder.

        Raises:
            OSError: the disk cannot be written.
        """
        folder = self.folder / f"v{version:06d}"
        dtype = None if base else self.dtype
        arrays = _on_host(params, dtype, writes)
        if not writes:
            return folder
        for stale in self.folder.glob("v*"):
            if snapshot_version(stale) >= version:
                _remove(stale)
        with wrap_disk_errors(folder), ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            folder.mkdir(parents=True)
            digests = pool.map(_digest, arrays.values())  # they are hashed while they are written
            self._checkpointer.save(folder / TREE, unflatten(arrays))
            tensors = {}
            for (path, array), digest in zip(arrays.items(), digests, strict=True):
                tensors[path] = {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": version,
            "tokenizer": tokenizer_hash,
            "config": dict(hf_config),
            "tensors": tensors,
        }
        if base:
            manifest["base"] = dict(base) | {"dtype": self.dtype}
        write_json(folder / MANIFEST, manifest)
        self._remove_old()
        return folder

    def _remove_old(self) -> None:
        """Remove all complete versions but the newest `keep`."""
        complete = [path.parent for path in self.folder.glob(f"v*/{MANIFEST}")]
        complete.sort(key=snapshot_version)
        for old in complete[: -self.keep]:
            _remove(old)


def snapshot_version(folder: Path) -> int:
    """Return the version of a snapshot by its folder's name, such as v000012; -1 for another name."""
    digits = folder.name[1:]
    return int(digits) if digits.isdigit() else -1


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # first: a half-removed folder must not look complete
    shutil.rmtree(folder)


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """Return the manifest of a snapshot.

    Args:
        snapshot: its folder.

    Raises:
        UserError: the snapshot is incomplete, or of another format.
    """
    path = snapshot / MANIFEST
    if not path.is_file():
        raise UserError(f"{snapshot}: not a complete snapshot (no {MANIFEST}); {REPUBLISH}")
    manifest = read_json(path, REPUBLISH)
    version = manifest.get("format")
    if version != FORMAT:
        raise UserError(f"{path}: format is {version!r}, not {FORMAT}; {REPUBLISH}")
    return manifest


def load_snapshot(snapshot: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Read a snapshot onto the devices.

    Args:
        snapshot: its folder.
        policy: the policy that it holds.
        mesh: the devices; None: the default device.

    Returns:
        All parameters in the policy's `compute_dtype` and shardings, adapters merged.

    Raises:
        UserError: as `read_tensors`.
    """
    tensors = read_tensors(snapshot, policy=policy)
    dtype = policy.numerics.compute_dtype

    def placed(path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        def read_region(region: Any) -> np.ndarray:
            # Copied: JAX may otherwise compute with the file's own bytes.
            return np.array(tensors[path][region], dtype, order="C")

        return jax.make_array_from_callback(target.shape, target.sharding, read_region)

    targets = flatten(placed_params(policy.abstract_base, mesh))
    return unflatten({path: placed(path, target) for path, target in targets.items()})


def read_tensors(
    snapshot: Path, share: slice = slice(None), policy: Policy | None = None
) -> dict[str, np.ndarray]:
    """Read a snapshot as host arrays.

    Args:
        snapshot: its folder.
        share: which of the tensors, ordered from the largest, are compared with their hashes here. The
            tensor-parallel workers of a machine compare a share each.
        policy: the policy that it must hold; None: any.

    Returns:
        All parameters by dotted path, in the stored precision, as views of the snapshot's files. Of a
        snapshot of adapters alone, the parameters of the base with the adapters merged.

    Raises:
        UserError: the snapshot is incomplete, damaged, or of another policy; or the base of its adapters is
            missing or another model.
    """
    manifest = read_manifest(snapshot)
    entries: dict[str, Any] = manifest["tensors"]
    has_base = "base" in manifest
    tensors = _map_tensors(snapshot, entries)
    if policy and not has_base:  # before all tensors are hashed
        _check_shapes(snapshot, tensors, policy)
    large_first = sorted(entries, key=lambda path: -math.prod(entries[path]["shape"]))
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        differences = pool.map(partial(_difference, snapshot, entries), large_first[share])
        _raise_damage(snapshot, [difference for difference in differences if difference])
    if has_base:
        tensors = _with_base(tensors, manifest, snapshot)
        if policy:
            _check_shapes(snapshot, tensors, policy)
    return tensors


def _map_tensors(snapshot: Path, entries: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Map the files of all tensors into memory; raise UserError if one is missing or has another size."""
    tensors: dict[str, np.ndarray] = {}
    problems = []
    for path, entry in entries.items():
        file = _file(snapshot, path, entries)
        dtype = jnp.dtype(entry["dtype"])
        shape = tuple(entry["shape"])
        expected_size = math.prod(shape) * dtype.itemsize
        if path not in WEIGHTS:
            problems.append(f"{path} is no parameter of a policy")
            continue
        if not file.is_file():
            problems.append(f"{path} is missing")
            continue
        size = file.stat().st_size
        if size != expected_size:
            problems.append(f"{path} has {size} bytes instead of {expected_size}")
            continue
        # Mode "c": the array is writable, as torch wants it, but what is written never reaches the file.
        array = np.memmap(file, dtype, "c", shape=shape)
        tensors[path] = _swap_layout(path, array)
    _raise_damage(snapshot, problems)
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
    if digest != entries[path]["sha256"]:
        return f"{path} differs from {MANIFEST}"
    return None


def _file(snapshot: Path, path: str, entries: Mapping[str, Any]) -> Path:
    """Return the file of a tensor, the only chunk of its Zarr array: 0.0 for a matrix."""
    num_axes = len(entries[path]["shape"])
    return snapshot / TREE / path / ".".join("0" * num_axes)


def _raise_damage(snapshot: Path, problems: list[str]) -> None:
    if problems:
        raise UserError(f"{snapshot}: damaged snapshot, publish it again; {summarise_problems(problems)}")


def _check_shapes(snapshot: Path, tensors: Mapping[str, Any], policy: Policy) -> None:
    problems = shape_problems(tensor_shapes(tensors), tensor_shapes(policy.abstract_base))
    if problems:
        raise UserError(
            f"{snapshot}: snapshot of another policy; {len(problems)} tensor(s) do not fit:"
            f" {summarise_problems(problems)}"
        )


def _with_base(adapters: Mapping[str, np.ndarray], manifest: Mapping[str, Any], snapshot: Path) -> Any:
    """Return all parameters on the host by dotted path: base + float32 adapters, as in a merged snapshot.

    The "base" of the `manifest` holds its folder, hash and precision, and scale and precision of the sum.
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
    params = merge_params(frozen, unflatten(adapters))
    merged_params = fold_adapters(params, base["scale"], jnp.dtype(base["dtype"]))
    return {path: np.asarray(leaf) for path, leaf in flatten(merged_params).items()}


def _raw_checkpointer() -> ocp.Checkpointer:
    """Return a checkpointer that writes every array as one uncompressed file, without a copy in memory."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax warns where it is missing
    )
    logging.getLogger("absl").addFilter(_is_relevant)
    # Of several processes one writes: Orbax must not wait for the others.
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry, multiprocessing_options=alone
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for Orbax' message that files of this layout are not merged, as is intended."""
    return "Skipping merge of OCDBT" not in record.getMessage()


def _swap_layout(path: str, array: Any) -> Any:
    """Turn a parameter from our layout into HuggingFace's, or back."""
    return array.swapaxes(-1, -2) if WEIGHTS[path].transposed else array


@partial(jax.jit, static_argnames=("dtype", "sharding"))
def _laid_out(
    flat: dict[str, jax.Array], dtype: str | None, sharding: NamedSharding | None = None
) -> dict[str, jax.Array]:
    """Return parameters in the layout, the dtype (None: unchanged) and the sharding of a snapshot."""
    leaves = {path: _swap_layout(path, leaf.astype(dtype or leaf.dtype)) for path, leaf in flat.items()}
    if sharding is None:
        return leaves
    return jax.lax.with_sharding_constraint(leaves, sharding)


def _on_host(params: Params, dtype: str | None, writes: bool) -> dict[str, np.ndarray]:
    """Return host arrays of `_laid_out`; empty if this process shares the parameters and does not write."""
    flat = flatten(params)
    if all(leaf.is_fully_addressable for leaf in flat.values()):
        leaves = _laid_out(flat, dtype)
        for leaf in leaves.values():
            leaf.copy_to_host_async()  # all of them, before the first is waited for
        return {path: np.asarray(leaf) for path, leaf in leaves.items()}
    arrays = {}
    # One by one: a device holds one unsharded tensor at a time, and not the policy.
    for path, leaf in flat.items():
        unsharded = _laid_out({path: leaf}, dtype, replicated(leaf.sharding.mesh))
        if writes:
            arrays[path] = np.asarray(unsharded[path])
    return arrays


def _digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in row-major order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()
