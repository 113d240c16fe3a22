"""Placement of arrays on the mesh axes data (replicas), fsdp (parameters, rows) and tensor (heads, MLP)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.weights import WEIGHTS

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis of an array -> the mesh axes that split it; None: it is not split.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "activation": None,
    "layers": None,
    # Stacked layers, where each layer is computed independently.
    "stack": MESH_AXES,
    # Slots of a KV cache whose heads cannot be split.
    "slots": MESH_AXES,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "norm": None,
    # The inner width of an adapter.
    "rank": None,
}


# --- The mesh ---


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Make a mesh of devices.

    Args:
        config: sizes of the axes; one may be -1 and takes the remaining devices.
        devices: devices of the mesh; None: all devices of all processes.

    Returns:
        A mesh with the axes MESH_AXES. The devices of a process are adjacent in it.

    Raises:
        UserError: if the product of the sizes is not the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    sizes = tuple(config.sizes_on(len(devices)).values())
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} does not fit"
            f" {len(devices)} device(s); set one axis to -1 to take the rest"
        )
    mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    if jax.process_count() == 1:
        return mesh
    processes = _processes(mesh)
    if processes == sorted(processes):
        return mesh
    # `LocalCopy` needs the devices of a process beside each other.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return _auto_mesh(np.array(ordered).reshape(sizes), MESH_AXES)


def _auto_mesh(devices: np.ndarray, axes: tuple[str, ...]) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def _processes(mesh: Mesh) -> list[int]:
    """Return the process of each device, in the order of the mesh."""
    return [device.process_index for device in mesh.devices.flat]


def local_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the mesh sizes of one process' embedded sampler.

    Args:
        sizes: sizes of the mesh of all processes, by axis.
        devices: number of devices of one process.

    Returns:
        Sizes by axis: `tensor` as in the whole mesh, and the largest `fsdp` that divides both the whole
        mesh's and the process' devices.

    Raises:
        UserError: if `tensor` does not divide the process' devices.
    """
    tensor = sizes["tensor"]
    if devices % tensor:
        raise UserError(
            f"mesh.tensor is {tensor}, but a process has {devices} devices, which it must divide for the"
            " embedded sampler; lower it"
        )
    fsdp = math.gcd(sizes["fsdp"], devices // tensor)
    data = devices // tensor // fsdp
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def axis_size(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...] | None) -> int:
    """Return the number of devices along one axis of the mesh, or along several together.

    Args:
        mesh: the devices.
        names: an axis of the mesh or several of them, such as an entry of RULES; None: no axis.

    Returns:
        The product of the axes' sizes; 1 for None.
    """
    if names is None:
        return 1
    axes = (names,) if isinstance(names, str) else names
    return math.prod(mesh.shape[name] for name in axes)


class LocalCopy:
    """Copies parameters that all processes share onto the devices of each process.

    The frozen parameters are copied once, by the first call: later calls must pass the same ones.

    Attributes:
        mesh: this process' devices, with the sizes of `local_sizes`.

    Args:
        mesh: the devices of all processes.
        dtype: of the copies.
        split: divides parameters into frozen and trained ones (`Policy.split`).

    Raises:
        UserError: as `local_sizes`.
    """

    def __init__(self, mesh: Mesh, dtype: Any, split: Callable[[Any], tuple[Any, Any]]):
        self._split = split
        self._frozen: Any = None
        processes = sorted(set(_processes(mesh)))
        sizes = local_sizes(mesh.shape, mesh.size // len(processes))
        devices = mesh.devices.reshape(len(processes), *sizes.values())
        own_devices = devices[processes.index(jax.process_index())]
        self.mesh = _auto_mesh(own_devices, MESH_AXES)
        all_devices = _auto_mesh(devices, ("process", *MESH_AXES))

        def gather_leaf(leaf: Array, sharding: NamedSharding) -> Array:
            """Return a copy of a parameter in `dtype`, of which every process has all shards."""
            return jax.lax.with_sharding_constraint(jnp.array(leaf, dtype, copy=True), sharding)

        def gather(params: Any) -> Any:
            """Return copies of parameters of which every process has all shards."""
            return jax.tree.map(gather_leaf, params, param_shardings(params, all_devices))

        self._gather = jax.jit(gather)

    def __call__(self, params: Any) -> Any:
        """Copy parameters; all processes call this together.

        Args:
            params: nested parameters on the devices of all processes.

        Returns:
            The same parameters on this process' devices.
        """
        frozen, trained = self._split(params)
        if self._frozen is None:
            self._frozen = self._copy(frozen)
        return merge_params(self._frozen, self._copy(trained))

    def _copy(self, params: Any) -> Any:
        def take_own_shards(leaf: Array, sharding: NamedSharding) -> Array:
            """Return a gathered parameter as an array of this process' devices alone."""
            shards = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

        gathered = self._gather(params)
        return jax.tree.map(take_own_shards, gathered, param_shardings(gathered, self.mesh))


# --- Shardings of arrays ---


def partition_spec(*axes: str | None) -> P:
    """Return the PartitionSpec of an array, given its logical axes.

    Args:
        *axes: a key of RULES for each axis of the array; None: the axis is not split.

    Returns:
        The mesh axes that split each axis.
    """
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Pin an intermediate array to the layout of its logical axes.

    Args:
        x: any array in a jitted function.
        *axes: as in `partition_spec`, for each axis of x; axes without a name at the end are not split.

    Returns:
        The array with a sharding constraint; x itself outside `jax.set_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(*axes))


def pin_rows(x: Array) -> Array:
    """Keep each group's rows whole on its device, so that the weights are gathered instead.

    For use inside a `vmap` over the devices' groups of rows. Otherwise the compiler may split D and sum over
    the devices after every product.

    Args:
        x: hidden states [B, n, D] of one group.

    Returns:
        The states with a sharding constraint; x itself for single tokens (n = 1) and outside `jax.set_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.shape[1] == 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(None, None, None))


def param_shardings(abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of every parameter.

    Args:
        abstract: nested parameters, or their ShapeDtypeStructs.
        mesh: the devices.

    Returns:
        NamedShardings, nested as `abstract`. An axis whose size the mesh does not divide is not split.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        """Return the sharding of one parameter, by its path in WEIGHTS."""
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        partition = partition_spec(*WEIGHTS[name].axes)
        fitted = []
        for size, mesh_axis in zip(leaf.shape, partition, strict=True):
            is_divisible = size % axis_size(mesh, mesh_axis) == 0
            fitted.append(mesh_axis if is_divisible else None)
        return NamedSharding(mesh, P(*fitted))

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def placed_params(abstract: Any, mesh: Mesh | None, dtype: Any = None) -> Any:
    """Return ShapeDtypeStructs with the shardings of parameters.

    Args:
        abstract: nested parameters, or their ShapeDtypeStructs.
        mesh: the devices; None: the first local device.
        dtype: of all results; None: each keeps its own.

    Returns:
        ShapeDtypeStructs, nested as `abstract`.
    """
    if mesh is not None:
        return with_shardings(abstract, param_shardings(abstract, mesh), dtype)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return with_shardings(abstract, jax.tree.map(lambda _: device, abstract), dtype)


def with_shardings(abstract: Any, shardings: Any, dtype: Any = None) -> Any:
    """Return ShapeDtypeStructs with the given shardings.

    Args:
        abstract: a tree of arrays or ShapeDtypeStructs.
        shardings: a tree of the same structure.
        dtype: of all results; None: each keeps its own.

    Returns:
        ShapeDtypeStructs, nested as `abstract`.
    """

    def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        """Return the ShapeDtypeStruct of one leaf."""
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, abstract, shardings)


def cache_axes(num_kv_heads: int, tensor: int) -> tuple[str, str | None]:
    """Return the logical axes of a KV cache's slots and heads.

    Args:
        num_kv_heads: K of the policy.
        tensor: devices along the mesh axis `tensor`.

    Returns:
        Heads are split if `tensor` divides them. Otherwise only the slots are split, over all devices.
    """
    if num_kv_heads % tensor == 0:
        return "batch", "kv_heads"
    return "slots", None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of packed rows.

    Args:
        mesh: the devices.

    Returns:
        The first axis is split over data and fsdp; later axes are not split.
    """
    return NamedSharding(mesh, P(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full.

    Args:
        mesh: the devices.

    Returns:
        A sharding for arrays of any shape.
    """
    return NamedSharding(mesh, P())


# --- The two weights that are as large as the vocabulary: embeddings and output head ---
# The compiler would gather such a weight wherever a product or a look-up reads it. `embedding.look_up`
# exchanges the columns that were looked up, never the table. `logprobs.token_logprobs` gathers the head once.


@dataclass(frozen=True)
class VocabLayout:
    """How the mesh splits a batch's rows, the model width D and the vocabulary V.

    Its methods are called inside `on_devices`, by each device with its own shards.

    Attributes:
        rows: mesh axes that split the rows.
        width: mesh axis that splits D; None: D is not split.
        vocab: mesh axis that splits V; None: V is not split.
    """

    rows: tuple[str, ...] = ()
    width: str | None = None
    vocab: str | None = None

    def on_devices(self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
        """Return `function` applied by each device to its shards.

        Args:
            function: computes shards of the outputs from shards of the inputs.
            inputs: PartitionSpecs of its arguments, from `spec`.
            outputs: PartitionSpecs of its results.

        Returns:
            A function of whole arrays. If nothing is split it is `function` itself.
        """
        if not (self.rows or self.vocab):
            return function
        return jax.shard_map(function, in_specs=inputs, out_specs=outputs, check_vma=False)

    def spec(self, *axes: str | None) -> P:
        """Return the PartitionSpec of an array.

        Args:
            *axes: "rows", "width" or "vocab" for each axis of the array; None: the axis is not split.

        Returns:
            The mesh axes that split each axis.
        """
        mesh_axes = {
            "rows": self.rows or None,
            "width": self.width,
            "vocab": self.vocab,
            None: None,
        }
        return P(*(mesh_axes[axis] for axis in axes))

    def first_token(self, shard_size: int) -> Array | int:
        """Return the first token id of this device's shard of the vocabulary.

        Args:
            shard_size: token ids of each shard.

        Returns:
            int32 []; the number 0 if V is not split.
        """
        if self.vocab is None:
            return 0
        return jax.lax.axis_index(self.vocab) * shard_size

    def sum_over_vocab(self, x: Array) -> Array:
        """Sum over the devices that share a row's vocabulary.

        Args:
            x: this device's summand, of any shape.

        Returns:
            The sum, of the shape of x; x itself if V is not split.
        """
        if self.vocab is None:
            return x
        return jax.lax.psum(x, self.vocab)

    def gather_width(self, x: Array, axis: int) -> Array:
        """Join the arrays of the devices that share the width D.

        Args:
            x: this device's array.
            axis: axis of x along which the arrays are joined: that of D, or that of the rows.

        Returns:
            The joined array; x itself if D is not split.
        """
        if self.width is None:
            return x
        return jax.lax.all_gather(x, self.width, axis=axis, tiled=True)

    def scatter_width(self, gradient: Array, axis: int) -> Array:
        """Sum all devices' gradients of the whole width D, and return this device's shard of the sum.

        Args:
            gradient: this device's summand, with the whole width.
            axis: axis of the gradient that is the width.

        Returns:
            The sum, with this device's shard of the width.
        """
        if self.width is not None:
            gradient = jax.lax.psum_scatter(gradient, self.width, scatter_dimension=axis, tiled=True)
        return self.sum_over_replicas(gradient)

    def sum_over_replicas(self, gradient: Array) -> Array:
        """Sum over the mesh axes that split the rows but not the width D.

        Args:
            gradient: this device's summand, of any shape.

        Returns:
            The sum, of the same shape; the gradient itself if there is no such axis.
        """
        axes = tuple(name for name in self.rows if name != self.width)
        if not axes:
            return gradient
        return jax.lax.psum(gradient, axes)


def vocab_layout(num_rows: int, width: int, vocab: int) -> VocabLayout:
    """Return the layout of rows, width and vocabulary on the current mesh, by RULES.

    Args:
        num_rows: rows of the batch. If the mesh does not divide them, nothing is split.
        width: D. It is split only if the mesh divides it.
        vocab: V. It is split only if the mesh divides it.

    Returns:
        The layout. Outside `jax.set_mesh` nothing is split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or num_rows % axis_size(mesh, RULES["batch"]):
        return VocabLayout()

    def axis_if_divisible(size: int, name: str) -> str | None:
        """Return the mesh axis `name` if it has several devices that divide `size`, else None."""
        devices = mesh.shape[name]
        return name if devices > 1 and size % devices == 0 else None

    rows = tuple(name for name in ("data", "fsdp") if mesh.shape[name] > 1)
    return VocabLayout(rows, axis_if_divisible(width, "fsdp"), axis_if_divisible(vocab, "tensor"))
