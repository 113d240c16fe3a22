"""The weight-name table, in both directions."""

import jax
import numpy as np
import pytest
from tiny_policy import NARROW, tiny

from calibadv_jax.policy.weights import (
    MAX_LISTED_PROBLEMS,
    flatten,
    from_hf,
    hf_shapes,
    shape_problems,
    summarise_problems,
    to_hf,
    unflatten,
)

CONFIG = NARROW | {"model_type": "llama", "vocab_size": 20, "intermediate_size": 12, "num_hidden_layers": 3}
CONFIG |= {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def policy():
    return tiny(CONFIG)


@pytest.fixture(scope="module")
def params(policy):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), policy.abstract_params)


def test_names_and_layout_survive_the_round_trip(policy, params):
    tensors = dict(to_hf(params))
    assert {name: array.shape for name, array in tensors.items()} == hf_shapes(policy.abstract_params)
    kernel = tensors["model.layers.1.mlp.gate_proj.weight"]  # [out, in], as torch has it
    np.testing.assert_array_equal(kernel, params["layers"]["mlp"]["gate"]["kernel"][1].T)
    for path, expected in flatten(params).items():
        everything = (slice(None),) * expected.ndim
        array = from_hf(path, lambda name, at: tensors[name][at], 3, everything, np.float32)
        np.testing.assert_array_equal(array, expected)
    assert jax.tree.structure(unflatten(flatten(params))) == jax.tree.structure(params)


def test_region_reads_no_more_than_itself(params):
    tensors = dict(to_hf(params))
    read = []

    def reader(name, region):
        read.append((name, tensors[name][region].shape))
        return tensors[name][region]

    region = (slice(1, 3), slice(0, 4), slice(6, 12))
    array = from_hf("layers.mlp.up.kernel", reader, 3, region, np.float16)
    expected = params["layers"]["mlp"]["up"]["kernel"][region].astype(np.float16)
    np.testing.assert_array_equal(array, expected)
    assert array.dtype == np.float16
    assert read == [(f"model.layers.{layer}.mlp.up_proj.weight", (6, 4)) for layer in (1, 2)]


def test_misfits_are_named_in_one_line(policy):
    shapes, expected = hf_shapes(policy.abstract_params), hf_shapes(policy.abstract_params)
    assert shape_problems(shapes, expected) == []
    del shapes["model.norm.weight"], shapes["model.layers.2.self_attn.q_proj.bias"]
    shapes |= {"a.lm_head.bias": (20,), "model.embed_tokens.weight": (21, 8)}
    text = summarise_problems(shape_problems(shapes, expected))
    assert "model.norm.weight" in text and text.endswith("; and 1 more") and "\n" not in text
    shapes, expected = {"a": (8, 20), "x": (1,), "a.long": (2,)}, {"a": (20, 8), "b.c": (3,)}
    assert shape_problems(shapes, expected) == [  # short names first
        *(
            "a has shape [8, 20] instead of [20, 8]",
            "unexpected x [1]",
            "missing b.c [3]",
            "unexpected a.long [2]",
        )
    ]


def test_first_misfits_of_a_policy_are_named_by_their_kind(policy):
    expected = hf_shapes(policy.abstract_params)
    shapes = expected | {"lm_head.bias": (20,), "model.embed_tokens.weight": (21, 8)}
    del shapes["model.norm.weight"], shapes["model.layers.2.self_attn.q_proj.bias"]
    problems = shape_problems(shapes, expected)
    assert len(problems) == 4
    assert summarise_problems(problems) == (
        "unexpected lm_head.bias [20]; missing model.norm.weight [8];"
        " model.embed_tokens.weight has shape [21, 8] instead of [20, 8]; and 1 more"
    )


def test_many_misfits_stay_one_short_line(policy):
    shapes = {f"other.{index}.weight": (1,) for index in range(50)}
    expected = hf_shapes(policy.abstract_params)
    problems = shape_problems(shapes, expected)
    assert len(problems) == len(shapes) + len(expected)
    named = " ".join(problems)
    assert all(f" {name} " in named for name in (*shapes, *expected))
    text = summarise_problems(problems)
    assert len(text) < 200 and text.endswith(f"; and {len(problems) - MAX_LISTED_PROBLEMS} more")
