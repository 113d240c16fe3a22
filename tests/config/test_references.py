"""What is kept of a config refers to the environment, and never holds what is there."""

import json
from dataclasses import replace

import pytest
import yaml

from calibadv_jax import cli
from calibadv_jax.config import Config, dump_config, load_config, parse_config
from calibadv_jax.config.kept import add_start
from calibadv_jax.config.load import kept_values
from calibadv_jax.config.trust import Trust
from calibadv_jax.core import secrets
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.secrets import redact
from calibadv_jax.metrics.console import Console

TRUSTED = Trust(is_given=True)
COMMAND = "srv --key ${oc.env:MY_KEY}"
TEXT = f"""
run: {{dir: "${{oc.env:MY_SCRATCH}}/run"}}
tools: [search, {{mcp: {{command: "{COMMAND}"}}}}]
reward: {{judge: {{url: "http://judge/${{oc.env:MY_KEY}}", model: judge}}}}
data: {{train: ["${{oc.env:MY_SCRATCH}}/a.jsonl", "${{oc.env:MY_OTHER,b.jsonl}}"]}}
prompt: {{template: 'for \\${{x}}: {{question}}'}}
policy: {{init: {{note: '${{oc.decode:"${{oc.env:MY_KEY}}"}}'}}}}
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(secrets, "_references", {})


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2")
    monkeypatch.setenv("MY_SCRATCH", str(tmp_path))
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_kept_config_has_references_and_resolves_equally(file, tmp_path, monkeypatch):
    config = load_config(file)
    assert config.tools[1].mcp.command == "srv --key hunter2"
    kept = dump_config(config)
    assert "hunter2" not in kept and str(tmp_path) not in kept
    values = yaml.safe_load(kept)
    assert values["tools"][1]["mcp"]["command"] == COMMAND
    assert values["export"]["output"] == "${oc.env:MY_SCRATCH}/run/hf"  # by way of run.dir
    assert values["data"]["train"] == ["${oc.env:MY_SCRATCH}/a.jsonl", "${oc.env:MY_OTHER,b.jsonl}"]
    assert parse_config(kept, "kept", trust=TRUSTED) == config
    assert parse_config(json.dumps(kept_values(config)), "kept", trust=TRUSTED) == config
    monkeypatch.setenv("MY_KEY", "another")
    assert parse_config(kept, "kept", trust=TRUSTED).tools[1].mcp.command == "srv --key another"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match=r"^kept: .*'MY_KEY' not found"):
        parse_config(kept, "kept", trust=TRUSTED)


def test_changed_values_are_kept_as_they_are(file):
    config = load_config(file, ["reward.judge.url=http://judge/hunter2"])
    assert kept_values(config)["reward"]["judge"]["url"] == "http://judge/${oc.env:MY_KEY}"
    elsewhere = replace(config, run=replace(config.run, dir="elsewhere"))
    assert kept_values(elsewhere)["run"]["dir"] == "elsewhere"
    assert kept_values(Config())["export"]["output"] == "${run.dir}/hf"  # it was not loaded


def test_run_started_from_the_kept_config_follows_it(file, tmp_path):
    run = tmp_path / "run"
    add_start(run, dump_config(load_config(file)), {})
    again = load_config(run / "configs/0.yaml", trust=TRUSTED)
    assert again == load_config(file)
    other = load_config(run / "configs/0.yaml", ["run.dir=new"], trust=TRUSTED)
    assert other.export.output == "new/hf" and other.tools == again.tools


def test_messages_name_the_variable(file, capsys):
    load_config(file)
    console = Console()
    console.warn("srv --key hunter2 has ended")
    console.say("srv --key hunter2")
    with pytest.raises(SystemExit):
        cli.run_and_exit(lambda: (_ for _ in ()).throw(UserError("srv --key hunter2: no such program")))
    out, errors = capsys.readouterr()
    assert "hunter2" not in out + errors and (out + errors).count(COMMAND) == 3


def test_only_secrets_are_replaced_in_messages(tmp_path, monkeypatch):
    monkeypatch.setenv("PROJECT", "search")
    path = tmp_path / "run.yaml"
    path.write_text("log: {project: '${oc.env:PROJECT}'}")
    kept = kept_values(load_config(path))
    assert kept["log"]["project"] == "${oc.env:PROJECT}" and kept["tools"][0]["name"] == "search"
    plain = {"DTYPE": "bfloat16", "API_TOKEN": "on", "PORT_KEY": "8000", "FOLDER": "/scratch/user1/runs"}
    for name, value in plain.items():
        secrets.remember(name, value)
        assert redact(value) == value
    # One may be part of another.
    for name, value in (("SHORT_KEY", "abcd"), ("LONG_KEY", "abcdef"), ("SERVER", "sk-1a2b3c4d5e6f7g8h")):
        secrets.remember(name, value)
    hidden = "${oc.env:LONG_KEY} ${oc.env:SHORT_KEY} ${oc.env:SERVER}"
    assert redact("abcdef abcd sk-1a2b3c4d5e6f7g8h") == hidden
