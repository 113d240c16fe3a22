"""The exact layouts of the paper's three models: config.json as published, bfloat16, several files."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_configs import PUBLISHED

from calibadv_jax.config import load_config
from calibadv_jax.contrib.commands import doctor
from calibadv_jax.contrib.planning.memory import estimate_memory
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import RopeScaling, architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import hf_shapes
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config

ROOT = Path(__file__).resolve().parents[2]

TENSORS = {"qwen2.5-3b": 36 * 12 + 2, "qwen2.5-7b": 28 * 12 + 3, "llama-3.2-3b-instruct": 28 * 9 + 2}
HEAD_DIM = 8  # of the small ones, which keep everything else: heads, ties, biases, rotary embeddings


def small(published):
    fields = {
        "hidden_size": published["num_attention_heads"] * HEAD_DIM,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 96,
    }
    if "head_dim" in published:
        fields["head_dim"] = HEAD_DIM
    if "rope_scaling" in published:  # shorter, so that a short text is beyond it
        fields["rope_scaling"] = published["rope_scaling"] | {"original_max_position_embeddings": 16}
    return published | fields


@pytest.fixture(scope="module", params=PUBLISHED)
def checkpoint(request, tmp_path_factory):
    """(name, folder, its model in transformers)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    text = json.dumps(small(PUBLISHED[request.param]))
    (folder / "config.json").write_text(text)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, must matter
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "config.json").write_text(text)  # as published: transformers 5 writes other names
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return request.param, folder, model


@pytest.mark.medium
def test_a_published_layout_gives_the_logits_of_transformers(checkpoint):
    import torch

    name, folder, model = checkpoint
    assert len(list(folder.glob("*.safetensors"))) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (name == "qwen2.5-7b")
    assert any(key.endswith("q_proj.bias") for key in index["weight_map"]) == name.startswith("qwen")
    policy = Policy(architecture_from_hf(read_hf_config(folder)), Numerics())
    params = load_params(folder, policy, make_mesh(load_config(ROOT / f"configs/paper/{name}.yaml").mesh))
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()

    @jax.jit
    def logits(params, tokens):
        decoder = policy.merge(params)
        positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
        return decoder.logits(decoder(tokens, positions, jnp.ones_like(tokens)))

    np.testing.assert_allclose(
        logits(params, tokens), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_model_has_the_published_tensors(name):
    architecture = architecture_from_hf(PUBLISHED[name])
    shapes = hf_shapes(Policy(architecture, Numerics()).abstract_params)
    assert len(shapes) == TENSORS[name]
    assert sum(map(math.prod, shapes.values())) == architecture.num_parameters
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192) if name.startswith("llama") else None
    assert architecture.rope_scaling == scaling
    assert architecture.rope_theta == (5e5 if scaling else 1e6)


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_describes_the_published_model(name, tmp_path, capsys):
    """The doctor says the same of policy.init alone and of the folder."""
    path = ROOT / f"configs/paper/{name}.yaml"
    assert architecture_from_hf(load_config(path).policy.init) == architecture_from_hf(PUBLISHED[name])
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))

    def memory(*overrides):
        doctor.run(load_config(path, overrides), offline=True)
        return [line for line in capsys.readouterr().out.splitlines() if "ok   policy" in line]

    assert memory() == memory(f"policy.path={tmp_path}", "policy.init.num_hidden_layers=1")
    assert memory() != memory("policy.init.num_hidden_layers=1")


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_estimate_is_what_the_mesh_puts_on_a_device(name):
    """Against the shapes and shardings of the learner's own state, at full size and without its memory."""
    config = load_config(ROOT / f"configs/paper/{name}.yaml")
    architecture = architecture_from_hf(PUBLISHED[name])
    policy, mesh = Policy(architecture, Numerics.from_config(config.policy)), make_mesh(config.mesh)
    optimizer = config.learner.optimizer
    rule = make_optimizer(optimizer, make_schedule(optimizer, 10))
    state = Learner(policy, rule, mesh, LearnerOptions(config.learner.microbatch_rows)).abstract_state()

    def bytes_on_a_device(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    estimate = estimate_memory(config, architecture, mesh.shape)
    params = bytes_on_a_device(state["params"])
    moments = bytes_on_a_device(state) - params
    assert estimate["parameters"] == pytest.approx(params, rel=2e-3)
    assert estimate["optimizer"] == pytest.approx(moments, rel=2e-3)
    bf16 = dataclasses.replace(config, policy=dataclasses.replace(config.policy, param_dtype="bfloat16"))
    assert estimate_memory(bf16, architecture, mesh.shape)["parameters"] == estimate["parameters"] / 2
