"""Where every array is placed: one table from logical axis to mesh axis.

Mesh axes: `data` (replicas), `fsdp` (parameters and batch split), `tensor` (heads, MLP, vocabulary).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
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
    """A mesh of all devices; one axis may be -1 and takes what the others leave.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    if sizes.count(-1) == 1:
        rest = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = len(devices) // max(rest, 1)
    if any(size < 1 for size in sizes) or int(np.prod(sizes)) != len(devices):
        raise UserError(
            f"mesh: data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} does not fit"
            f" {len(devices)} device(s); set one axis to -1 to take the rest"
        )
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def spec(*axes: str | None) -> P:
    """PartitionSpec of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an intermediate array to the table's layout; no effect outside `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, spec(*axes))


def pin_rows(x: jax.Array) -> jax.Array:
    """Pins [B, n, D] with n > 1 inside a `vmap` over the groups of rows that the devices hold.

    The weights are then gathered. Without it the compiler may split D and sum it over the devices after
    every product, which costs less for one token and far more for many. No effect outside `jax.set_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or x.shape[1] == 1 else jax.lax.with_sharding_constraint(x, P(None, None, None))


def param_shardings(abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """NamedSharding for every parameter of a nested dict, by its path.

    An axis whose size a mesh axis does not divide is not split: that is slower, never wrong.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes = WEIGHTS[".".join(str(key.key) for key in path)].axes
        sizes = zip(leaf.shape, spec(*axes), strict=True)
        fitted = [name if size % axis_size(mesh, name) == 0 else None for size, name in sizes]
        return NamedSharding(mesh, P(*fitted))

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def placed_params(abstract: Any, mesh: Mesh | None, dtype: Any = None) -> Any:
    """Parameters as ShapeDtypeStructs of `dtype` with shardings; no mesh: the first device.

    Args:
        abstract: nested dict of leaves with a shape, such as `Policy.abstract_params`.
        dtype: None: each leaf's own.
    """
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, abstract)
    else:
        shardings = param_shardings(abstract, mesh)
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=at),
        abstract,
        shardings,
    )


def cache_axes(num_kv_heads: int, tensor: int) -> tuple[str, str | None]:
    """Logical axes of a KV cache's slots and heads.

    Devices of a `tensor` axis that does not divide the heads have all heads of slots of their own.
    """
    return ("batch", "kv_heads") if num_kv_heads % tensor == 0 else ("slots", None)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, P(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def axis_size(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...] | None) -> int:
    """Devices along an axis of the mesh, or along several."""
    if names is None:
        return 1
    return int(np.prod([mesh.shape[name] for name in ((names,) if isinstance(names, str) else names)]))
