"""HuggingFace folders that are written, read and compared; those of transformers: test_paper_layouts."""

import json
import os
import shutil
from dataclasses import replace
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_policy import mesh_of

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import to_hf
from calibadv_jax.snapshots.huggingface import (
    check_weights,
    load_params,
    read_hf_config,
    save_folder,
)
from calibadv_jax.snapshots.weight_files import HASHED_BLOCK, weights_hash


@pytest.fixture
def folder(tiny, tmp_path):
    """A folder of the tiny policy, written by `save_folder`, with a tokenizer's files."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.txt"):
        (tokenizer / name).write_text("{}")
    output = tmp_path / "hf"
    assert save_folder(tiny.params, tiny.config, output, "float32", tokenizer) == output
    return output


def test_written_folder_loads_unchanged(tiny, folder):
    names = "chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    assert tiny.same(load_params(folder, tiny.policy, None), tiny.params)
    assert architecture_from_hf(read_hf_config(folder)) == tiny.policy.architecture


def test_fields_with_differing_defaults_are_written(tmp_path):
    sparse = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8}
    sparse |= {"num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": None}
    policy = Policy(architecture_from_hf(sparse), Numerics())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy.abstract_params)
    save_folder(zeros, sparse, tmp_path / "out", "bfloat16", None)
    written = read_hf_config(tmp_path / "out")
    assert written["architectures"] == ["Qwen2ForCausalLM"]
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["transformers_version"] == version("transformers")
    assert written["num_key_value_heads"] == 4 and written["head_dim"] == 4
    assert written["rms_norm_eps"] == 1e-6 and written["rope_theta"] == 10000.0
    both = sparse | {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    both["transformers_version"] = "4.43.1"
    save_folder(zeros, both, tmp_path / "other", "bfloat16", None)
    assert read_hf_config(tmp_path / "other")["transformers_version"] == "4.43.1"
    assert read_hf_config(tmp_path / "other")["rope_theta"] == architecture_from_hf(both).rope_theta == 3e4


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 3e4, "rope_scaling": {"type": "yarn", "beta_fast": None}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 3e4}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_yarn_is_written_for_both_kinds_of_readers(tiny, tmp_path, given):
    """Base frequency and scaling stand apart in rope_scaling, and together in rope_parameters."""
    fields = {"factor": 4.0, "original_max_position_embeddings": 64}
    given = {name: value | fields if isinstance(value, dict) else value for name, value in given.items()}
    config = {name: value for name, value in tiny.config.items() if not name.startswith("rope")} | given
    save_folder(tiny.params, config, tmp_path / "out", "bfloat16", None)
    written = read_hf_config(tmp_path / "out")
    scaling = fields | {"rope_type": "yarn"}
    assert written["rope_theta"] == 3e4
    assert written["rope_scaling"] == scaling
    assert written["rope_parameters"] == scaling | {"rope_theta": 3e4}
    assert architecture_from_hf(written) == architecture_from_hf(config)


def test_bfloat16_is_stored_rounded_and_loaded_in_other_precision(tiny, tmp_path):
    folder = save_folder(tiny.params, tiny.config, tmp_path / "half", "bfloat16", None)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params)
    half = Policy(tiny.policy.architecture, Numerics(param_dtype=jnp.bfloat16))
    assert tiny.same(load_params(folder, half, None), rounded)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    assert tiny.same(load_params(folder, tiny.policy, None), widened)


def test_parameters_are_loaded_into_their_shardings(tiny, folder):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    params = load_params(folder, tiny.policy, mesh)
    shardings = param_shardings(tiny.policy.abstract_params, mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert tiny.same(jax.device_get(params), jax.device_get(tiny.params))


def test_failed_export_leaves_the_old_one_and_nothing_else(tiny, folder):
    """A parameter of no known name stops it half-way."""
    with pytest.raises(KeyError):
        save_folder(tiny.params | {"foreign": tiny.params["embed"]}, tiny.config, folder, "float32", None)
    assert tiny.same(load_params(folder, tiny.policy, None), tiny.params)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["hf", "tokenizer"]


def test_only_an_export_is_replaced_by_a_whole_one(tiny, folder):
    def refused(output, words):
        with pytest.raises(UserError, match=words):
            save_folder(tiny.params, tiny.config, output, "float32", None)

    with pytest.raises(KeyError):  # a parameter of no known name stops it half-way
        save_folder(tiny.params | {"foreign": tiny.params["embed"]}, tiny.config, folder, "float32", None)
    assert tiny.same(load_params(folder, tiny.policy, None), tiny.params)
    doubled = jax.tree.map(lambda leaf: leaf * 2, tiny.params)
    save_folder(doubled, tiny.config, folder, "float32", None, max_shard_bytes=4000)
    assert not (folder / "model.safetensors").exists() and not (folder / "tokenizer.json").exists()
    assert tiny.same(load_params(folder, tiny.policy, None), doubled)
    (folder / "thesis.tex").write_text("")
    refused(folder, "hf: holds thesis.tex, which is not an export's; choose another")
    (folder / "thesis.tex").rename(folder.parent / "config.json")
    refused(folder.parent / "config.json", "config.json: is a file; choose another output folder")
    shutil.rmtree(folder)
    folder.mkdir()
    save_file(dict(to_hf(tiny.params)), folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "holds model.safetensors, which is not an export's")
    (folder / "model.safetensors").write_bytes(b"cut off")
    refused(folder, "holds model.safetensors, which is not an export's")
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors")


def test_error_lists_all_unfit_tensors(tiny, folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 16), np.float32)

    rewrite(folder, change)
    for read in (lambda: load_params(folder, tiny.policy, None), lambda: check_weights(folder, tiny.policy)):
        with pytest.raises(UserError) as caught:
            read()
        message = str(caught.value)
        assert message.startswith(f"{folder}: 3 tensor(s) do not fit config.json: ")
        assert "missing model.norm.weight [16]" in message
        assert "unexpected model.layers.0.self_attn.q_proj.bias [4]" in message
        assert "model.layers.1.mlp.up_proj.weight has shape [3, 16] instead of [24, 16]" in message


def test_headers_of_sharded_weights_are_compared(tiny, tmp_path):
    """Values are not read: the files end behind their headers and are as long as they say."""
    folder = save_folder(tiny.params, tiny.config, tmp_path / "hf", "float32", None, max_shard_bytes=4096)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        os.truncate(path, header)
        os.truncate(path, size)
    count = sum(len(load_file(path)) for path in files)
    assert check_weights(folder, tiny.policy).startswith(f"{count} tensors in {len(files)} ") and files[1:]
    other = Policy(replace(tiny.policy.architecture, head_dim=32), Numerics())
    with pytest.raises(UserError, match=r"tensor\(s\) do not fit config.json: .* instead of"):
        check_weights(folder, other)


def test_unfit_tensors_are_refused(tiny, folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert tiny.same(load_params(folder, tiny.policy, None), tiny.params)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), 9.0))
    with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight; set"):
        load_params(folder, tiny.policy, None)
    assert check_weights(folder, tiny.policy).endswith("the policy's shapes"), "values are not read"
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.int8)}))
    with pytest.raises(UserError, match=r"not supported: model.norm.weight \(I8\)"):
        load_params(folder, tiny.policy, None)


QUANTISED = {  # what each format stores in place of, and beside, a matrix
    "fp8": {"weight": ("F8_E4M3", 1), "weight_scale_inv": ("F32", 4)},
    "gptq": {"qweight": ("I32", 4), "qzeros": ("I32", 4), "scales": ("F16", 2), "g_idx": ("I32", 4)},
    "awq": {"qweight": ("I32", 4), "qzeros": ("I32", 4), "scales": ("F16", 2)},
    "bitsandbytes 4 bits": {"weight": ("U8", 1), "weight.absmax": ("F32", 4), "weight.quant_map": ("F32", 4)},
    "bitsandbytes 8 bits": {"weight": ("I8", 1), "SCB": ("F32", 4)},
    "compressed-tensors": {"weight_packed": ("I32", 4), "weight_scale": ("BF16", 2)},
}


@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_weights_are_no_mismatch_of_shapes(tiny, folder, form):
    matrix = "model.layers.0.mlp.up_proj"
    tensors = {name: ("F32", 4) for name in load_file(folder / "model.safetensors") if matrix not in name}
    tensors |= {f"{matrix}.{suffix}": kind for suffix, kind in QUANTISED[form].items()}
    header, end = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
    words = f"quantised or integer weights are not supported: {matrix}.*; give the folder of the unquantised"
    for read in (lambda: load_params(folder, tiny.policy, None), lambda: check_weights(folder, tiny.policy)):
        with pytest.raises(UserError, match=f"^{folder}: {words}"):
            read()


def test_shared_case_of_fp8_weights(shared):
    folder = shared / "cases/weights_fp8_message"
    policy = Policy(architecture_from_hf(read_hf_config(folder)), Numerics())
    words = r"not supported: model.layers.0.mlp.down_proj.weight \(F8_E4M3\); .* and 11 more; give the folder"
    with pytest.raises(UserError, match=words):
        check_weights(folder, policy)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_without_the_prefix_of_the_body_are_loaded(tiny, tmp_path, tied):
    """As AutoModel saves them; of an untied model the output head must be there, too."""
    config = tiny.config | {"tie_word_embeddings": tied}
    policy = Policy(architecture_from_hf(config), Numerics())
    params = policy.init(jax.random.key(0))
    folder = save_folder(params, config, tmp_path / "hf", "float32", None)
    tensors = load_file(folder / "model.safetensors")
    body = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(body, folder / "model.safetensors")
    assert tiny.same(load_params(folder, policy, None), params)
    assert check_weights(folder, policy).startswith(f"{len(tensors)} tensors")
    if not tied:
        del body["lm_head.weight"]
        save_file(body, folder / "model.safetensors")
        with pytest.raises(UserError, match=r"1 tensor\(s\) do not fit config.json: missing lm_head.weight"):
            load_params(folder, policy, None)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"cut off", "not a full safetensors file"),
        (INDEX, b'{"weight_map": {"a": "model-1.safetensors"}}', "do not exist: model-1.safetensors"),
        (INDEX, b'{"weight_map": {"a": "../b.safetensors"}}', "do not exist: ../b.safetensors"),
        (INDEX, b"{}", "field 'weight_map' is missing"),
        ("none", b"", f"no model.safetensors and no {INDEX}"),
        ("config.json", None, "no such file"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[1]", "expected a JSON object, got list"),
    ],
)
def test_unusable_file_is_one_line(tiny, folder, name, content, words):
    (folder / "model.safetensors").unlink()
    (folder.parent / "b.safetensors").write_bytes(b"")
    (folder / name).write_bytes(content) if content is not None else (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        read_hf_config(folder)
        load_params(folder, tiny.policy, None)
    assert words in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_lack_their_end_are_refused(tiny, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=f"^{path}: not a full safetensors file .*; copy it again$"):
        load_params(folder, tiny.policy, None)


def test_folder_of_pickled_weights_says_how_to_convert_them(tiny, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"^{folder}: only PyTorch .bin weights; convert them .*$"):
        load_params(folder, tiny.policy, None)


def test_weights_hash_depends_on_contents_only(tmp_path):
    """Tensors of three times what is read of each: a block at the beginning, the middle and the end."""
    count = 3 * HASHED_BLOCK // 2  # of two bytes
    rng, numbers = np.random.default_rng(0), iter(range(99))
    tensors = {f"t{n}": rng.integers(0, 9, count).astype(np.float16) for n in range(3)}
    tensors["small"] = np.ones(3, np.float32)

    def hashed(*files):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        places = {}
        for n, shard in enumerate(files):
            name = f"model-{n}.safetensors" if len(files) > 1 else "model.safetensors"
            save_file(shard, folder / name, metadata={"by": folder.name})
            places |= dict.fromkeys(shard, name)
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        return weights_hash(folder)

    expected = hashed(tensors)
    halves = [{"t0": tensors["t0"], "small": tensors["small"]}, {"t1": tensors["t1"], "t2": tensors["t2"]}]
    assert hashed(*halves) == expected == hashed(tensors)
    for index in (0, count // 2, count - 1):
        changed = tensors["t2"].copy()
        changed[index] += 1
        assert hashed(tensors | {"t2": changed}) != expected
    for small in (np.array([1, 1, 2], np.float32), np.ones((3, 1), np.float32)):
        assert hashed(tensors | {"small": small}) != expected
    renamed = {"u" if name == "small" else name: tensor for name, tensor in tensors.items()}
    assert hashed(renamed) != expected


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_truncated_weights_have_no_hash(folder, left):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=r"^.*model.safetensors: not a full safetensors file.*$"):
        weights_hash(folder)
