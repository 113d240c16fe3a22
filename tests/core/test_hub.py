"""Policies and data sets of a hub: one on loopback, with the real client."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from config_rig import changed
from hub_rig import running_hub, serve_hub, use_hub  # noqa: F401
from tiny_policy import SHAPE

from calibadv_jax.commands import sft
from calibadv_jax.commands.evaluate import choose_policy
from calibadv_jax.config import LogConfig, SftConfig, SftPhase
from calibadv_jax.contrib.cli.doctor import weight_lines
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core import hub as hub_client
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.questions import load_questions
from calibadv_jax.run.folder import enter_run_folder
from calibadv_jax.run.model import build_model, find_folder, initial_params
from calibadv_jax.snapshots.huggingface import save_folder

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [Question("1", "Who?", ("Ann",), "test")]


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    build_word_tokenizer().save_pretrained(folder / "tokenizer")
    config = configured(folder, init=SHAPE, tokenizer=str(folder / "tokenizer"))
    model = build_model(config, "")
    params = initial_params(config, model, "")
    return save_folder(params, model.hf_config, folder / "saved", "float32", model.tokenizer_folder)


def configured(folder, **policy):
    return changed(mesh={"data": 1, "fsdp": 8}, run={"dir": str(folder / "run")}, policy=policy)


def read_params(config):
    return initial_params(config, build_model(config, config.policy.path), config.policy.path)


def commits(config):
    return [pin.commit for pin in build_model(config, config.policy.path).pins]


def test_repository_is_downloaded_once(hub, tmp_path, policy_folder):
    hub.add("owner/policy", policy_folder, **{"pytorch_model.bin": b"x" * 99})
    config = configured(tmp_path, path="owner/policy")
    model = build_model(config, "owner/policy")
    assert weight_lines(config, model)[0].startswith("not checked: the tensors of owner/policy, which are")
    assert "owner/policy/model.safetensors" not in hub.downloads, "a check needs no weights"
    params = read_params(config)
    (line,) = weight_lines(config, model)
    assert line.endswith(" have the policy's shapes")
    expected = read_params(configured(tmp_path, path=str(policy_folder)))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    downloads = list(hub.downloads)
    assert len(downloads) == len(set(downloads)) and "owner/policy/pytorch_model.bin" not in downloads
    read_params(config)
    assert hub.downloads == downloads


def test_weights_are_fetched_only_where_they_are_asked_for(hub, tmp_path, policy_folder):
    commit = hub.add("owner/policy", policy_folder)
    config = configured(tmp_path, path="owner/policy")
    folder, (pin,) = find_folder(config, "owner/policy")
    assert (folder / "config.json").is_file() and not (folder / "model.safetensors").exists()
    assert pin.commit == commit
    folder, _ = find_folder(config, "owner/policy", with_weights=True)
    assert (folder / "model.safetensors").is_file()


def test_run_keeps_its_commit(hub, tmp_path, policy_folder):
    first = hub.add("owner/policy", policy_folder)
    config = configured(tmp_path, path="owner/policy")
    model = build_model(config, "owner/policy")
    second = hub.add("owner/policy", policy_folder, **{"model.safetensors": b"damaged"})
    assert initial_params(config, model, "owner/policy") is not None
    assert [pin.commit for pin in model.pins] == [first] != [second]
    enter_run_folder(config, model, QUESTIONS, print)
    assert commits(config) == [first] and find_folder(config, "owner/policy")[0].name == first
    elsewhere = tmp_path / "other"
    assert commits(configured(elsewhere, path="owner/policy")) == [second]
    for path, revision in (("owner/policy", first), (f"owner/policy@{first}", "")):
        assert commits(configured(elsewhere, path=path, revision=revision)) == [first]


def test_newer_commit_is_not_downloaded_for_a_model_of_the_older(hub, tmp_path, policy_folder):
    hub.add("owner/policy", policy_folder)
    config = configured(tmp_path, path="owner/policy")
    model = build_model(config, "owner/policy")
    hub.add("owner/policy", policy_folder, **{"README.md": b"new"})
    assert initial_params(config, model, "owner/policy") is not None
    assert not any("README" in path for path in hub.downloads)


def test_another_revision_is_another_experiment(hub, tmp_path, policy_folder):
    first = hub.add("owner/policy", policy_folder)
    config = configured(tmp_path, path="owner/policy")
    enter_run_folder(config, build_model(config, "owner/policy"), QUESTIONS, print)
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    other = configured(tmp_path, path="owner/policy", revision=first)
    with pytest.raises(UserError, match="another experiment: policy.revision changed"):
        enter_run_folder(other, build_model(other, "owner/policy"), QUESTIONS, print)


@pytest.mark.medium
def test_cold_start_keeps_its_commit(hub, tmp_path, policy_folder):
    first = hub.add("owner/policy", policy_folder)
    chat = {"user": "who ?", "assistant": "<answer> it </answer>"}
    messages = [{"role": role, "content": content} for role, content in chat.items()]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    config = configured(tmp_path)
    places = {"demonstrations": str(tmp_path / "chats.jsonl"), "output": str(tmp_path / "run/sft")}
    cold = SftConfig("owner/policy", phases=[SftPhase(1)], rows=8, pack_length=256, **places)
    sft.run(replace(config, sft=cold, log=LogConfig(backends=[], progress=False)))
    assert (tmp_path / "run/sft/model.safetensors").is_file()
    hub.add("owner/policy", policy_folder, **{"README.md": b"new"})
    assert find_folder(config, "owner/policy")[0].name == first


def test_evaluation_and_tokenizer_accept_a_repository(hub, tmp_path, policy_folder):
    hub.add("owner/policy", policy_folder)
    config = configured(tmp_path, path=str(policy_folder), tokenizer="owner/policy")
    model = build_model(config, config.policy.path)
    assert model.tokenizer_folder.parts[-2] == "snapshots"
    source = choose_policy(changed(config, evaluate={"policy": "owner/policy"}))
    assert source.kind == "huggingface" and (source.path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("owner/nothing", "", "owner/nothing .model on http.*no folder here and no repository there"),
        ("owner/policy", "v9", "owner/policy .*no revision 'v9'; correct policy.revision"),
        ("owner/gated", "", "owner/gated .*granted on request; ask.*owner/gated, then set HF_TOKEN"),
        ("owner/policy@main", "main", "both name a revision: leave one out"),
        (".", "main", "policy.revision is 'main', but policy.path=.* is a folder"),
    ],
)
def test_refusals_of_the_hub_are_user_errors(hub, tmp_path, name, revision, message):
    hub.add("owner/policy", **{"config.json": b"{}"})
    hub.add("owner/gated", **{"config.json": b"{}"})
    hub.gated.add("owner/gated")
    with pytest.raises(UserError, match=message) as caught:
        build_model(configured(tmp_path, path=name, revision=revision), name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("proxy", "words"), [("socks5://h:1", "httpx.socks."), ("socks://h:1", "ALL_PROXY")])
def test_proxy_that_cannot_be_used_is_named(monkeypatch, tmp_path, proxy, words):
    """The desktop writes socks://, which HTTP clients do not know; socks5:// needs a package."""
    if "socks5" in proxy and find_spec("socksio"):
        pytest.skip("SOCKS proxies are usable here")
    code = (
        "from calibadv_jax.core import hub\n"
        "from calibadv_jax.core.errors import UserError\n"
        "try: hub.resolve('owner/policy', '')\n"
        "except UserError as error: print(error)"
    )
    environment = {"ALL_PROXY": proxy, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    reply = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert reply.stdout.startswith("owner/policy (model on ") and reply.stdout.count("\n") == 1
    assert "cannot be asked: " in reply.stdout and words in reply.stdout.replace("[", ".").replace("]", ".")


def test_cache_serves_without_network(tmp_path, monkeypatch, policy_folder):
    with serve_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        hub.add("owner/policy", policy_folder)
        hub.add("datasets/owner/data", **{"train.jsonl": b'{"question": "x", "answer": "y"}'})
        find_folder(configured(tmp_path, path="owner/policy"), "owner/policy", with_weights=True)
        kept = load_questions("hf://datasets/owner/data/train.jsonl")
    config = configured(tmp_path, path="owner/policy")
    assert initial_params(config, build_model(config, "owner/policy"), "owner/policy") is not None
    assert load_questions("hf://datasets/owner/data/train.jsonl") == kept
    for name in ("owner/other", "hf://datasets/owner/other/a.jsonl", "hf://datasets/owner/other"):
        message = "owner/other .*the hub cannot be reached; correct the path"
        with pytest.raises(UserError, match=message) as caught:
            load_questions(name) if "data" in name else build_model(config, name)
        assert "\n" not in str(caught.value)


def rows(source, count=2):
    lines = (json.dumps({"id": n, "question": f"q{n}", "golden_answers": ["a"]}) for n in range(count))
    return ("\n".join(lines) + f"\n{' ' * len(source)}").encode()


def test_data_sets_by_file_pattern_or_alone(hub):
    hub.add("datasets/owner/flash", **{"nq__test.jsonl": rows("nq"), "popqa__test.jsonl": rows("popqa")})
    hub.add("datasets/owner/one", **{"mine.jsonl": rows(""), "README.md": b"#"})
    hub.add("datasets/owner/none", **{"README.md": b"#"})
    (first, *_) = load_questions("hf://datasets/owner/flash/nq/test.jsonl")
    assert (first.id, first.data_source) == ("nq_0", "nq")
    both = load_questions("hf://datasets/owner/flash/*/test.jsonl")
    assert {question.data_source for question in both} == {"nq", "popqa"}
    assert [item.data_source for item in load_questions("owner/one")] == ["mine", "mine"]
    files = "give hf://datasets/owner/flash/FILE; it holds nq/test.jsonl, popqa/test.jsonl"
    for name, message in (
        ("owner/flash", f"hf://datasets/owner/flash: 2 data files; {files}"),
        ("hf://datasets/owner/flash/dev.jsonl", f"no file 'dev.jsonl'; {files}"),
        ("hf://datasets/owner", "expected hf://datasets/OWNER/NAME/FILE"),
        ("owner/none", "hf://datasets/owner/none: 0 data files"),
        ("hf://datasets/owner/a..b", "owner/a..b .dataset on http.*: no name of a repository"),
    ):
        with pytest.raises(UserError, match=message):
            load_questions(name)
    hub.broken.add("datasets/owner/one")
    with pytest.raises(EnvironmentFailure, match="owner/one .dataset on http.*cannot be downloaded: .*later"):
        load_questions("owner/one")


@pytest.mark.medium
def test_environment_names_hub_and_cache(hub, tmp_path):
    """As a user sets it: before the program starts."""
    commit = hub.add("owner/policy", **{"config.json": b"{}"})
    code = "from calibadv_jax.core import hub; print(hub.fetch_model(hub.resolve('owner/policy', ''), False))"
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=250,
    )
    expected = tmp_path / "home/hub/models--owner--policy/snapshots" / commit
    assert done.stdout.strip() == str(expected), done.stderr


def test_names_and_pins_of_repositories(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ["owner/name", "owner/name@v1", "/owner/name", "./name", "name", "a/b/c", "here/missing", ""]
    assert [name for name in names if hub_client.is_repository(name)] == names[:2]
    first, other, newer = (hub_client.Pin("a/b", *pin) for pin in (("main", "1"), ("v1", "2"), ("main", "3")))
    hub_client.write_pins(tmp_path, [])
    assert not (tmp_path / "hub.json").exists()
    hub_client.write_pins(tmp_path, [first, other])
    hub_client.write_pins(tmp_path, [newer])
    assert hub_client.read_pins(tmp_path) == [newer, other]


@pytest.mark.parametrize("content", ["", "[{", "{}", "3", "[null]", '["x"]', '[{"repository": "a/b"}]'])
def test_damaged_pins_are_one_line(tmp_path, content):
    (tmp_path / "hub.json").write_text(content)
    with pytest.raises(UserError, match="hub.json: damaged, .*; remove it") as caught:
        hub_client.read_pins(tmp_path)
    assert "\n" not in str(caught.value)
