"""Places in a config: URLs, the paths of a run that was moved, the configs that a run keeps."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from config_rig import changed

from calibadv_jax import cli
from calibadv_jax.commands.export import training_config
from calibadv_jax.config import (
    Config,
    McpConfig,
    RetrieverConfig,
    dump_config,
    kept,
    load_config,
    parse_config,
)
from calibadv_jax.config.kept import add_start, newest_start, refuse_other_run, start_files
from calibadv_jax.contrib.cli import ask
from calibadv_jax.contrib.report.runs import read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.model import find_policy

ROOT = Path(__file__).resolve().parents[2]
WHOLE = dump_config(Config())
IDENTITY = {"data.content": "a", "policy.config": "b", "policy.vocabulary": "c"}


@pytest.mark.parametrize(
    "url", ["http://h:8000/retrieve", "http://h:8000/retrieve/", ["http://h:1", "http://h:2/retrieve"]]
)
def test_route_in_retriever_url_is_refused(url):
    with pytest.raises(ValueError, match=r"drop /retrieve, so that it is http://h:(8000|2)(?!\d|/)"):
        RetrieverConfig(url=url)


def test_config_of_the_service_is_no_config_of_a_run():
    path = ROOT / "configs/retriever.yaml"
    with pytest.raises(UserError) as error:
        load_config(path)
    message = str(error.value)
    assert "options of the retrieval service (corpus_path, index_path, retriever_name)" in message
    assert message.endswith(f"calibadv retriever --config {path}")


URLS = ("http://me:pw@h:1", "http://pw@h/", "HTTPS://me:p/pw@h/x", "me:pw@h", "http:/me:pw@h")


@pytest.mark.parametrize("url", [*URLS, "http://[::1]pw@h"])
@pytest.mark.parametrize(
    ("override", "key", "way_out"),
    [
        ("retriever.url={}", "retriever: url", "RETRIEVER_TOKEN"),
        ("retriever.url=[http://a, '{}']", "retriever: url", "RETRIEVER_TOKEN"),
        ("reward.judge.url={}", "reward.judge: url", "JUDGE_TOKEN"),
        ("sampler.urls=['{}']", "sampler: urls", "take them out"),
        ("tools=[{{mcp: {{url: '{}'}}}}]", "tools.0.mcp: url", "MCP_TOKEN"),
    ],
)
def test_url_with_a_password_is_refused(url, override, key, way_out):
    with pytest.raises(UserError, match=f"{key} holds a user or a password.*{way_out}") as error:
        load_config(ROOT / "configs/cpu.yaml", [override.format(url)])
    assert "pw" not in str(error.value) and "\n" not in str(error.value)
    for accepted in (
        "http://h:8000/@name/mcp",
        "https://h/@name",
        "https://h/mcp?as=a@b",
        "http://[::1]:80/x",
    ):
        assert McpConfig(url=accepted).url == accepted


def test_kept_config_follows_its_run(tmp_path):
    """Paths inside run.dir are those of the folder in which the config lies; others stay."""
    data = ["data.train={a: old/run/a.jsonl, b: old/running/b.jsonl}", "data.eval=[old/run/e.jsonl]"]
    config = load_config(ROOT / "configs/quickstart.yaml", ["run.dir=old/run", *data])
    folder = tmp_path / "moved"
    path = folder / "configs/3.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(dump_config(config))
    assert load_config(path).run.dir == "old/run"  # somebody's own file, of such a name
    path.with_suffix(".json").write_text("{}")
    moved = load_config(path, ["evaluate.output=old/run/mine.json"])
    assert moved.run.dir == str(folder) and moved.retriever.index == f"{folder}/index"
    assert moved.data.train == {"a": f"{folder}/a.jsonl", "b": "old/running/b.jsonl"}
    assert moved.data.eval == [f"{folder}/e.jsonl"] and moved.prompt == config.prompt
    assert moved.evaluate.output == "old/run/mine.json"


@pytest.fixture
def kept_config(tmp_path, monkeypatch):
    """A kept config of the quickstart's run `old`, whose folder holds its world and cold start."""
    monkeypatch.chdir(tmp_path)
    add_start(Path("old"), dump_config(load_config(ROOT / "configs/quickstart.yaml", ["run.dir=old"])), {})
    for name in ("sft", "world/tokenizer", "world/train.jsonl", "world/eval.jsonl", "world/corpus.jsonl"):
        Path("old", name).mkdir(parents=True)
    return Path("old/configs/0.yaml")


def outputs(config):
    return [
        config.run.dir, config.world.dir, config.retriever.index, config.sft.output, config.evaluate.output,
        config.export.output, config.export.adapter_output,
    ]  # fmt: skip


def test_outputs_follow_an_overridden_run_dir(kept_config):
    names = ["world", "index", "sft", "evaluation.json", "hf", "adapter"]
    expected = ["new", *(f"new/{name}" for name in names)]
    config = load_config(kept_config, ["run.dir=new"])
    assert outputs(config) == expected
    assert config.policy.path == "old/sft" and config.data.train == "old/world/train.jsonl"  # only read
    Path("new/sft").mkdir(parents=True)
    assert load_config(kept_config, ["run.dir=new"]).policy.path == "new/sft"  # a cold start of its own
    copy, over = Path("copy.yaml"), Path("over.yaml")
    copy.write_text(kept_config.read_text())
    over.write_text("run: {dir: new}")
    assert outputs(load_config(copy, ["run.dir=new"])) == expected
    assert outputs(load_config([kept_config, over])) == expected
    assert load_config(kept_config, ["run.dir=new", "export.output=mine"]).export.output == "mine"
    same = outputs(load_config(kept_config, ["run.dir=./old"]))
    assert same == ["./old", *outputs(load_config(kept_config))[1:]]


def test_quickstart_makes_its_own_inputs(kept_config, capsys):
    with pytest.raises(SystemExit):
        cli.calibadv(["quickstart", "--config", str(kept_config), "run.dir=new", "--dry-run"])
    config = parse_config(capsys.readouterr().out, "printed")
    assert config.policy.path == "new/sft" and config.policy.tokenizer == "new/world/tokenizer"
    assert config.retriever.corpus == "new/world/corpus.jsonl"


def test_mirror_of_another_run_is_refused(kept_config):
    text = kept_config.read_text()
    kept_config.write_text(text.replace("mirror: ''", "mirror: s3://bucket/old"))
    assert load_config(kept_config, ["run.dir=new"]).run.mirror == "s3://bucket/new"
    kept_config.write_text(text.replace("mirror: ''", "mirror: s3://bucket/mine"))
    assert load_config(kept_config).run.mirror == "s3://bucket/mine"
    assert load_config(kept_config, ["run.dir=new", "run.mirror="]).run.mirror == ""
    Path("own.yaml").write_text("run: {dir: old, mirror: 's3://bucket/mine'}")  # kept by no run
    assert load_config("own.yaml", ["run.dir=new"]).run.mirror == "s3://bucket/mine"
    for mirror in ("s3://bucket/mine", "s3://bucket/too-old"):  # the second has no folder "old"
        kept_config.write_text(text.replace("mirror: ''", f"mirror: {mirror}"))
        with pytest.raises(UserError, match=f"run.mirror={mirror} belongs to the run that kept this"):
            load_config(kept_config, ["run.dir=new"])


def test_output_in_another_runs_folder_is_refused(kept_config):
    for path in ("old/hf", "old", "old/deep/er/hf"):
        with pytest.raises(UserError, match=rf"^export.output={path} lies in the folder of another run, "):
            refuse_other_run(Path(path), "export.output", Path("new"))
    for path, run in (("old/hf", "./old"), ("elsewhere/hf", "new"), ("old/ablation/hf", "old/ablation")):
        refuse_other_run(Path(path), "export.output", Path(run))
    Path("cold").mkdir()
    Path("cold/sft.yaml").touch()
    with pytest.raises(UserError, match="cold"):
        refuse_other_run(Path("cold/sft"), "sft.output", Path("new"))


@pytest.fixture
def run(tmp_path):
    """A run of two starts, with metrics."""
    for seed in (1, 2):
        add_start(tmp_path, WHOLE.replace("seed: 0", f"seed: {seed}", 1), IDENTITY)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return tmp_path


def test_starts_are_numbered_and_kept_with_their_hashes(run):
    assert [path.name for path in start_files(run)] == ["0.yaml", "1.yaml"]
    assert json.loads((run / "configs/1.json").read_text()) == IDENTITY
    start = newest_start(run)
    assert (start.path.name, start.config["run"]["seed"], start.identity) == ("1.yaml", 2, IDENTITY)
    assert newest_start(run / "elsewhere") is None
    for name in ("10.yaml", "2.yaml"):
        (run / "configs" / name).touch()
    assert [path.stem for path in start_files(run)] == ["0", "1", "2", "10"]


def test_start_without_its_hashes_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "write_json", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        add_start(tmp_path, WHOLE, IDENTITY)
    assert newest_start(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"run:\n", b"{", b"\xff\xfe\n", b"run: {}\nlearner:\n  steps: 1"])
@pytest.mark.parametrize("name", ["1.yaml", "1.json"])
def test_damaged_start_is_refused_until_removed(run, name, content):
    path, source = run / "configs" / name, find_policy(run / "checkpoints")
    path.write_bytes(content)
    for read, argument in ((newest_start, run), (read_runs, [run]), (ask.run_config, source)):
        with pytest.raises(UserError, match=f"{name}: .*remove it") as caught:
            read(argument)
        assert "\n" not in str(caught.value)
    path.unlink()
    start, expected = newest_start(run), (1, IDENTITY) if name == "1.yaml" else (2, {})
    assert (start.config["run"]["seed"], start.identity) == expected
    assert training_config(Config(), source)["run"]["seed"] == expected[0]


def test_newer_keys_have_defaults_and_removed_keys_are_dropped(run):
    (run / "configs/1.yaml").write_text("run: {seed: 7}\npolicy: {lora: {dropout: 0.0}}\n")
    values = training_config(changed(learner={"steps": 9}), find_policy(run / "checkpoints"))
    assert values["run"]["seed"] == 7 and values["learner"]["steps"] == Config().learner.steps
    assert "dropout" not in newest_start(run).config["policy"]["lora"]
    assert load_config(run / "configs/1.yaml").policy == Config().policy
