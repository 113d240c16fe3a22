"""Run folders that somebody else made: no command runs, contacts, reads or writes more than it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
import yaml
from http_rig import Handler, serving
from omegaconf import OmegaConf
from record_rig import keep
from safetensors.numpy import save_file
from tools_rig import chat_tokenizer

from calibadv_jax import cli
from calibadv_jax.config import Config, load_config
from calibadv_jax.config.load import dump_config
from calibadv_jax.config.trust import USES, Trust
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.core.errors import UserError
from calibadv_jax.evaluation.records import FIELDS
from calibadv_jax.rollout_store.reader import find_step

SECRET = "hunter2hunter2"
# Commands that read no config of a run, or only show it: they succeed on any run, whatever its config says.
READING = ("inspect", "report", "compare", "select-rollouts", "prepare-data", "init-tokens", "configs")
CONFIG = "--config=gift/configs/0.yaml"
# Command -> its arguments, with the given run in gift/. A new command is added here, or the test fails.
ARGUMENTS = {
    **{command: [CONFIG] for command in cli.COMMANDS},
    "doctor": [CONFIG, "--offline"],
    "plan": [CONFIG, "--tpu=v5e-16", "--estimate"],
    "ask": ["--policy=gift", "who?"],
    "serve": ["--policy=gift", "--port=0"],
    "replay": ["gift"],
    "audit": ["gift"],
    "inspect": ["gift"],
    "report": ["gift", "--output=own/report.html"],
    "compare": ["gift/evaluation.jsonl", "gift/other.jsonl"],
    "select-rollouts": ["gift", "--output=own/demonstrations.jsonl", "--min-score=0"],
    "prepare-data": ["gift/train.jsonl", "--output=own/data.jsonl"],
    "init-tokens": ["gift/model", "--tokens=<tool_call>", "--output=own/model"],
    "configs": [],
}
# What each command would do by the run's config, and nothing else: its refusal names all of it.
TOOLS = ["import given_tool:Tool (tools)", "start the program 'touch mark' (tools)", "contact http://far/mcp"]
TOOLS += ["import given_format:Format (tool_calls.format)"]
REWARD = ["import given_reward:score (reward.answer)"]
CREDIT = ["import given_advantage:estimate (advantage.name)", "import given_loss:loss (loss.name)"]
RETRIEVER = ["the token RETRIEVER_TOKEN (retriever.url)", "from the environment (retriever.url)"]
WORKERS = ["start vLLM with '--trust-remote-code' (sampler.worker_args)"]
MIRROR = ["fetch and copy the run from and to s3://far/run (run.mirror)"]
LINK = ["write through the link", "retriever.log to "]
EVALUATION = ["write /elsewhere/evaluation.json (evaluate.output)"]
DATA = ["download the data far/questions (data.eval)"]
EXPORT = ["write /elsewhere/hf (export.output)"]
ASK = [*TOOLS, *RETRIEVER, *WORKERS]
RUN = [*ASK, *REWARD, *MIRROR, *LINK, *EVALUATION, *DATA]
DISTILLATION = ["download the model far/teacher (teacher.policy)"]
ALL = [*RUN, *CREDIT, *EXPORT, *DISTILLATION, "project 'far' (log.backends)"]
DEEDS = {
    **dict.fromkeys(("quickstart", "sft", "train", "doctor"), ALL),
    "evaluate": RUN,
    "export": [*MIRROR, *LINK, *EXPORT],
    "coverage": [*RETRIEVER, *MIRROR, *LINK, *DATA],
    "demonstrate": [*TOOLS, *RETRIEVER, *MIRROR, *LINK, *DATA],
    "plan": CREDIT,
    "ask": ASK,
    "serve": ASK,
    "replay": [*REWARD, *CREDIT],
    "audit": [*REWARD, *CREDIT],
}
# The same for what cannot stand beside that in one config.
INDEX = [
    "open an index of the kind given_index:Own, which runs code (retriever.kind)",
    "build the index /elsewhere/index (retriever.index)",
    "download the model far/reranker (retriever.reranker)",
]
WORKER = ["contact http://far-worker:8000 (sampler.urls)"]
JUDGE = ["contact http://far-judge (reward.judge.url)"]
POLICY = ["download the model far/policy (policy.path)"]
COLD_START = ["download the model far/first (sft.init_from)"]
ADAPTER = ["write /elsewhere/adapter (export.adapter_output)"]
DEMONSTRATIONS = ["write /elsewhere/demonstrations.jsonl (sft.demonstrations)"]
REST = [
    "join processes at far:1234",
    "write /elsewhere/world (world.dir)",
    "write /elsewhere/sft (sft.output)",
]
REST += ["listen on 0.0.0.0:9464 (log.prometheus)"]
TEACHER = ["contact http://far-teacher (teacher.url)"]
SHOWN = ["download the data far/demonstrations (demonstrations.file)"]
EVERYTHING = [*INDEX, *WORKER, *JUDGE, *TEACHER, *POLICY, *COLD_START, *ADAPTER, *REST, *SHOWN]
OTHER_DEEDS = {
    **dict.fromkeys(("quickstart", "sft", "train", "doctor"), EVERYTHING),
    "evaluate": [*INDEX, *WORKER, *JUDGE, *POLICY],
    "export": ADAPTER,
    "coverage": INDEX,
    "demonstrate": [*INDEX, *POLICY, *COLD_START, "write /elsewhere/sft (sft.output)", *DEMONSTRATIONS],
    "ask": [*INDEX, *WORKER],
    "serve": [*INDEX, *WORKER],
    "plan": [],
    "replay": [],
    "audit": [],
}


class Recorder(Handler):
    """A server that must not be asked."""

    requests: list[str] = []

    def do_GET(self):
        self.requests.append(f"{self.path} {self.headers}")
        self.reply(404, {})

    do_POST = do_GET


@pytest.fixture
def server():
    Recorder.requests.clear()
    with serving(Recorder) as url:
        yield url


def hostile_values(url):
    """Everything at once that a stranger could write into the config of a run."""
    return {
        "tools": [
            {"name": "given_tool:Tool"},
            {"mcp": {"command": "touch mark"}},
            {"mcp": {"url": "http://far/mcp"}},
        ],
        "tool_calls": {"format": "given_format:Format"},
        "retriever": {"url": url + "/${oc.env:MY_SECRET}", "patience": 0.1},
        "reward": {"answer": "given_reward:score"},
        "advantage": {"name": "given_advantage:estimate"},
        "loss": {"name": "given_loss:loss", "importance_cap": 2.0},
        "teacher": {"policy": "far/teacher", "acts_on": "loss"},
        "sampler": {"name": "vllm", "worker_args": ["--trust-remote-code"]},
        "run": {"dir": "old", "mirror": "s3://far/run"},
        "evaluate": {"output": "/elsewhere/evaluation.json"},
        "export": {"output": "/elsewhere/hf"},
        "data": {"train": "old/train.jsonl", "eval": "far/questions"},
        "log": {"backends": ["wandb"], "project": "far"},
    }


def other_hostile_values():
    return {
        "policy": {"path": "far/policy"},
        "retriever": {
            "corpus": "gift/train.jsonl",
            "index": "/elsewhere/index",
            "kind": "given_index:Own",
            "reranker": "far/reranker",
            "rerank_candidates": 10,
        },
        "sampler": {"name": "vllm", "urls": ["http://far-worker:8000"]},
        "reward": {"answer": "judge", "judge": {"url": "http://far-judge", "model": "m"}},
        "teacher": {"url": "http://far-teacher", "model": "m"},
        "demonstrations": {"file": "far/demonstrations"},
        "distributed": {"coordinator_address": "far:1234", "num_processes": 2, "process_id": 0},
        "world": {"dir": "/elsewhere/world"},
        "sft": {
            "init_from": "far/first",
            "output": "/elsewhere/sft",
            "demonstrations": "/elsewhere/demonstrations.jsonl",
        },
        "export": {"adapter_output": "/elsewhere/adapter"},
        "log": {"backends": ["prometheus"], "prometheus": "0.0.0.0:9464"},
        "run": {"dir": "gift"},
    }


@pytest.fixture
def gift(tmp_path, monkeypatch, server):
    """Returns the folder of a given run, with its records, in the current folder beside its modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("RETRIEVER_TOKEN", SECRET)
    for part in ("tool", "format", "reward", "advantage", "loss"):
        Path(f"given_{part}.py").write_text("open('mark', 'w').close()\n")
    Path("own").mkdir()
    folder = Path("gift")
    keep(folder)
    (folder / "configs").mkdir()
    (folder / "configs/0.yaml").write_text(yaml.safe_dump(hostile_values(server)))
    (folder / "configs/0.json").write_text("{}")
    path = find_step(folder, 7)
    table = pq.read_table(path)
    metadata = table.schema.metadata
    config = OmegaConf.merge(json.loads(metadata[b"config"]), hostile_values(server))
    config_json = json.dumps(OmegaConf.to_container(config)).encode()
    pq.write_table(table.replace_schema_metadata({**metadata, b"config": config_json}), path)
    (folder / "metrics.jsonl").write_text('{"step": 7, "reward/f1": 0.5}\n')
    (folder / "policy").mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "policy/tokenizer.json"))
    write_model(folder / "model")
    (folder / "checkpoints").mkdir()
    scores = {"f1": 1.0, "em": 1.0, "cover_em": 1.0}
    row = dict.fromkeys(FIELDS, "") | {"id": "1", "temperature": "0", "data_source": "a", "scores": scores}
    for name in ("evaluation", "other"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text('{"id": "1", "question": "Who?", "golden_answers": ["Ann"]}\n')
    (folder / "retriever.log").symlink_to(tmp_path / "own/notes")
    return folder


def write_model(folder):
    """A HuggingFace folder whose files name code to load the tokenizer with."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    code = {"auto_map": {"AutoTokenizer": ["given_tool.Tool", "given_tool.Tool"]}}
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | code))
    embedding = np.ones((len(tokenizer), 4), np.float32)
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")


def tree(folder):
    """Return every file below a folder with its content, and every link."""
    files = {}
    for path in sorted(folder.rglob("*")):
        is_own_output = path.is_relative_to(folder / "own") or "__pycache__" in path.parts
        if not is_own_output and (path.is_file() or path.is_symlink()):
            files[path] = path.read_bytes() if path.is_file() else b""
    return files


def run(command, *words):
    """Run a command in this process; return its exit status."""
    if command == "inspect":  # it would serve for ever
        Site(Path("gift")).get("data/index.json")
        return 0
    with pytest.raises(SystemExit) as end:
        cli.calibadv([command, *words])
    return end.value.code or 0


def test_every_command_is_tried():
    assert ARGUMENTS.keys() == {*cli.COMMANDS, *cli.TOOLS}
    assert {*DEEDS, *READING} == ARGUMENTS.keys()
    assert USES.keys() <= DEEDS.keys()


@pytest.mark.parametrize("command", DEEDS)
def test_command_names_all_it_would_do_and_does_nothing(gift, tmp_path, capsys, command):
    before = tree(tmp_path)
    assert run(command, *ARGUMENTS[command]) == 2
    error = capsys.readouterr().err
    for deed in DEEDS[command]:
        assert deed in error
    others = [deed for deed in ALL if deed not in DEEDS[command]]
    assert not [deed for deed in others if deed in error]
    assert f"calibadv {command} would" in error and "--trust-run if you trust whoever made the run" in error
    assert error.count("\n") == 1 and SECRET not in error
    assert tree(tmp_path) == before and not Recorder.requests
    assert not [name for name in sys.modules if name.startswith("given_")]


@pytest.mark.parametrize("command", OTHER_DEEDS)
def test_command_names_its_other_deeds_too(gift, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (gift / "retriever.log").unlink()
    kept = gift / "configs/0.yaml"
    kept.write_text(yaml.safe_dump(other_hostile_values()))
    before = tree(tmp_path)
    if not OTHER_DEEDS[command]:
        assert load_config(kept, trust=Trust(command))
        return
    assert run(command, *ARGUMENTS[command]) == 2
    error = capsys.readouterr().err
    deeds = error.partition(" would ")[2].partition(". A run may")[0].split("; ")
    missing = [deed for deed in OTHER_DEEDS[command] if not any(deed in named for named in deeds)]
    assert not missing and len(deeds) == len(OTHER_DEEDS[command]), deeds
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", READING)
def test_reading_command_only_writes_its_own_output(gift, tmp_path, capsys, command):
    if command == "report":
        pytest.importorskip("matplotlib")
    before = tree(tmp_path)
    status = run(command, *ARGUMENTS[command])
    assert status == 0, capsys.readouterr().err
    assert tree(tmp_path) == before and not Recorder.requests
    assert not [name for name in sys.modules if name.startswith("given_")]


@pytest.mark.parametrize("words", [["--print"], ["--page=own/page.html"]])
def test_groups_of_a_given_run_are_shown_and_nothing_else_is_done(gift, tmp_path, capsys, words):
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["inspect", "gift", *words])
    assert not end.value.code, capsys.readouterr().err
    assert tree(tmp_path) == before and not Recorder.requests
    assert not [name for name in sys.modules if name.startswith("given_")]


@pytest.mark.medium
def test_reader_of_printed_groups_may_end_early(gift):
    """As `head`; the pipe is closed before the program writes."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "calibadv_jax", "inspect", "gift", "--print"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.PIPE_CLOSED, "")


def test_values_of_the_user_are_not_asked_about(gift, capsys):
    """One word for each deed, or a config of the user's own with the same values."""
    words = [
        "tools=[search]",
        "tool_calls.format=auto",
        "retriever.url=http://127.0.0.1:1",
        "sampler.name=jax",
    ]
    kept = Path("gift/configs/0.yaml")
    config = load_config(kept, words, trust=Trust("ask", folders={str(kept): Path("gift")}))
    assert config.retriever.url == "http://127.0.0.1:1"
    own = Path("own.yaml")
    own.write_text(kept.read_text())
    assert load_config(own).retriever.url.endswith(SECRET)
    with pytest.raises(UserError, match="import given_tool:Tool"):
        load_config([own, kept])
    base = Path("base.yaml")
    base.write_text("base: gift/configs/0.yaml")
    with pytest.raises(UserError, match="gift/configs/0.yaml: by this config of a run, this command would"):
        load_config(base)


def test_trusted_run_is_used(gift, capsys):
    assert run("replay", "gift", "--trust-run") == 2
    assert "given_reward" in capsys.readouterr().err  # it has no such function
    assert Path("mark").exists()
    config = load_config("gift/configs/0.yaml", trust=Trust("evaluate", is_given=True))
    assert config.retriever.url.endswith(SECRET) and len(config.tools) == 3


def test_own_runs_need_no_flag(tmp_path, monkeypatch):
    """Neither with a service on this machine, nor with a child over an index that is there."""
    monkeypatch.delenv("RETRIEVER_TOKEN", raising=False)
    for name, retriever in (
        ("a", "retriever.url=http://127.0.0.1:8000"),
        ("b", "retriever.url=[http://localhost:8000/, 'http://[::1]:1']"),
        ("c", f"retriever={{corpus: {tmp_path}/corpus.jsonl, index: {tmp_path}/index}}"),
    ):
        run_dir = tmp_path / name
        own = tmp_path / f"{name}.yaml"
        own.write_text("log: {project: '${oc.env:HOME}'}\nreward: {answer: 'examples.own_reward:reward'}\n")
        (tmp_path / "index").mkdir(exist_ok=True)
        (tmp_path / "index/manifest.json").touch()
        config = load_config(own, [f"run.dir={run_dir}", retriever])
        (run_dir / "configs").mkdir(parents=True)
        kept = run_dir / "configs/0.yaml"
        kept.write_text(dump_config(config))
        kept.with_suffix(".json").write_text("{}")
        for command in ("ask", "serve", "plan", "export"):
            assert load_config(kept, trust=Trust(command)).retriever == config.retriever
        assert load_config(own, [f"run.dir={run_dir}", retriever]) == config  # a resumed training


def test_config_of_defaults_does_nothing(tmp_path):
    kept = tmp_path / "run/configs/0.yaml"
    kept.parent.mkdir(parents=True)
    kept.with_suffix(".json").write_text("{}")
    kept.write_text(dump_config(load_config("cpu", [f"run.dir={tmp_path}/run"])))
    assert load_config(kept).tools == Config().tools
