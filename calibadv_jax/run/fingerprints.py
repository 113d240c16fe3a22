"""Fingerprints of files, actions, policies and services, to compare starts and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibadv_jax.config import Config, RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.files import content_hash
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.trajectory import Question
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.exchange import Hosts
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.model import AdapterBase, Model, PolicySource, find_folder
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_client import identity as index_identity
from calibadv_jax.snapshots.checkpoint import newest_step
from calibadv_jax.snapshots.weight_files import weights_hash

if TYPE_CHECKING:
    from calibadv_jax.data.demonstrations import Demonstration

REFERENCE = "policy.weights"  # only of a run that keeps the policy it began with, or the base of its adapters
ADAPTERS = "policy.adapters"  # of policy.lora.init_from, only of a run that keeps the policy it began with
JUDGE = "reward.judge.content"  # of reward.judge.prompt
TOOLS = "tools.content"  # names and purposes of the actions, which servers and the user's code choose
OPTIONAL = (REFERENCE, ADAPTERS, JUDGE, TOOLS)  # omitted when not needed
IDENTITY = ("data.content", "policy.config", "policy.vocabulary", *OPTIONAL)


def judge_hash(config: Config) -> str:
    """Return the hash of the judge's prompt; empty if it has no file."""
    prompt = config.reward.judge.prompt
    return content_hash(load_optional("judge").read_prompt(prompt)) if prompt else ""


def tools_hash(config: Config) -> str:
    """Return the hash of the actions in the prompt; empty if search is the only one."""
    actions = make_actions(config)
    fields = [[action.name, action.purpose, action.argument, action.may_be_empty] for action in actions]
    return content_hash(fields) if fields else ""


def _contents(
    config: Config, model: Model, questions: Sequence[Question], is_fresh: bool
) -> dict[str, Callable[[], str]]:
    """Return functions that hash what the config only names, by the names in `IDENTITY`."""
    policy, keeps_initial = config.policy, config.keeps_initial_policy
    hashes: dict[str, Callable[[], str]] = {
        "data.content": lambda: content_hash([dataclasses.astuple(question) for question in questions]),
        "policy.config": lambda: content_hash(model.hf_config),
        "policy.vocabulary": lambda: model.tokenizer_hash,
        JUDGE: lambda: judge_hash(config),
        TOOLS: lambda: tools_hash(config),
    }
    # A checkpoint holds neither the policy that the run began with nor the base of its adapters.
    if policy.path and (is_fresh or keeps_initial or policy.lora.rank):
        hashes[REFERENCE] = lambda: weights_hash(find_folder(config, policy.path, True, model.pins)[0])
    if policy.lora.init_from and (is_fresh or keeps_initial):
        from calibadv_jax.snapshots.peft import adapters_hash

        hashes[ADAPTERS] = lambda: adapters_hash(Path(policy.lora.init_from))
    return hashes


def run_identity(config: Config, model: Model, questions: Sequence[Question]) -> dict[str, str]:
    """Return the hashes of the contents that a run's config only names, by the names in `IDENTITY`."""
    contents = _contents(config, model, questions, is_fresh=False)
    hashes = {name: compute() for name, compute in contents.items()}
    return {name: value for name, value in hashes.items() if value}


def cold_start_identity(
    config: Config, model: Model, demonstrations: Sequence[Demonstration], base: AdapterBase | None
) -> dict[str, str]:
    """Return the hashes of the contents that a cold start's config only names."""
    hashes = {
        "demonstrations": content_hash([dataclasses.asdict(each) for each in demonstrations]),
        "policy.config": content_hash(model.hf_config),
        "policy.vocabulary": model.tokenizer_hash,
    }
    tools = tools_hash(config)
    return hashes | ({TOOLS: tools} if tools else {}) | ({REFERENCE: base.sha256} if base else {})


def check_same(config: Config, model: Model, questions: Sequence[Question], hosts: Hosts) -> None:
    """Refuse (UserError) processes that read different files or offer different actions."""
    newest = newest_step(Path(config.run.dir) / "checkpoints")
    hosts.assert_equal("newest checkpoint in run.dir", lambda: newest)
    for name, compute in _contents(config, model, questions, is_fresh=newest is None).items():
        hosts.assert_equal(name, compute)


def describe_policy(source: PolicySource) -> dict[str, Any]:
    """Return a policy on disk as plain values; `modified` (ns) tells versions of one place apart."""
    step = source.step
    if source.kind == "snapshot":
        from calibadv_jax.snapshots.publish import snapshot_version

        step = snapshot_version(source.path)
    path = source.path / str(step) if source.kind == "checkpoint" else source.path
    files = [path, *path.glob("*.safetensors")]
    modified = max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
    return {"kind": source.kind, "path": str(source.path), "step": step, "modified": modified}


def describe_retriever(config: RetrieverConfig, warn: Callable[[str], object]) -> dict[str, Any]:
    """Return the retriever as plain values; empty where nothing is searched.

    A running service describes itself, or is its address if it names no corpus; UserError if it cannot be
    reached. A service that is started here is its corpus and its pages, with the times of the files.
    """
    if config.url == NO_RETRIEVER:
        return {}
    if config.url:
        client = RetrieverClient(config, config.url, warn)
        index = index_identity(client.health())
        return index if {"identity", "corpus_sha256"} & index.keys() else index | {"url": redact(client.url)}
    files: dict[str, Any] = {}
    for name, key, path in (("corpus", "modified", config.corpus), ("pages", "pages_modified", config.pages)):
        if path or name == "corpus":
            files[name] = str(Path(path))
            if Path(path).is_file():
                files[key] = Path(path).stat().st_mtime_ns
    return files
