"""From a run's folder to a HuggingFace folder, by the entry point's own function."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from config_rig import changed
from transformers import AutoTokenizer, GenerationConfig

from calibadv_jax.commands import export as export_command
from calibadv_jax.commands.export import export
from calibadv_jax.config import Config, ExportConfig, RunConfig, dump_config, load_config
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.fingerprints import describe_policy
from calibadv_jax.run.model import find_policy
from calibadv_jax.snapshots.checkpoint import CheckpointStore
from calibadv_jax.snapshots.huggingface import load_params, save_folder
from calibadv_jax.snapshots.publish import SnapshotStore


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """The folder of a run with checkpoints of steps 1 and 2 and a snapshot of version 2; params by step."""
    folder = tmp_path_factory.mktemp("made") / "run"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text(json.dumps(tiny.config))
    (folder / "policy" / "tokenizer.json").write_text("{}")
    params = {step: jax.tree.map(lambda leaf, k=step: leaf * k, tiny.params) for step in (1, 2)}
    store = CheckpointStore(folder / "checkpoints", keep=2)
    for step, values in params.items():
        store.save(step, {"params": values, "updates": jnp.int32(0)}, {})
    store.close()
    snapshots = SnapshotStore(folder / "snapshots", keep=1, dtype=jnp.bfloat16)
    snapshots.publish(2, params[2], hf_config=tiny.config, tokenizer_hash="")
    return folder, params


@pytest.fixture
def run(made, tmp_path):
    """(config, params by step) of a copy of the run, which a test may change."""
    original, params = made
    folder = shutil.copytree(original, tmp_path / "run")
    output = ExportConfig(output=str(tmp_path / "hf"), dtype="float32")
    return Config(run=RunConfig(dir=str(folder)), export=output), params


def test_source_is_newest_named_step_or_snapshot(tiny, run, tmp_path):
    config, params = run
    elsewhere, output = replace(config, run=RunConfig(dir=str(tmp_path / "another"))), tmp_path / "hf"

    def exported(config, **keys):
        assert export(changed(config, export=keys)) == output
        return load_params(output, tiny.policy, None)

    assert tiny.same(exported(config, max_shard_gib=4000 / 2**30), params[2])
    assert len(list(output.glob("*.safetensors"))) > 1 and (output / "tokenizer.json").is_file()
    assert tiny.same(exported(elsewhere, source=f"{config.run.dir}/checkpoints/1"), params[1])
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params[2])
    assert tiny.same(exported(elsewhere, source=f"{config.run.dir}/snapshots/v000002"), rounded)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "evaluation.json: not valid JSON"),
        ("{run}/snapshots/v000002", "differs from manifest.json"),
        ("{run}/checkpoints/3", "no complete checkpoint of step 3"),
        ("{run}/snapshots/v000009", "v000009: not a complete snapshot"),
        ("{run}/nothing", "no complete checkpoint there"),
        ("{run}/../nothing/checkpoints", "no complete checkpoint there"),
    ],
)
def test_unusable_source_or_file_is_one_line(run, tmp_path, source, words):
    config, _ = run
    tensor = Path(config.run.dir) / "snapshots/v000002/params/embed.embedding/0.0"
    tensor.write_bytes(tensor.read_bytes()[::-1])
    (tmp_path / "evaluation.json").write_text("{")
    keys = {"evaluate": {"output": f"{tmp_path}/evaluation.json"}}
    with pytest.raises(UserError) as caught:
        export(changed(config, export={"source": source.format(run=config.run.dir)}, **keys))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def card_of(folder):
    """(front matter, text) of a model card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_card_describes_training_and_prompt(run, tmp_path, monkeypatch):
    """From the config of the run's last start, not from the export's own."""
    config, _ = run
    trained = changed(
        config,
        policy={"path": "Qwen/Qwen2.5-3B", "init": {"vocab_size": 151936, "num_hidden_layers": 36}},
        data={"train": ["/home/someone/questions.jsonl", "more.jsonl"]},
        advantage={"target_ratio": 0.5},
        prompt={"template": "Ask {question} | now"},
        retriever={"url": "http://10.0.0.1:8000"},
    )
    folder = tmp_path / "run/configs"
    folder.mkdir()
    (folder / "9.yaml").write_text(dump_config(config))
    (folder / "10.yaml").write_text(dump_config(trained))
    first = changed(config, export={"source": f"{config.run.dir}/checkpoints/1"})
    export(first)
    front, text = card_of(tmp_path / "hf")
    assert "then `<search>…</search>` or another" in text
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["calibadv", "search-agent", "reinforcement-learning"],
        "base_model": "Qwen/Qwen2.5-3B",
    }
    assert "\n# run\n" in text
    assert "Not evaluated." in text
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))
    assert (rows["step"], rows["began with"], rows["algorithm"]) == ("1", "Qwen2.5-3B", "calibadv")
    assert rows["training questions"] == "questions.jsonl, more.jsonl"
    assert rows["advantage.target_ratio"] == "0.5"
    assert "151936" not in text and "36" not in rows.values(), "sizes of a policy that was not made"
    assert "    Ask {question} | now" in text and rows["prompt.template"] == r"Ask {question} \| now"
    assert "someone" not in text and "10.0.0.1" not in text and str(tmp_path) not in text
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen2.5-3B").mkdir(parents=True)
    export(first)
    assert "base_model" not in card_of(tmp_path / "hf")[0]  # a folder here


@pytest.mark.parametrize(("source", "step"), [("", 2), ("snapshots/v000002", 2), ("checkpoints/1", 1)])
def test_card_has_scores_of_this_policy_only(run, tmp_path, source, step):
    config, _ = run
    place, path = f"{config.run.dir}/{source}", tmp_path / "evaluation.json"
    here = changed(config, export={"source": source and place}, evaluate={"output": str(path)})
    policy = find_policy(Path(place if source else f"{place}checkpoints"))
    evaluated = describe_policy(policy.at_step())
    assert evaluated["step"] == step
    scores = {"em": 0.5, "questions": 9.0, "trajectories": 9.0, "failed": 0.0}
    report = {"policy": evaluated, "method": "agent", "samples": 1, "confidence": 0.95}
    report |= {"scores": {"0": {"nq": scores}}, "intervals": {"0": {"nq": {"em": [0.25, 0.75]}}}}
    path.write_text(json.dumps(report))
    export(here)
    assert "| 0 | nq | 0.500 [0.250, 0.750] | 9 | 9 | 0 |" in card_of(tmp_path / "hf")[1]
    path.write_text(json.dumps(report | {"policy": evaluated | {"step": 7}}))
    export(here)  # over the former export, card and all
    assert "0.500" not in card_of(tmp_path / "hf")[1]


def test_card_names_the_variable_of_a_key(run, tmp_path, monkeypatch):
    config, _ = run
    monkeypatch.setenv("MY_KEY", "hunter2")
    (tmp_path / "run.yaml").write_text("tools: [search, {mcp: {command: 'srv --key ${oc.env:MY_KEY}'}}]")
    tools = load_config(tmp_path / "run.yaml").tools
    for number in range(2):  # without a kept config, and with one
        export(replace(config, tools=tools))
        card = (tmp_path / "hf/README.md").read_text()
        assert "hunter2" not in card and "srv --key ${oc.env:MY_KEY}" in card
        (tmp_path / "run/configs").mkdir(exist_ok=True)
        (tmp_path / f"run/configs/{number}.yaml").write_text(dump_config(replace(config, tools=tools)))


def test_export_has_the_tokenizer_and_its_chat_template(run, tmp_path):
    config, _ = run
    tokenizer = build_word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "run/policy")
    export(config)
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert exported.get_vocab() == tokenizer.get_vocab()
    assert exported.apply_chat_template([{"content": "who"}], tokenize=False) == "[who]"


def test_export_of_a_policy_with_tool_calls(run, tmp_path):
    """The chat template goes along, readers stop at the end of a turn, the card says how to call."""
    config, _ = run
    tokenizer = build_word_tokenizer(has_tool_calls=True)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "run/policy")
    export(changed(config, rollout={"protocol": "tool_calls"}, reward={"answer_from": "box"}))
    template = (tmp_path / "run/policy/chat_template.jinja").read_bytes()
    assert (tmp_path / "hf/chat_template.jinja").read_bytes() == template
    ends = json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends and len(ends) == 2
    _, card = card_of(tmp_path / "hf")
    assert "apply_chat_template" in card and "`search`" in card and "<search>" not in card
    assert "in \\boxed{}." in card and "    {question}" in card


def test_command_exports_the_whole_policy_unless_asked_for_adapters(run, tmp_path, monkeypatch, capsys):
    config, _ = run
    asked = []
    monkeypatch.setattr(export_command, "export", lambda _, adapter: asked.append(adapter) or tmp_path / "hf")
    export_command.run(config)
    export_command.run(config, adapter=True)
    assert asked == [False, True]
    assert capsys.readouterr().out == f"written to {tmp_path / 'hf'}\n" * 2


def test_export_of_many_files_has_an_index(tiny, run, tmp_path):
    config, params = run
    export(changed(config, export={"max_shard_gib": 4000 / 2**30}))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    direct = tmp_path / "direct"
    save_folder(params[2], tiny.config, direct, "float32", None, max_shard_bytes=4000)
    assert index == json.loads((direct / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert 1 < len(names) < len(index["weight_map"])
    assert names == {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert tiny.same(load_params(tmp_path / "hf", tiny.policy, None), params[2])


def test_export_samples_as_in_training(tiny, run, tmp_path):
    """The first policy's temperature and penalties are not those of the training; its tokens are."""
    config, _ = run
    former = {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "pad_token_id": 3,
        "eos_token_id": 1,
    }
    (tmp_path / "run/policy/config.json").write_text(json.dumps(tiny.config | {"pad_token_id": 7}))
    (tmp_path / "run/policy/generation_config.json").write_text(json.dumps(former))
    export(changed(config, rollout={"temperature": 0.9, "top_p": 0.95}))
    written = json.loads((tmp_path / "hf/generation_config.json").read_text())
    sampling = {"do_sample": True, "repetition_penalty": 1.0, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
    assert written == {"eos_token_id": tiny.config["eos_token_id"], "pad_token_id": 3} | sampling
    (tmp_path / "run/policy/generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    (tmp_path / "run/policy/config.json").write_text(json.dumps(tiny.config | {"eos_token_id": 4}))
    export(changed(config, rollout={"temperature": 0.9, "top_p": 0.95}))
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == [4, 9]
    loaded = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (loaded.top_k, loaded.top_p, loaded.do_sample) == (0, 0.95, True)
    export(changed(config, rollout={"temperature": 0.0}))
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["do_sample"] is False


@pytest.mark.parametrize("adapter", [False, True])
def test_output_of_another_run_or_hand_is_refused(run, tmp_path, adapter):
    config, _ = run
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/README.md").write_text("My notes.")
    with pytest.raises(UserError, match="holds README.md, which is not an export's"):
        export(config)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/sft.yaml").touch()
    key = "adapter_output" if adapter else "output"
    there = changed(config, export={key: str(tmp_path / "old/hf")})
    with pytest.raises(UserError, match=rf"^export.{key}=.*/old/hf lies in the folder of another run, "):
        export(there, adapter)
    assert not (tmp_path / "old/hf").exists()
