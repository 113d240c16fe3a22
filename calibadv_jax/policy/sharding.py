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

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "activation": None,
    "layers": None,
    "stack": MESH_AXES,  # layers too, where each is worked on by itself
    "slots": MESH_AXES,  # of a KV cache whose heads cannot be split
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "norm": None,
    "rank": None,  # of an adapter
}


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Make a mesh of all devices; one axis may be -1 and takes the rest. UserError if sizes do not fit."""
    devices = jax.devices() if devices is None else devices
    sizes = tuple(config.sizes_on(len(devices)).values())
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} does not fit"
            f" {len(devices)} device(s); set one axis to -1 to take the rest"
        )
    mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    if jax.process_count() > 1 and _processes(mesh) != sorted(_processes(mesh)):
        # `LocalCopy` needs the devices of a process beside each other.
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        mesh = _auto_mesh(np.array(ordered).reshape(sizes), MESH_AXES)
    return mesh


def _auto_mesh(devices: np.ndarray, axes: tuple[str, ...]) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def _processes(mesh: Mesh) -> list[int]:
    return [device.process_index for device in mesh.devices.flat]


def local_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the mesh sizes of a process' embedded sampler: `tensor` of the whole mesh, `fsdp` up to its."""
    if devices % (tensor := sizes["tensor"]):
        raise UserError(
            f"mesh.tensor is {tensor}, but a process has {devices} devices, which it must divide for the"
            " embedded sampler; lower it"
        )
    fsdp = math.gcd(sizes["fsdp"], devices // tensor)
    return {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


class LocalCopy:
    """Copies parameters of several processes' devices onto the devices of each process, in `dtype`.

    `mesh` is that of all processes' devices, the attribute that of this process' devices by `local_sizes`.
    What `split` (`Policy.split`) calls frozen is copied once: it must be the same in every call.
    """

    def __init__(self, mesh: Mesh, dtype: Any, split: Callable[[Any], tuple[Any, Any]]):
        self._split = split
        self._frozen: Any = None
        processes = sorted(set(_processes(mesh)))
        sizes = local_sizes(mesh.shape, mesh.size // len(processes))
        devices = mesh.devices.reshape(len(processes), *sizes.values())
        self.mesh = _auto_mesh(devices[processes.index(jax.process_index())], MESH_AXES)
        whole_mesh = _auto_mesh(devices, ("process", *MESH_AXES))

        def copy(leaf: Array, sharding: NamedSharding) -> Array:
            return jax.lax.with_sharding_constraint(jnp.array(leaf, dtype, copy=True), sharding)

        self._gather = jax.jit(lambda params: jax.tree.map(copy, params, param_shardings(params, whole_mesh)))

    def __call__(self, params: Any) -> Any:
        """Copy parameters; all processes call this together."""
        frozen, trained = self._split(params)
        if self._frozen is None:
            self._frozen = self._copied(frozen)
        return merge_params(self._frozen, self._copied(trained))

    def _copied(self, params: Any) -> Any:
        def local(leaf: Array, sharding: NamedSharding) -> Array:
            shards = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

        gathered = self._gather(params)
        return jax.tree.map(local, gathered, param_shardings(gathered, self.mesh))


def spec(*axes: str | None) -> P:
    """Return the PartitionSpec of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Pin an intermediate array to the table's layout; no effect outside `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, spec(*axes))


def pin_rows(x: Array) -> Array:
    """Pin [B, n, D] with n > 1 inside a `vmap` over the devices' groups of rows: weights are gathered.

    Else the compiler may split D and sum over the devices after every product.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or x.shape[1] == 1 else jax.lax.with_sharding_constraint(x, P(None, None, None))


def param_shardings(abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the NamedSharding of every parameter; axes that the mesh does not divide are not split."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes = WEIGHTS[jax.tree_util.keystr(path, simple=True, separator=".")].axes
        sizes = zip(leaf.shape, spec(*axes), strict=True)
        fitted = [name if size % axis_size(mesh, name) == 0 else None for size, name in sizes]
        return NamedSharding(mesh, P(*fitted))

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def placed_params(abstract: Any, mesh: Mesh | None, dtype: Any = None) -> Any:
    """Return ShapeDtypeStructs on the mesh, or on the first device, in `dtype` or each in its own."""
    if mesh is not None:
        return with_shardings(abstract, param_shardings(abstract, mesh), dtype)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return with_shardings(abstract, jax.tree.map(lambda _: device, abstract), dtype)


def with_shardings(abstract: Any, shardings: Any, dtype: Any = None) -> Any:
    def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, abstract, shardings)


def cache_axes(num_kv_heads: int, tensor: int) -> tuple[str, str | None]:
    """Return the logical axes of a KV cache's slots and heads; heads that cannot be split lie whole."""
    return ("batch", "kv_heads") if num_kv_heads % tensor == 0 else ("slots", None)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Place rows over data and fsdp."""
    return NamedSharding(mesh, P(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def axis_size(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...] | None) -> int:
    """Return the number of devices along an axis of the mesh, or along several; 1 along none."""
    axes = (names,) if isinstance(names, str) else names or ()
    return math.prod(mesh.shape[name] for name in axes)


# --- The two weights that are as large as the vocabulary ---
# The compiler would gather such a weight wherever a product or a look-up reads it. `transformer.look_up`
# exchanges looked up columns, never the table, and `logprobs.token_logprobs` gathers the head once.


@dataclass(frozen=True)
class VocabLayout:
    """Mesh axes that split a batch's rows, the width D and the vocabulary V; devices call its methods."""

    rows: tuple[str, ...] = ()
    width: str | None = None
    vocab: str | None = None

    def on_devices(self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
        """Apply `function` to each device's parts, or to the whole arrays if nothing is split."""
        if not (self.rows or self.vocab):
            return function
        return jax.shard_map(function, in_specs=inputs, out_specs=outputs, check_vma=False)

    def spec(self, *axes: str | None) -> P:
        """Return the specification of an array whose axes are "rows", "width", "vocab" or None."""
        names = {"rows": self.rows or None, "width": self.width, "vocab": self.vocab, None: None}
        return P(*(names[axis] for axis in axes))

    def first(self, size: int) -> Array | int:
        """Return the first of the `size` entries of the vocabulary that this device holds."""
        return 0 if self.vocab is None else jax.lax.axis_index(self.vocab) * size

    def over_vocab(self, x: Array) -> Array:
        return x if self.vocab is None else jax.lax.psum(x, self.vocab)

    def gathered(self, x: Array, axis: int) -> Array:
        """Gather the whole width of an array, which is its `axis`."""
        return x if self.width is None else jax.lax.all_gather(x, self.width, axis=axis, tiled=True)

    def scattered(self, gradient: Array, axis: int) -> Array:
        """Sum all devices' gradients of the whole width, and return this device's part."""
        if self.width is not None:
            gradient = jax.lax.psum_scatter(gradient, self.width, scatter_dimension=axis, tiled=True)
        return self.over_replicas(gradient)

    def over_replicas(self, gradient: Array) -> Array:
        """Sum over the rows' axes that do not split the width."""
        axes = tuple(name for name in self.rows if name != self.width)
        return jax.lax.psum(gradient, axes) if axes else gradient


def vocab_layout(num_rows: int, width: int, vocab: int) -> VocabLayout:
    """Return the layout by the table of `sharding` on the current mesh; undivided if rows do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or num_rows % axis_size(mesh, RULES["batch"]):
        return VocabLayout()

    def fitted(size: int, name: str) -> str | None:
        return name if mesh.shape[name] > 1 and size % mesh.shape[name] == 0 else None

    rows = tuple(name for name in ("data", "fsdp") if mesh.shape[name] > 1)
    return VocabLayout(rows, fitted(width, "fsdp"), fitted(vocab, "tensor"))
