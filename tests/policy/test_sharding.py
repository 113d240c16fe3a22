"""The table from logical axis to mesh axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_policy import GROUPED, WIDER, mesh_of, tiny

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.sharding import LocalCopy, cache_axes, local_sizes, make_mesh, param_shardings
from calibadv_jax.policy.weights import flatten


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, -1, 1), (1, 8, 1)), ((2, 2, -1), (2, 2, 2)), ((-1, 4, 2), (1, 4, 2)), ((8, 1, 1), (8, 1, 1))],
)
def test_one_axis_takes_the_rest(sizes, expected):
    mesh = make_mesh(MeshConfig(*sizes))
    assert tuple(mesh.shape.values()) == expected


@pytest.mark.parametrize("sizes", [(3, -1, 1), (2, 2, 1), (16, -1, 1)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match=r"mesh: .* does not fit 8 device\(s\)"):
        make_mesh(MeshConfig(*sizes))


def test_local_fsdp_divides_the_devices():
    sizes = {"data": 1, "fsdp": 6, "tensor": 2}
    assert local_sizes(sizes, 8) == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(UserError, match="mesh.tensor is 2, but a process has 3 devices"):
        local_sizes(sizes, 3)


def test_parameters_split_where_they_can():
    """Key and value heads of width 18 do not divide by tensor=4: that axis stays whole, the other splits."""
    heads = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}
    abstract = tiny(GROUPED | {"vocab_size": 32} | heads).abstract_params
    shardings = flatten(param_shardings(abstract, mesh_of(data=1, fsdp=2, tensor=4)))
    assert shardings["embed.embedding"].spec == P("tensor", "fsdp")
    assert shardings["layers.mlp.gate.kernel"].spec == P(None, "fsdp", "tensor")
    assert shardings["layers.mlp.down.kernel"].spec == P(None, "tensor", "fsdp")
    assert shardings["layers.attn.k.kernel"].spec == P(None, "fsdp", None)
    assert shardings["layers.attn.q.kernel"].spec == P(None, "fsdp", "tensor")
    assert shardings.keys() == flatten(abstract).keys()
    assert cache_axes(4, 2) == ("batch", "kv_heads") and cache_axes(6, 4) == ("slots", None)


def test_local_copy_gathers_the_base_once():
    """Later calls bring what is trained anew; where everything is trained, everything."""
    mesh = mesh_of(data=1, fsdp=4, tensor=2)
    for adapters in (Adapters(2, 4.0, ("q",), "bfloat16"), None):
        policy = tiny(WIDER, adapters)
        shardings = param_shardings(policy.abstract_params, mesh)
        params = jax.jit(policy.init, out_shardings=shardings)(jax.random.key(0))
        copy, (base, trained) = LocalCopy(mesh, jnp.float32, policy.split), policy.split(params)
        first = copy(params)
        second = copy(merge_params(base, jax.tree.map(lambda leaf: leaf + 1, trained)))
        (frozen, before), (again, after) = policy.split(first), policy.split(second)
        assert list(map(id, jax.tree.leaves(frozen))) == list(map(id, jax.tree.leaves(again)))
        assert bool(frozen) == (adapters is not None)
        jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, old + 1), after, before)
        for leaf, sharding in zip(jax.tree.leaves(second), jax.tree.leaves(shardings), strict=True):
            assert leaf.dtype == jnp.float32 and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
