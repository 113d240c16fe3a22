"""config.json of the paper's three models, whole and in small, and other layouts: in, out, other readers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_rig import changed
from real_rig import real_model
from safetensors.numpy import load_file
from tiny_policy import LLAMA3, row_logits

from calibadv_jax.config import MeshConfig, load_config
from calibadv_jax.contrib.cli import doctor
from calibadv_jax.contrib.planning.memory import estimate_memory
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import RopeScaling, architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import hf_shapes
from calibadv_jax.sampler.vllm_command import server_command
from calibadv_jax.sampler.vllm_worker import parse
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config, save_folder

ROOT = Path(__file__).resolve().parents[2]
# config.json of the paper's three models, as their authors publish them.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))
VOCABULARY = 320
# As published, but for the sizes: hidden, intermediate, layers, heads and vocabulary are divided, the ratio
# of heads to key-value heads and head_dim x heads = hidden are kept.
SMALLER = {  # hidden_size, intermediate_size, num_attention_heads, num_key_value_heads
    "qwen2.5-3b": (256, 344, 8, 1),
    "qwen2.5-7b": (224, 296, 7, 1),
    "llama-3.2-3b-instruct": (192, 256, 6, 2),
    "qwen3": (64, 96, 4, 2),
    "llama-untied": (64, 96, 4, 2),
    "qwen2.5-yarn": (64, 96, 4, 2),
}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
COMMON = {"bos_token_id": 1, "eos_token_id": 1, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
OTHERS = {"max_position_embeddings": 32768, "rope_theta": 1e6}
# As the model cards of Qwen2.5 say to add it; the positions of the tests are beyond the native ones.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = PUBLISHED | {
    "qwen2.5-yarn": OTHERS | {"model_type": "qwen2", "rope_scaling": YARN, "tie_word_embeddings": False},
    "qwen3": OTHERS | {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama-untied": OTHERS | {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": False},
}
LAYOUTS = {
    name: MODELS[name] | COMMON | dict(zip(SIZES, sizes, strict=True)) for name, sizes in SMALLER.items()
}
LAYOUTS["llama-3.2-3b-instruct"] |= {"head_dim": 32, "bos_token_id": 2, "eos_token_id": [1, 5, 6]}
LAYOUTS["qwen3"]["head_dim"] = 32
BIASES = {"qwen2": {"q_proj.bias", "k_proj.bias", "v_proj.bias"}}
WHOLE = {"qwen2.5-3b": 36 * 12 + 2, "qwen2.5-7b": 28 * 12 + 3, "llama-3.2-3b-instruct": 28 * 9 + 2}  # tensors
TEXTS = ("Romeo and Juliet was written by", "Water boils at a temperature of")
TOKENS = np.random.default_rng(1).integers(10, VOCABULARY, (2, 48)).astype(np.int32)


def publish(name, folder):
    """Writes a folder as its authors publish it: config.json, and several files of bfloat16."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LAYOUTS[name]))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, must matter
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "config.json").write_text(json.dumps(LAYOUTS[name]))  # transformers 5 writes other names
    return model.float()


def export(folder, output, max_shard_bytes=500_000):
    """Loads a folder and writes it again, in several files."""
    policy = Policy(architecture_from_hf(read_hf_config(folder)), Numerics())
    params = load_params(folder, policy, None)
    save_folder(params, read_hf_config(folder), output, "float32", folder, max_shard_bytes)
    return policy, params


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def upstream(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "hf"
    return publish(name, folder), folder


@pytest.fixture(scope="module")
def exported(name, upstream, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "hf"
    return *export(upstream[1], output, 500_000 if name in PUBLISHED else 2**30), output


def tensors_of(folder):
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    return {name: value for tensors in files for name, value in tensors.items()}


def test_exported_fields_and_tensors_are_the_published(upstream, exported):
    _, folder = upstream
    _, _, output = exported
    before, after = read_hf_config(folder), read_hf_config(output)
    assert {name for name, value in before.items() if after.get(name) != value} <= {"torch_dtype"}
    assert architecture_from_hf(after) == architecture_from_hf(before)
    before, after = map(tensors_of, (folder, output))
    index = output / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
        files = {path.name: path.stat().st_size for path in output.glob("*.safetensors")}
        assert places.keys() == after.keys() and files.keys() == set(places.values()) and len(files) > 2
        assert all(size < 502_000 for size in files.values())
    else:
        assert [path.name for path in output.glob("*.safetensors")] == ["model.safetensors"]
    assert after.keys() == before.keys()
    assert all(np.array_equal(value, before[name].astype(np.float32)) for name, value in after.items())
    config = read_hf_config(folder)
    assert ("lm_head.weight" in after) is not config["tie_word_embeddings"]
    biases = {name.partition("self_attn.")[2] for name in after if name.endswith("bias")}
    assert biases == BIASES.get(config["model_type"], set())


@pytest.mark.medium
def test_logits_equal_those_of_transformers(upstream, exported):
    """At 100 tokens: LLAMA3 scales the rotary embeddings of a policy that was made for 64."""
    import torch

    model, _ = upstream
    policy, params, _ = exported
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 100)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(row_logits(policy, params, tokens), expected, atol=1e-4)


def test_published_weights_lie_in_several_files(name, upstream):
    _, folder = upstream
    assert len(list(folder.glob("*.safetensors"))) > 1
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in places) == (name in ("qwen2.5-7b", "llama-untied", "qwen2.5-yarn"))
    assert any(tensor.endswith("q_proj.bias") for tensor in places) == name.startswith("qwen2.5")


@pytest.mark.medium
def test_loaded_weights_equal_the_original(upstream, exported):
    import torch
    from transformers import AutoModelForCausalLM

    model, _ = upstream
    _, _, output = exported
    loaded = AutoModelForCausalLM.from_pretrained(output).state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


@pytest.mark.medium
def test_transformers_logits_equal_the_original(name, upstream, exported):
    import torch
    from transformers import AutoModelForCausalLM

    model, folder = upstream
    policy, _, output = exported
    mesh = load_config(ROOT / f"configs/paper/{name}.yaml").mesh if name in PUBLISHED else MeshConfig(fsdp=8)
    params = load_params(folder, policy, make_mesh(mesh))
    shardings = param_shardings(policy.abstract_params, make_mesh(mesh))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.dtype == torch.float32
    tokens = torch.tensor(TOKENS, dtype=torch.long)
    far = torch.arange(20_000, 20_048)[None]  # where a wrong rope_theta or scaling shows
    with torch.no_grad():
        for positions in (None, far):
            expected = model(tokens, position_ids=positions).logits
            logits = loaded(tokens, position_ids=positions).logits
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

    @jax.jit
    def our_logits(params, tokens):
        decoder = policy.merge(params)
        positions = jnp.broadcast_to(jnp.arange(20_000, 20_048), tokens.shape)
        return decoder.logits(decoder(tokens, positions, jnp.ones_like(tokens)))

    assert expected.abs().max() > 1
    np.testing.assert_allclose(our_logits(params, TOKENS), expected.numpy(), atol=2e-2)


def test_rope_is_written_for_transformers_4_and_5(upstream, exported):
    """Before version 5 the fields are rope_theta and rope_scaling; rope_parameters is unknown there."""
    model, folder = upstream
    _, _, output = exported
    published, written = read_hf_config(folder), read_hf_config(output)
    assert written["rope_theta"] == published["rope_theta"]
    assert written.get("rope_scaling") == published.get("rope_scaling")
    assert written["rope_parameters"]["rope_theta"] == published["rope_theta"]
    # What transformers 5 writes has rope_parameters only: from there, too, both come out.
    newer = json.loads(model.config.to_json_string())
    assert "rope_theta" not in newer
    policy = Policy(architecture_from_hf(newer), Numerics())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy.abstract_params)
    again = read_hf_config(save_folder(zeros, newer, output.parent / "newer", "bfloat16", None))
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        assert again.get(name) == written.get(name), name


@pytest.mark.parametrize("name", PUBLISHED, indirect=True)
def test_whole_model_has_the_published_tensors(name):
    architecture = architecture_from_hf(PUBLISHED[name])
    assert architecture_from_hf(load_config(ROOT / f"configs/paper/{name}.yaml").policy.init) == architecture
    shapes = hf_shapes(Policy(architecture, Numerics()).abstract_params)
    assert len(shapes) == WHOLE[name]
    assert sum(map(math.prod, shapes.values())) == architecture.num_parameters
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192) if name.startswith("llama") else None
    assert architecture.rope_scaling == scaling
    assert architecture.rope_theta == (5e5 if scaling else 1e6)


@pytest.mark.parametrize("name", PUBLISHED, indirect=True)
def test_doctor_counts_the_memory_of_folder_and_config_alike(name, tmp_path, capsys):
    path = ROOT / f"configs/paper/{name}.yaml"
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))

    def policy_lines(*overrides):
        with suppress(UserError):  # the data of the config is not here
            doctor.run(load_config(path, overrides), offline=True)
        lines = capsys.readouterr().out.splitlines()
        policy = [line for line in lines if line.startswith("ok   policy")]
        return [line for line in policy if "shape of" not in line]  # the name of the file, or of the table

    of_config = policy_lines("policy.path=")
    assert any("estimated memory" in line for line in of_config)
    assert policy_lines() == of_config  # the table of models that the program knows
    assert policy_lines(f"policy.path={tmp_path}", "policy.init.num_hidden_layers=1") == of_config
    assert policy_lines("policy.path=", "policy.init.num_hidden_layers=1") != of_config


def bytes_on_a_device(tree):
    """Bytes that each device holds of abstract arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("name", PUBLISHED, indirect=True)
def test_memory_estimate_equals_the_placement_of_the_whole_model(name):
    """Against the shapes and shardings of the learner's own state, without its memory."""
    config = load_config(ROOT / f"configs/paper/{name}.yaml")
    architecture = architecture_from_hf(PUBLISHED[name])
    policy, mesh = Policy(architecture, Numerics.from_config(config.policy)), make_mesh(config.mesh)
    optimizer = config.learner.optimizer
    rule = make_optimizer(optimizer, make_schedule(optimizer, 10))
    state = Learner(policy, rule, mesh, LearnerOptions(config.learner.microbatch_rows)).abstract_state
    params = bytes_on_a_device(state["params"])
    moments = bytes_on_a_device(state) - params

    estimate = estimate_memory(config, architecture, mesh.shape)
    assert estimate["parameters"] == pytest.approx(params, rel=2e-3)
    assert estimate["optimizer"] == pytest.approx(moments, rel=2e-3)
    half = changed(config, policy={"param_dtype": "bfloat16"})
    assert estimate_memory(half, architecture, mesh.shape)["parameters"] == estimate["parameters"] / 2


def continued(model, prompts):
    """Eight greedy tokens after every prompt, by transformers."""
    import torch

    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        texts = [model.generate(torch.tensor([prompt]), **greedy)[0].tolist() for prompt in prompts]
    assert all(len(text) == len(prompt) + 8 for text, prompt in zip(texts, prompts, strict=True))
    return [text[-8:] for text in texts]


@pytest.mark.slow
def test_vllm_greedy_tokens_equal_the_original(tmp_path):
    """All three, and a pretrained model, in one process of vLLM's, which takes long to start."""
    pytest.importorskip("vllm")
    prompts, expected = {}, {}
    for name in PUBLISHED:
        model = publish(name, tmp_path / f"{name}-published")
        export(tmp_path / f"{name}-published", tmp_path / name)
        prompts[name] = TOKENS.tolist()
        expected[name] = continued(model, prompts[name])
    with suppress(pytest.skip.Exception):  # the other models must be compared all the same
        from transformers import AutoModelForCausalLM, AutoTokenizer

        pretrained = real_model("qwen2.5-0.5b")
        export(pretrained, tmp_path / "pretrained")
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        prompts["pretrained"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        model = AutoModelForCausalLM.from_pretrained(pretrained, dtype="float32").eval()
        expected["pretrained"] = continued(model, prompts["pretrained"])
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [sys.executable, str(Path(__file__).with_name("vllm_greedy.py")), str(tmp_path)]
    _, environment = server_command(parse(["--model", str(tmp_path), "--flavour", "cpu"]), 0)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "tokens.json").read_text()) == expected
