"""init-tokens: which rows of a model change, and what is refused."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tools_rig import chat_tokenizer

from calibadv_jax import cli
from calibadv_jax.snapshots.huggingface import read_hf_config
from calibadv_jax.snapshots.weight_files import INDEX

CALL = ["<tool_call>", "</tool_call>"]


@pytest.fixture
def model(tmp_path):
    """A folder with embeddings and an output head in files of their own, in bfloat16, and another tensor."""
    folder = tmp_path / "model"
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "unknown": 7}')
    (folder / "README.md").write_text("the model's own card")
    draw = np.random.default_rng(0)
    tables = draw.normal(3, 0.5, size=(2, len(tokenizer) + 3, 400)).astype(ml_dtypes.bfloat16)
    norm = np.ones(4, np.float32)
    save_file({"model.embed_tokens.weight": tables[0], "model.norm.weight": norm}, folder / "a.safetensors")
    save_file({"lm_head.weight": tables[1]}, folder / "b.safetensors")
    names = {"model.embed_tokens.weight": "a", "model.norm.weight": "a", "lm_head.weight": "b"}
    weight_map = {name: f"{file}.safetensors" for name, file in names.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def run(*words):
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["init-tokens", *map(str, words)])
    return end.value.code or 0


def test_rows_are_drawn_as_the_others_are_and_nothing_else_changes(model, tmp_path, capsys):
    before, output = tensors(model), tmp_path / "out"
    assert run(model, "--tokens", *CALL, "--output", output) == 0
    assert f"written to {output}" in capsys.readouterr().out
    after = tensors(output)
    rows = chat_tokenizer().convert_tokens_to_ids(CALL)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.delete(after[name], rows, 0), np.delete(before[name], rows, 0))
        first, second = after[name][rows].astype(np.float32)
        # The table has mean 3 and deviation 0.5 in each of its 400 dimensions.
        assert abs(first.mean() - 3) < 0.1 and abs(first.std() - 0.5) < 0.1
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.2
        assert not np.array_equal(first, before[name][rows[0]].astype(np.float32))
    np.testing.assert_array_equal(after["model.norm.weight"], before["model.norm.weight"])
    assert read_hf_config(output) == read_hf_config(model)
    for name in ("tokenizer.json", "chat_template.jinja", INDEX):
        assert (output / name).read_text() == (model / name).read_text()
    assert '"<tool_call>"' in (output / "README.md").read_text()
    assert run(model, "--tokens", *CALL, "--output", tmp_path / "again") == 0
    np.testing.assert_array_equal(tensors(tmp_path / "again")["lm_head.weight"], after["lm_head.weight"])


def head_of(model, tensor):
    save_file({"lm_head.weight": tensor}, model / "b.safetensors")


def rename_tables(model):
    """As in a model of another family."""
    (model / INDEX).unlink()
    save_file({"transformer.wte.weight": np.ones((400, 4), np.float32)}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("tokens", "damage", "message"),
    [
        (["<tool>"], None, "'<tool>': no added token of the tokenizer; these are: .*<tool_call>"),
        (["a"], None, "'a': no added token"),
        (CALL, lambda model: (model / "b.safetensors").write_bytes(b"x"), "b.safetensors"),
        (CALL, lambda model: (model / "b.safetensors").unlink(), "names files that do not exist"),
        (CALL, lambda model: (model / "config.json").unlink(), "config.json: no such file"),
        (CALL, rename_tables, "no tensor is named embed_tokens.weight or lm_head.weight"),
        (CALL, lambda model: head_of(model, np.ones((9, 4), np.float32)), r"lm_head.weight is F32 \[9, 4\]"),
        (CALL, lambda model: head_of(model, np.ones((400, 4), np.int8)), r"lm_head.weight is I8 \[400, 4\]"),
    ],
)
def test_what_is_refused_leaves_no_folder(model, tmp_path, capsys, tokens, damage, message):
    if damage:
        damage(model)
    assert run(model, "--tokens", *tokens, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"], error
    assert re.search(message, error), error


def test_existing_output_is_kept(model, tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    assert run(model, "--tokens", *CALL, "--output", output) == 2
    assert "exists already; choose another --output" in capsys.readouterr().err and not list(output.iterdir())
