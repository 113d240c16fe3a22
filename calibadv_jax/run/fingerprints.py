"""Fingerprints of files, actions, policies and services, to compare starts and processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibadv_jax.config import Config, RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.config.sections.rollout import TOOL_CALLS
from calibadv_jax.core.files import content_hash
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.trajectory import Question
from calibadv_jax.core.user_functions import is_address, load_optional, source_hash
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.run.configured_actions import make_actions
from calibadv_jax.run.model import AdapterBase, Model, PolicySource, find_folder
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_health import index_identity as index_identity
from calibadv_jax.snapshots.checkpoint import newest_step
from calibadv_jax.snapshots.weight_files import weights_hash

if TYPE_CHECKING:
    from calibadv_jax.data.demonstrations import Demonstration

# Names of hashes in a start's identity that are omitted when they are not needed.
REFERENCE = "policy.weights"  # Only if the run keeps its initial policy, or trains adapters on this base.
ADAPTERS = "policy.adapters"  # Hash of policy.lora.init_from; only if the run keeps its initial policy.
TEACHER = "teacher.content"  # Hash of the teacher's weights, or the model of its server; only with a teacher.
DEMONSTRATIONS = "demonstrations.content"  # Hash of the demonstrations in groups; only with them.
JUDGE = "reward.judge.content"  # Hash of the file reward.judge.prompt.
TOOLS = "tools.content"  # Hash of the actions' names and purposes, which servers and the user's code choose.
# Hashes of the source code of functions of the user's own, by the section that names them.
REWARD_SOURCE = "reward.source"
ADVANTAGE_SOURCE = "advantage.source"
LOSS_SOURCE = "loss.source"
TOOLS_SOURCE = "tools.source"
SOURCES = (REWARD_SOURCE, ADVANTAGE_SOURCE, LOSS_SOURCE, TOOLS_SOURCE)
OPTIONAL = (REFERENCE, ADAPTERS, TEACHER, DEMONSTRATIONS, JUDGE, TOOLS, *SOURCES)
IDENTITY = ("data.content", "policy.config", "policy.vocabulary", *OPTIONAL)


def judge_hash(config: Config) -> str:
    """Return the hash of the judge's prompt; empty if reward.judge.prompt is not set."""
    prompt = config.reward.judge.prompt
    if not prompt:
        return ""
    return content_hash(load_optional("judge").read_prompt(prompt))


def tools_hash(config: Config) -> str:
    """Return the hash of the actions in the prompt; empty if search is the only one.

    Raises:
        UserError: An action cannot be made.
    """
    actions = make_actions(config)
    if not actions:
        return ""
    if config.rollout.protocol == TOOL_CALLS:
        return content_hash([action.schema().as_function() for action in actions])
    return content_hash(
        [[action.name, action.purpose, action.argument, action.may_be_empty] for action in actions]
    )


def own_functions(config: Config) -> dict[str, list[str]]:
    """Return the functions of the user's own that a config names, by the names in `SOURCES`.

    Returns:
        For each name the functions as ``package.module:function``; an empty list without any.
    """
    named = {
        REWARD_SOURCE: list(config.reward.weights),
        ADVANTAGE_SOURCE: [config.advantage.estimator],
        LOSS_SOURCE: [config.loss.name],
        TOOLS_SOURCE: [*(tool.name for tool in config.tools), config.tool_calls.format],
    }
    return {source: [name for name in names if is_address(name)] for source, names in named.items()}


def _contents(
    config: Config, model: Model, questions: Sequence[Question], is_fresh: bool
) -> dict[str, Callable[[], str]]:
    """Return functions that hash what the config only names, by the names in `IDENTITY`."""
    policy = config.policy
    keeps_initial = config.keeps_initial_policy

    def questions_hash() -> str:
        return content_hash([dataclasses.astuple(question) for question in questions])

    def base_hash() -> str:
        folder, _ = find_folder(config, policy.path, with_weights=True, resolved=model.pins)
        return weights_hash(folder)

    def teacher_hash() -> str:
        folder, _ = find_folder(config, config.teacher.policy, with_weights=True, resolved=model.pins)
        return weights_hash(folder)

    hashes: dict[str, Callable[[], str]] = {
        "data.content": questions_hash,
        "policy.config": lambda: content_hash(model.hf_config),
        "policy.vocabulary": lambda: model.tokenizer_hash,
        JUDGE: lambda: judge_hash(config),
        TOOLS: lambda: tools_hash(config),
    }
    for name, addresses in own_functions(config).items():
        section, _, _ = name.partition(".")
        hashes[name] = functools.partial(source_hash, addresses, section)
    if config.teacher.has_own_weights:
        hashes[TEACHER] = teacher_hash
    elif config.teacher.url:
        hashes[TEACHER] = lambda: content_hash(load_optional("teacher").teacher_identity(config))
    if config.demonstrations.is_on:
        hashes[DEMONSTRATIONS] = lambda: load_optional("group_demonstrations").demonstrations_hash(
            config, model.tokenizer
        )
    # A checkpoint holds neither the policy that the run began with nor the base of its adapters.
    if policy.path and (is_fresh or keeps_initial or policy.lora.rank):
        hashes[REFERENCE] = base_hash
    if policy.lora.init_from and (is_fresh or keeps_initial):
        from calibadv_jax.snapshots.peft import adapters_hash

        hashes[ADAPTERS] = lambda: adapters_hash(Path(policy.lora.init_from))
    return hashes


def run_identity(config: Config, model: Model, questions: Sequence[Question]) -> dict[str, str]:
    """Hash the contents that a run's config only names.

    Args:
        config: The run's config.
        model: The run's model.
        questions: The training questions whose prompts fit.

    Returns:
        The hashes by the names in `IDENTITY`, without those that are not needed.

    Raises:
        UserError: A file cannot be read, or an action cannot be made.
    """
    identity = {}
    for name, compute in _contents(config, model, questions, is_fresh=False).items():
        value = compute()
        if value:
            identity[name] = value
    return identity


def cold_start_identity(
    config: Config, model: Model, demonstrations: Sequence[Demonstration], base: AdapterBase | None
) -> dict[str, str]:
    """Hash the contents that a cold start's config only names.

    Args:
        config: The cold start's config.
        model: The model that is trained.
        demonstrations: The training demonstrations of the file; empty with a generator.
        base: The base of the adapters that are trained; None without adapters.

    Returns:
        The hashes by name, without those that are not needed.

    Raises:
        UserError: An action cannot be made.
    """
    identity = {
        "demonstrations": content_hash([dataclasses.asdict(entry) for entry in demonstrations]),
        "policy.config": content_hash(model.hf_config),
        "policy.vocabulary": model.tokenizer_hash,
    }
    tools = tools_hash(config)
    if tools:
        identity[TOOLS] = tools
    if base:
        identity[REFERENCE] = base.sha256
    return identity


def check_processes_agree(
    config: Config, model: Model, questions: Sequence[Question], process_group: ProcessGroup
) -> None:
    """Check that all processes read the same files and offer the same actions.

    Args:
        config: The run's config.
        model: This process' model.
        questions: This process' training questions.
        process_group: The processes of the run.

    Raises:
        UserError: In all processes, if one differs.
    """
    newest = newest_step(Path(config.run.dir) / "checkpoints")
    process_group.assert_equal("newest checkpoint in run.dir", lambda: newest)
    for name, compute in _contents(config, model, questions, is_fresh=newest is None).items():
        process_group.assert_equal(name, compute)


def describe_policy(source: PolicySource) -> dict[str, Any]:
    """Describe a policy on disk by plain values.

    Args:
        source: The policy.

    Returns:
        `kind`, `path` and `step`, and `modified`: the newest time of its files in nanoseconds since the
        epoch, by which policies that were written to the same path differ. It is 0 if there are no files.
    """
    step = source.step
    if source.kind == "snapshot":
        from calibadv_jax.snapshots.publish import snapshot_version

        step = snapshot_version(source.path)
    path = source.path
    if source.kind == "checkpoint":
        path = source.path / str(step)
    files = [path, *path.glob("*.safetensors")]
    times = [file.stat().st_mtime_ns for file in files if file.exists()]
    return {
        "kind": source.kind,
        "path": str(source.path),
        "step": step,
        "modified": max(times, default=0),
    }


def describe_retriever(config: RetrieverConfig, warn: Callable[[str], object]) -> dict[str, Any]:
    """Describe the retriever by plain values.

    Args:
        config: The section `retriever`.
        warn: Gets a line while a running service is waited for.

    Returns:
        What a running service says of its index, and its URL if it names no corpus. For a service that is
        started here, the paths of its corpus and its pages, and the times of these files in nanoseconds since
        the epoch. Empty if nothing is searched.

    Raises:
        UserError: A running service cannot be reached.
    """
    if config.url == NO_RETRIEVER_URL:
        return {}
    if config.url:
        client = RetrieverClient(config, config.url, warn)
        index = index_identity(client.health())
        names_corpus = "identity" in index or "corpus_sha256" in index
        if names_corpus:
            return index
        return index | {"url": redact(client.url)}
    description: dict[str, Any] = {"corpus": str(Path(config.corpus))}
    _add_time(description, "modified", Path(config.corpus))
    if config.pages:
        description["pages"] = str(Path(config.pages))
        _add_time(description, "pages_modified", Path(config.pages))
    return description


def _add_time(description: dict[str, Any], key: str, file: Path) -> None:
    """Add the time of a file, in nanoseconds since the epoch, if it exists."""
    if file.is_file():
        description[key] = file.stat().st_mtime_ns
