"""PEFT folders: which options are accepted, and what the messages say."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_policy import row_logits, tiny
from trainer_rig import HF_CONFIG

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.weights import flatten, hf_shapes
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config
from calibadv_jax.snapshots.peft import adapters_hash, load_adapters, save_adapters

ADAPTERS = Adapters(2, 4.0, ("q", "v"), "bfloat16")
POLICY = tiny(HF_CONFIG, ADAPTERS)
# As PEFT 0.21.2 writes it.
CONFIG = json.loads(Path(__file__).with_name("adapter_config.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path):
    rng, shapes = np.random.default_rng(0), hf_shapes(POLICY.abstract_trained)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder, **options):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | options))
    return load_adapters(folder, POLICY, None)


def refusal(folder, **options):
    with pytest.raises(UserError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"init_lora_weights": False},
        {"corda_config": {"corda_method": "ipm"}},  # saved converted
        {"task_type": None, "modules_to_save": [], "bias": None},
        {"option_of_tomorrow": None, "another": False, "third": {}, "fourth": []},
    ],
)
def test_plain_adapters_are_accepted(folder, options):
    params = load(folder, **options)
    fraction = tiny(HF_CONFIG, replace(ADAPTERS, alpha=4.5))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | options | {"lora_alpha": 4.5}))
    assert flatten(load_adapters(folder, fraction, None)).keys() == flatten(params).keys()
    expected = load_file(folder / "adapter_model.safetensors")
    first = expected["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_array_equal(flatten(params)["layers.attn.q.lora_a"][0], first.T)


CHANGING = ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new"]
NOT_MERGED = {"layers_to_transform": [0, [0]], "option_of_tomorrow": [0.5, 0], "use_dora": [True]}
NOT_MERGED |= {"alora_invocation_tokens": [[1, 2]], "use_bdlora": [{"nblocks": 2}], "bias": ["lora_only"]}
NOT_MERGED |= {"rank_pattern": [{"q_proj": 1}], "alpha_pattern": [{"q_proj": 8}], "fan_in_fan_out": [True]}
NOT_MERGED |= {"task_type": ["SEQ_CLS"], "peft_type": ["IA3"]}


@pytest.mark.parametrize(
    ("values", "way_out"),
    [
        ({"init_lora_weights": CHANGING}, "merge_and_unload"),
        ({"lora_alpha": [0, None, -1, "16", True, float("nan")]}, "verl"),
        ({"r": [0, None, 2.5]}, "policy.lora.rank"),
        (NOT_MERGED, "merge_and_unload"),
    ],
)
def test_other_options_are_refused_by_name(folder, values, way_out):
    for name, value in ((name, value) for name, options in values.items() for value in options):
        message = refusal(folder, **{name: value})
        assert f"adapter_config.json: {name} is {value!r}, " in message and way_out in message


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.lora_B.bias",
        "lm_head.lora_A.weight",
        "model.layers.0.self_attn.q.lora_A.weight",
    ],
)
def test_tensor_outside_the_adapters_is_named(folder, name):
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{name}": np.ones((2, 2), np.float32)}, path)
    message = refusal(folder)
    assert f"{path}: holds base_model.model.{name}, which is not supported" in message
    assert "save_embedding_layers=False" in message and "merge_and_unload" in message


def test_unfit_files_are_refused(folder):
    wide = tiny(HF_CONFIG | {"hidden_size": 32}, ADAPTERS)
    with pytest.raises(UserError, match=r"adapter_model.safetensors: 4 tensor\(s\) do not fit this policy"):
        load_adapters(folder, wide, None)
    with pytest.raises(UserError, match="init_from: .*none/adapter_model.safetensors: no such file"):
        adapters_hash(folder / "none")
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"base_dtype": "float32"})
    assert "set policy.lora.base_dtype=float32" in refusal(folder)
    save_file({}, path)
    assert "adapter_model.safetensors: holds no adapters, " in refusal(folder)


TOKENS = np.arange(1, 25)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """PEFT beside a small base in float32, which bfloat16 rounds."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(initializer_range=0.2, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    base = tmp_path_factory.mktemp("library") / "base"
    model.save_pretrained(base)
    return SimpleNamespace(**locals())


def peft_logits(library, model):
    with library.torch.no_grad():
        return model(library.torch.from_numpy(TOKENS[None])).logits[0].float().numpy()


def policy_with(library, rank, alpha, base_dtype="float32"):
    return tiny(read_hf_config(library.base), Adapters(rank, alpha, ("q", "v"), base_dtype))


def our_logits(library, policy, adapters):
    params = merge_params(load_params(library.base, policy, None), adapters)
    return np.asarray(row_logits(policy, params, TOKENS[None])[0])


def peft_model(library, init):
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = library.peft.LoraConfig(init_lora_weights=init, **options)
    return library.peft.get_peft_model(copy.deepcopy(library.model), config)


def move(library, model):
    """Stand in for training."""
    torch = library.torch
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.medium
@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_accepted_initialisations_equal_peft(library, init, tmp_path):
    model = peft_model(library, init)
    move(library, model)
    model.save_pretrained(tmp_path)
    policy = policy_with(library, 4, 8.0)
    ours = our_logits(library, policy, load_adapters(tmp_path, policy, None))
    np.testing.assert_allclose(ours, peft_logits(library, model), atol=2e-5)


@pytest.mark.medium
def test_exported_adapters_belong_to_the_rounded_base(library, tmp_path):
    """PEFT on the base in its precision computes the policy; on a float32 base it does not."""
    policy = policy_with(library, 4, 8.0, "bfloat16")
    adapters = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype) / 10,
        policy.abstract_trained,
    )
    expected = our_logits(library, policy, adapters)
    save_adapters(adapters, policy.adapters, str(library.base), tmp_path / "adapter", None)

    def difference(dtype):
        load = library.transformers.AutoModelForCausalLM.from_pretrained
        base = load(library.base, torch_dtype=getattr(library.torch, dtype)).float()
        model = library.peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        return np.abs(peft_logits(library, model) - expected).max()

    assert difference("bfloat16") < 1e-4 and difference("float32") > 1e-2
    again = load_adapters(tmp_path / "adapter", policy, None)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    with pytest.raises(UserError, match="base in bfloat16, .* set policy.lora.base_dtype=bfloat16"):
        load_adapters(tmp_path / "adapter", policy_with(library, 4, 8.0), None)
