"""What a run's config may do without the user's trust: references, addresses, outputs and their owners."""

import pytest
import yaml
from omegaconf import OmegaConf

from calibadv_jax.config import load_config, parse_config
from calibadv_jax.config.trust import Trust, without_environment
from calibadv_jax.core.errors import UserError

SECRET = "hunter2hunter2"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RETRIEVER_TOKEN", "MCP_TOKEN", "JUDGE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MY_SECRET", SECRET)


@pytest.fixture
def kept(tmp_path):
    """Writes the config of a run with these values; returns the file."""

    def kept(**values):
        path = tmp_path / "run/configs/0.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text("{}")
        run = {"dir": str(tmp_path / "run")} | values.pop("run", {})
        path.write_text(yaml.safe_dump({"run": run, **values}))
        return path

    return kept


def refused(path, *overrides, command=""):
    """Return the deeds of a refusal; empty if nothing is refused."""
    try:
        load_config(path, overrides, trust=Trust(command))
    except UserError as error:
        assert SECRET not in str(error) and "\n" not in str(error)
        return str(error).partition(" would ")[2].partition(". A run may")[0].split("; ")
    return []


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("${oc.env:MY_SECRET}", True),
        ("a ${ oc.env:MY_SECRET} b", True),
        ("${oc.env:NONE,${oc.env:MY_SECRET}}", True),
        ("${oc.decode:${oc.env:MY_SECRET}}", True),
        ("${oc.${name}:MY_SECRET}", True),
        ("${${oc.env:MY_SECRET}}", True),
        ("$${oc.env:MY_SECRET}", True),
        (r"\\${oc.env:MY_SECRET}", True),
        ("${name}${oc.env:MY_SECRET}", True),
        (r"\${oc.env:MY_SECRET}", False),
        (r"\\\${oc.env:MY_SECRET}", False),
        ("${name}/x", False),
        ("plain", False),
    ],
)
def test_references_to_the_environment_stay_literal(text, is_taken):
    values, deeds = without_environment({"name": "env", "log": {"project": text}})
    resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    assert SECRET not in str(resolved)
    assert [deed.key for deed in deeds] == (["log.project"] if is_taken else [])
    if not is_taken:
        assert values["log"]["project"] == text


def test_reference_counts_only_where_the_command_uses_the_key(kept):
    path = kept(
        log={"project": "${oc.env:MY_SECRET}"},
        policy={"compute_dtype": "${oc.env:MY_SECRET}"},
        data={"train": ["a", "${oc.env:MY_SECRET}"]},
    )
    assert len(refused(path)) == 3
    config = load_config(path, ["policy.compute_dtype=float32"], trust=Trust("ask"))
    assert config.log.project == "${oc.env:MY_SECRET}" and config.data.train[1] == "${oc.env:MY_SECRET}"
    assert refused(path, command="ask") == [
        "fill in '${oc.env:MY_SECRET}' from the environment (policy.compute_dtype)"
    ]
    assert load_config(path, trust=Trust("replay")).policy.compute_dtype == "bfloat16"  # the default


def test_base_of_a_runs_config_is_not_read_from_the_environment(kept, tmp_path):
    path = kept()
    path.write_text("base: ${oc.env:MY_SECRET}\n")
    with pytest.raises(UserError, match="base of a config in a run's folder must be the name of a file"):
        load_config(path)
    (tmp_path / "run/other.yaml").write_text("tools: ['given:Tool']\n")
    path.write_text("base: ../other.yaml\n")
    assert refused(path) == ["import given:Tool (tools)"]


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000/path/", True),
        ("http://[::1]:8000", True),
        ("HTTP://LOCALHOST", True),
        ("http://10.0.0.1:8000", False),
        ("http://localhost.evil.com", False),
        ("http://127.0.0.1.evil.com", False),
        (r"http://localhost\.evil.com", False),
        ("http://evil.com#localhost", False),
        ("http://evil.com/http://localhost", False),
        ("//evil.com", False),
        ("https://0x7f000001.evil.com", False),
    ],
)
def test_addresses_beyond_this_machine(kept, url, is_local):
    path = kept(retriever={"url": ["http://127.0.0.1:1", url]})
    assert refused(path, command="ask") == ([] if is_local else [f"contact {url} (retriever.url)"])
    assert refused(path, f"retriever.url={url}", command="ask") == []


@pytest.mark.parametrize(
    ("values", "token", "key"),
    [
        ({"retriever": {"url": "http://127.0.0.1:1"}}, "RETRIEVER_TOKEN", "retriever.url"),
        ({"tools": [{"mcp": {"url": "http://127.0.0.1:1"}}]}, "MCP_TOKEN", "tools"),
        (
            {"reward": {"judge": {"url": "http://127.0.0.1:1", "model": "m"}, "answer": "judge"}},
            "JUDGE_TOKEN",
            "reward.judge.url",
        ),
    ],
)
def test_tokens_go_only_to_addresses_that_the_user_named(kept, monkeypatch, values, token, key):
    path = kept(**values)
    assert refused(path) == []
    monkeypatch.setenv(token, SECRET)
    assert refused(path) == [f"contact http://127.0.0.1:1 and send it the token {token} ({key})"]
    assert load_config(path, trust=Trust(is_given=True))


def test_other_contacts(kept):
    path = kept(
        log={"backends": ["mlflow", "prometheus"], "prometheus": "0.0.0.0:9464", "project": "p"},
        distributed={"coordinator_address": "far:1234"},
        sampler={"name": "vllm", "urls": ["http://far:8000"]},
    )
    assert refused(path) == [
        "contact http://far:8000 (sampler.urls)",
        "join processes at far:1234 (distributed.coordinator_address)",
        "send metrics to MLflow, experiment 'p' (log.backends)",
        "listen on 0.0.0.0:9464 (log.prometheus)",
    ]


def test_models_in_the_cache_are_no_download(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    retriever = {
        "corpus": "c.jsonl",
        "index": str(tmp_path / "run/index"),
        "encoder": "dense",
        "model": "a/b",
    }
    path = kept(policy={"path": "a/policy@main"}, retriever=retriever)
    assert refused(path) == [
        "download the model a/policy@main (policy.path)",
        "download the model a/b (retriever.model)",
    ]
    for name in ("models--a--policy", "models--a--b"):
        (tmp_path / "cache" / name / "snapshots").mkdir(parents=True)
    assert refused(path) == []
    assert refused(kept(data={"train": "hf://datasets/a/b", "eval": {"nq": "a/c"}})) == [
        "download the data hf://datasets/a/b (data.train)",
        "download the data a/c (data.eval)",
    ]


def test_outputs_stay_in_the_runs_folder(kept, tmp_path):
    run = tmp_path / "run"
    (run / "link").parent.mkdir(exist_ok=True)
    path = kept(
        evaluate={"output": f"{run}/../other/evaluation.json"},
        export={"output": f"{run}/hf", "adapter_output": f"{run}/link/adapter"},
        run={"mirror": str(tmp_path / "mirror")},
    )
    (run / "link").symlink_to(tmp_path)
    assert refused(path) == [
        f"write {run}/../other/evaluation.json (evaluate.output)",
        f"write {run}/link/adapter (export.adapter_output)",
        f"copy the run to {tmp_path}/mirror (run.mirror)",
        f"write through the link {run}/link to {tmp_path} (run.dir)",
    ]
    # The user's own folder takes what follows it, and a link in the run is not written through.
    assert refused(path, f"run.dir={tmp_path}/new", "run.mirror=", "evaluate.output=e.json") == []
    assert refused(path, command="ask") == []


def test_many_links_are_counted(kept, tmp_path):
    path = kept()
    for number in range(7):
        (tmp_path / f"run/link{number}").symlink_to("/nowhere")
    deeds = refused(path, command="export")
    assert len(deeds) == 6
    assert deeds[-1] == "write through 2 more links out of the folder (run.dir)"


def test_missing_index_is_built_in_the_runs_folder_only(kept, tmp_path):
    inside = kept(retriever={"corpus": "c.jsonl", "index": f"{tmp_path}/run/index"})
    assert refused(inside, command="evaluate") == []
    assert refused(inside, command="ask") == [f"build the index {tmp_path}/run/index (retriever.index)"]
    beside = kept(retriever={"corpus": f"{tmp_path}/c.jsonl"})
    deed = [f"build the index {tmp_path}/c.jsonl.index (retriever.corpus)"]
    assert refused(beside, command="evaluate") == refused(beside, command="serve") == deed
    assert refused(beside, f"retriever.corpus={tmp_path}/c.jsonl", command="ask") == []
    (tmp_path / "c.jsonl.index").mkdir()
    (tmp_path / "c.jsonl.index/manifest.json").touch()
    assert refused(beside, command="ask") == []


@pytest.mark.parametrize(("kind", "is_refused"), [("faiss", False), ("qdrant", True), ("given:Own", True)])
def test_kind_of_an_index_is_code(kept, tmp_path, kind, is_refused):
    path = kept(retriever={"corpus": "c.jsonl", "index": f"{tmp_path}/run/index", "kind": kind})
    deed = f"open an index of the kind {kind}, which runs code (retriever.kind)"
    assert refused(path) == ([deed] if is_refused else [])
    assert refused(path, f"retriever.kind={kind}") == []


def test_value_that_is_merged_with_a_users_own_is_still_the_runs(kept, tmp_path):
    path = kept(reward={"answer": {"given:score": 0.5}})
    own = tmp_path / "own.yaml"
    own.write_text("reward: {answer: {f1: 0.5}}\n")
    assert refused([path, own]) == ["import given:score (reward.answer)"]
    assert refused(path, "reward.answer=f1") == []


def test_configs_of_a_run_are_known_by_their_place(tmp_path, monkeypatch):
    text = "tools: ['given:Tool']\n"
    for name in ("run/configs/3.yaml", "run/sft.yaml", "run/own.yaml", "own/configs/3.yaml", "own/sft.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "run/metrics.jsonl").touch()
    assert refused(tmp_path / "run/configs/3.yaml") and refused(tmp_path / "run/sft.yaml")
    for name in ("run/own.yaml", "own/configs/3.yaml", "own/sft.yaml"):
        assert not refused(tmp_path / name)
    monkeypatch.chdir(tmp_path / "run/configs")
    assert refused("3.yaml")
    # A command that takes the config out of a run's folder says so itself.
    path = tmp_path / "own/configs/3.yaml"
    with pytest.raises(UserError, match="calibadv ask would import given:Tool"):
        load_config(path, trust=Trust("ask", folders={str(path): tmp_path / "own"}))


def test_text_of_a_record_is_that_of_a_run(tmp_path):
    name = str(tmp_path / "rollouts/step_1.parquet")
    with pytest.raises(
        UserError, match=f"^{name}: by this config of a run, calibadv replay would import g:f"
    ):
        parse_config("loss: {name: 'g:f', importance_cap: 2.0}\n", name, trust=Trust("replay"))
    assert parse_config("tools: ['g:f']\n", name, trust=Trust("replay")).tools[0].name == "g:f"


def test_file_that_demonstrate_writes(kept, tmp_path):
    """The other commands read sft.demonstrations."""
    path = kept(sft={"demonstrations": str(tmp_path / "demos.jsonl"), "init_from": "a/policy"})
    download = "download the model a/policy (sft.init_from)"
    assert refused(path, command="demonstrate") == [
        download,
        f"write {tmp_path}/demos.jsonl (sft.demonstrations)",
    ]
    assert refused(path, command="sft") == [download]
    assert refused(path, "sft.demonstrations=own.jsonl", "sft.init_from=", command="demonstrate") == []
    tokenizer = kept(policy={"path": "a/policy"}, sft={"demonstrations": f"{tmp_path}/run/demos.jsonl"})
    assert refused(tokenizer, command="demonstrate") == ["download the model a/policy (policy.path)"]
