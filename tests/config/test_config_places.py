"""Addresses and places in a config: of the retriever, of the service's own files, of a run that was moved."""

import json
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import dump_config, load_config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "url", ["http://h:8000/retrieve", "http://h:8000/retrieve/", ["http://h:1", "http://h:2/retrieve"]]
)
def test_a_route_in_the_retrievers_url_is_refused_with_the_url_that_is_meant(tmp_path, url):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"retriever": {"url": url}}))
    with pytest.raises(UserError, match=r"drop /retrieve, so that it is http://h:(8000|2)(?!\d|/)"):
        load_config(path)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:pw@h:1",
        "http://pw@h/",
        "HTTPS://me:p/pw@h/x",
        "me:pw@h",
        "http:/me:pw@h",
        "http://[::1]pw@h",
    ],
)
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
    with pytest.raises(UserError) as error:
        load_config(ROOT / "configs/cpu.yaml", [override.format(url)])
    message = str(error.value)
    assert f"{key} holds a user or a password" in message and way_out in message and "\n" not in message
    assert "pw" not in message


@pytest.mark.parametrize(
    "url", ["http://h:8000/@name/mcp", "https://h/@name", "https://h/mcp?as=a@b", "http://[::1]:80/x"]
)
def test_url_with_a_sign_in_its_path_is_taken(url):
    config = load_config(ROOT / "configs/cpu.yaml", [f"tools=[{{mcp: {{url: '{url}'}}}}]"])
    assert config.tools[0].mcp.url == url


def test_a_config_of_the_service_is_no_config_of_a_run():
    with pytest.raises(UserError) as error:
        load_config(ROOT / "configs/retriever.yaml")
    said = str(error.value)
    assert "options of the retrieval service (corpus_path, index_path, retriever_name)" in said
    assert said.endswith(f"scripts/launch_retriever.sh --config {ROOT}/configs/retriever.yaml")


def test_a_kept_config_follows_its_run(tmp_path):
    """Paths inside run.dir are those of the folder in which the config lies; others stay."""
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            "run.dir=old/run",
            "data.train={a: old/run/a.jsonl, b: old/running/b.jsonl}",
            "data.eval=[old/run/e.jsonl]",
        ],
    )
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
def kept(tmp_path, monkeypatch):
    """A kept config of the quickstart's run `old`, whose folder holds its world and cold start."""
    monkeypatch.chdir(tmp_path)
    path = Path("old/configs/0.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(dump_config(load_config(ROOT / "configs/quickstart.yaml", ["run.dir=old"])))
    path.with_suffix(".json").write_text("{}")
    for name in ("sft", "world/tokenizer"):
        Path("old", name).mkdir(parents=True)
    for name in ("train", "eval", "corpus"):
        Path(f"old/world/{name}.jsonl").touch()
    return path


def outputs(config):
    return [
        config.run.dir, config.world.dir, config.retriever.index, config.sft.output, config.evaluate.output,
        config.export.output, config.export.adapter_output,
    ]  # fmt: skip


def test_outputs_follow_an_overridden_run_dir(kept):
    names = ["world", "index", "sft", "evaluation.json", "hf", "adapter"]
    expected = ["new", *(f"new/{name}" for name in names)]
    config = load_config(kept, ["run.dir=new"])
    assert outputs(config) == expected
    assert config.policy.path == "old/sft" and config.data.train == "old/world/train.jsonl"  # only read
    Path("new/sft").mkdir(parents=True)
    assert load_config(kept, ["run.dir=new"]).policy.path == "new/sft"  # a cold start of its own
    copy, over = Path("copy.yaml"), Path("over.yaml")
    copy.write_text(kept.read_text())
    over.write_text("run: {dir: new}")
    assert outputs(load_config(copy, ["run.dir=new"])) == expected
    assert outputs(load_config([kept, over])) == expected
    assert load_config(kept, ["run.dir=new", "export.output=mine"]).export.output == "mine"
    assert outputs(load_config(kept, ["run.dir=./old"])) == ["./old", *outputs(load_config(kept))[1:]]


def test_quickstart_makes_its_own_inputs(kept, capsys):
    with pytest.raises(SystemExit):
        cli.calibadv(["quickstart", "--config", str(kept), "run.dir=new", "--dry-run"])
    Path("resolved.yaml").write_text(capsys.readouterr().out)
    config = load_config("resolved.yaml")
    assert config.policy.path == "new/sft" and config.policy.tokenizer == "new/world/tokenizer"
    assert (
        config.data.train == "new/world/train.jsonl" and config.retriever.corpus == "new/world/corpus.jsonl"
    )


def test_mirror_of_another_run_is_refused(kept):
    text = kept.read_text()
    kept.write_text(text.replace("mirror: ''", "mirror: s3://bucket/old"))
    assert load_config(kept, ["run.dir=new"]).run.mirror == "s3://bucket/new"
    kept.write_text(text.replace("mirror: ''", "mirror: s3://bucket/mine"))
    assert load_config(kept).run.mirror == "s3://bucket/mine"
    assert load_config(kept, ["run.dir=new", "run.mirror="]).run.mirror == ""
    with pytest.raises(UserError, match=r"run.mirror=s3://bucket/mine belongs to the run that kept this"):
        load_config(kept, ["run.dir=new"])
    kept.write_text(text.replace("mirror: ''", "mirror: s3://bucket/too-old"))  # no folder "old"
    with pytest.raises(UserError, match="run.mirror=s3://bucket/too-old belongs to the run"):
        load_config(kept, ["run.dir=new"])
    Path("own.yaml").write_text("run: {dir: old, mirror: 's3://bucket/mine'}")  # kept by no run
    assert load_config("own.yaml", ["run.dir=new"]).run.mirror == "s3://bucket/mine"


def test_output_in_another_runs_folder_is_refused(kept):
    for path in ("old/hf", "old", "old/deep/er/hf"):
        with pytest.raises(UserError, match=rf"^export.output={path} lies in the folder of another run, "):
            refuse_other_run(Path(path), "export.output", Path("new"))
    Path("old/ablation").mkdir()
    for path, run in (("old/hf", "./old"), ("elsewhere/hf", "new"), ("old/ablation/hf", "old/ablation")):
        refuse_other_run(Path(path), "export.output", Path(run))
    Path("cold").mkdir()
    Path("cold/sft.yaml").touch()
    with pytest.raises(UserError, match="cold"):
        refuse_other_run(Path("cold/sft"), "sft.output", Path("new"))
