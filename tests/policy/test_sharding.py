"""The table from logical axis to mesh axis."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, -1, 1), (1, 8, 1)), ((2, 2, -1), (2, 2, 2)), ((-1, 4, 2), (1, 4, 2)), ((8, 1, 1), (8, 1, 1))],
)
def test_one_axis_takes_the_rest(sizes, expected):
    mesh = make_mesh(MeshConfig(*sizes))
    assert tuple(mesh.shape.values()) == expected


@pytest.mark.parametrize("sizes", [(3, -1, 1), (2, 2, 1), (16, -1, 1)])
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(UserError, match=r"mesh: .* does not fit 8 device\(s\)"):
        make_mesh(MeshConfig(*sizes))


def test_parameters_split_where_they_can():
    """Key and value heads of width 18 do not divide by tensor=4: that axis stays whole, the other splits."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 32,
        "hidden_size": 36,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    abstract = Policy(architecture_from_hf(config), Numerics()).abstract_params
    shardings = param_shardings(abstract, make_mesh(MeshConfig(data=1, fsdp=2, tensor=4)))
    layers = shardings["layers"]
    assert shardings["embed"]["embedding"].spec == P("tensor", "fsdp")
    assert layers["mlp"]["gate"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert layers["mlp"]["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert layers["attn"]["k"]["kernel"].spec == P(None, "fsdp", None)
    assert layers["attn"]["q"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
