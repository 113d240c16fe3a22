"""Folders with the config.json of the paper's three models, in small: in, out, and into other readers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_configs import PUBLISHED
from real_rig import real_model
from safetensors.numpy import load_file

from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config, save_folder

VOCABULARY = 320
# As published, but for the sizes: hidden, intermediate, layers, heads and vocabulary are divided, the ratio
# of heads to key-value heads and head_dim x heads = hidden are kept.
SMALLER = {
    "qwen2.5-3b": {
        "hidden_size": 256,
        "intermediate_size": 344,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "qwen2.5-7b": {
        "hidden_size": 224,
        "intermediate_size": 296,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "llama-3.2-3b-instruct": {
        "hidden_size": 192,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "bos_token_id": 2,
        "eos_token_id": [1, 5, 6],
    },
}
LAYOUTS = {
    name: PUBLISHED[name] | sizes | {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
    for name, sizes in SMALLER.items()
}
TENSORS = {  # of one layer
    "qwen2": {"q_proj.bias", "k_proj.bias", "v_proj.bias"},
    "llama": set(),
}
VLLM = {  # as calibadv_jax/sampler/vllm_worker.py sets it on the CPU
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
TEXTS = ("Romeo and Juliet was written by", "Water boils at a temperature of")
TOKENS = np.random.default_rng(1).integers(10, VOCABULARY, (2, 48)).astype(np.int32)


def publish(name, folder):
    """Writes a folder as its authors publish it: the config.json above, weights that transformers made."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LAYOUTS[name]))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, must matter
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LAYOUTS[name]))
    return model


def export(folder, output):
    """Loads a folder and writes it again, in several files."""
    policy = Policy(architecture_from_hf(read_hf_config(folder)), Numerics())
    params = load_params(folder, policy, None)
    save_folder(params, read_hf_config(folder), output, "float32", folder, max_shard_bytes=500_000)
    return policy, params


@pytest.fixture(scope="module", params=LAYOUTS)
def upstream(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "hf"
    return publish(request.param, folder), folder


@pytest.fixture(scope="module")
def exported(upstream, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "hf"
    return *export(upstream[1], output), output


def test_every_field_of_the_config_is_kept(upstream, exported):
    _, folder = upstream
    _, _, output = exported
    before, after = read_hf_config(folder), read_hf_config(output)
    changed = {name for name, value in before.items() if after.get(name) != value}
    assert changed <= {"torch_dtype"}
    assert architecture_from_hf(after) == architecture_from_hf(before)


def test_the_tensors_are_those_of_the_published_model(upstream, exported):
    _, folder = upstream
    _, _, output = exported
    index = json.loads((output / "model.safetensors.index.json").read_text())
    before = load_file(folder / "model.safetensors")
    files = sorted(output.glob("model-*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    after = {name: value for path in files for name, value in load_file(path).items()}
    assert after.keys() == before.keys() == index["weight_map"].keys()
    assert all(np.array_equal(value, before[name]) for name, value in after.items())
    config = read_hf_config(folder)
    assert ("lm_head.weight" in after) is not config["tie_word_embeddings"]
    biases = {name.partition("self_attn.")[2] for name in after if name.endswith("bias")}
    assert biases == TENSORS[config["model_type"]]


@pytest.mark.medium
def test_transformers_gives_the_logits_of_the_original(upstream, exported):
    import torch
    from transformers import AutoModelForCausalLM

    model, _ = upstream
    policy, params, output = exported
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    tokens = torch.tensor(TOKENS, dtype=torch.long)
    far = torch.arange(20_000, 20_048)[None]  # where a wrong rope_theta or scaling shows
    with torch.no_grad():
        for positions in (None, far):
            expected = model(tokens, position_ids=positions).logits
            torch.testing.assert_close(
                loaded(tokens, position_ids=positions).logits, expected, atol=1e-5, rtol=0
            )
        expected = model(tokens, position_ids=far).logits.numpy()

    @jax.jit
    def logits(params, tokens):
        decoder = policy.merge(params)
        positions = jnp.broadcast_to(jnp.arange(20_000, 20_048), tokens.shape)
        return decoder.logits(decoder(tokens, positions, jnp.ones_like(tokens)))

    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(params, TOKENS), expected, atol=2e-2)


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
    assert {name: again.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")} == {
        name: written.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")
    }


def found_real_model():
    try:
        return real_model("qwen2.5-0.5b")
    except pytest.skip.Exception:  # the other models must be compared all the same
        return None


def continued(model, prompts):
    """Eight greedy tokens after every prompt, by transformers."""
    import torch

    with torch.no_grad():
        written = [
            model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[
                0, len(prompt) :
            ].tolist()
            for prompt in prompts
        ]
    assert all(len(tokens) == 8 for tokens in written)
    return written


@pytest.mark.slow
def test_vllm_gives_the_greedy_tokens_of_the_original(tmp_path):
    """All three, and a pretrained model, in one process of vLLM's, which takes long to start."""
    pytest.importorskip("vllm")
    prompts, expected = {}, {}
    for name in LAYOUTS:
        model = publish(name, tmp_path / f"{name}-published")
        export(tmp_path / f"{name}-published", tmp_path / name)
        prompts[name] = TOKENS.tolist()
        expected[name] = continued(model, prompts[name])
    if pretrained := found_real_model():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        export(pretrained, tmp_path / "pretrained")
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        prompts["pretrained"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        model = AutoModelForCausalLM.from_pretrained(pretrained, dtype="float32").eval()
        expected["pretrained"] = continued(model, prompts["pretrained"])
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [sys.executable, str(Path(__file__).with_name("vllm_greedy.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | VLLM)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "tokens.json").read_text()) == expected
