"""Open the services, the sampler and the rollouts of a run from its config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from calibadv_jax.config import Config
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.core.errors import Faults
from calibadv_jax.core.interfaces import Sampler
from calibadv_jax.core.trajectory import Question
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import load_questions
from calibadv_jax.distributed.joining import workers_of_process
from calibadv_jax.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.sharding import LocalCopy
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.protocol import TurnProtocol
from calibadv_jax.rollout.runner import NO_PARTS, GroupParts, Rollouts
from calibadv_jax.run.configured_actions import check_tags, make_actions
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.model import AdapterBase, Model, read_base
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.services.http_client import SINGLE_ATTEMPT
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import check_running, open_retriever


def _ignore(_: object) -> None:
    """Do nothing: the default of callbacks."""


def impatient(config: Config) -> Config:
    """Return the config with services that are asked once and not waited for."""
    tools = []
    for tool in config.tools:
        if tool.mcp:
            tool = replace(tool, mcp=replace(tool.mcp, patience=SINGLE_ATTEMPT))
        tools.append(tool)
    retriever = replace(config.retriever, patience=SINGLE_ATTEMPT)
    sampler = replace(config.sampler, patience=SINGLE_ATTEMPT)
    teacher = config.teacher
    if teacher.is_on:
        teacher = replace(teacher, patience=SINGLE_ATTEMPT)
    return replace(config, tools=tools, retriever=retriever, sampler=sampler, teacher=teacher)


def check_inputs(config: Config, warn: Callable[[str], object] = _ignore) -> None:
    """Check the evaluation file and the running services, before minutes of work begin.

    Args:
        config: The run's config.
        warn: Gets a line while a service is waited for, for at most its `patience`. After a fault the
            services that are left are asked once.

    Raises:
        UserError: The file is damaged, or a service cannot be reached or does not fit the config; all faults
            together.
    """
    faults = Faults()
    if config.evaluate.every:
        with faults.collected():
            questions = load_questions(config.data.eval, config.data.columns)
            check_questions(questions, {}, config.prompt.template)
    if config.retriever.url:
        retriever = impatient(config).retriever if faults else config.retriever
        with faults.collected():
            check_running(retriever, warn)
    if config.sampler.name == "vllm" and config.sampler.urls:
        from calibadv_jax.sampler.rollout_workers import find_workers

        sampler = impatient(config).sampler if faults else config.sampler
        with faults.collected():
            find_workers(sampler, warn)
    faults.raise_all()


def group_parts(
    config: Config, tokenizer: Any, questions: Sequence[Question], warn: Callable[[str], object] = _ignore
) -> GroupParts:
    """Return what the groups of a training run hold beside trajectories from the prompt.

    Args:
        config: The run's config.
        tokenizer: The policy's tokenizer.
        questions: The training questions whose prompts fit.
        warn: Gets a line on demonstrations that do not fit.

    Raises:
        UserError: The file of demonstrations is missing or damaged, or none of them can be used.
    """
    parts = NO_PARTS
    if config.demonstrations.is_on:
        contrib = load_optional("group_demonstrations")
        demonstrations = contrib.GroupDemonstrations(config, tokenizer, questions, warn)
        parts = replace(parts, demonstrations=demonstrations.choose)
    if config.continuations.is_on:
        prefixes_of = load_optional("near_misses").prefixes_of
        parts = replace(
            parts,
            second_round=config.continuations.per_group,
            near_misses=partial(prefixes_of, config=config),
        )
    return parts


@contextmanager
def open_services(
    config: Config, model_folder: Path, process_group: ProcessGroup = SINGLE_PROCESS
) -> Iterator[tuple[str | list[str], list[str]]]:
    """Start the services that have no URL in the config; they end with the block.

    Their output goes to the run's folder. The first process starts the retriever for all processes; each
    process starts its own vLLM workers.

    Args:
        config: The run's config.
        model_folder: Folder of config.json and the tokenizer, for the vLLM workers.
        process_group: The processes of the run.

    Yields:
        The URL or URLs of the retriever, and those of this process' vLLM workers (none if sampler.name is
        jax).

    Raises:
        UserError: A service does not start.
    """
    folder = Path(config.run.dir)
    warn = Console(config.log.progress).warn
    retriever_config = config.retriever
    if not config.has_retriever:
        retriever_config = config.retriever.at(NO_RETRIEVER_URL)
    with ExitStack() as stack:
        service = open_retriever(retriever_config, folder / "retriever.log", warn)
        retriever_urls = process_group.run_on_main_and_broadcast(
            "retriever", lambda: stack.enter_context(service)
        )
        worker_urls: list[str] = []
        if config.sampler.name == "vllm":
            from calibadv_jax.sampler.rollout_workers import open_workers

            own_config, first = workers_of_process(
                config.sampler, process_group.process_index, process_group.process_count
            )
            workers = open_workers(
                own_config,
                model_folder,
                folder,
                config.sampler_dtype,
                config.rollout.max_length,
                warn,
                first=first,
            )
            with process_group.local_work("vLLM workers"):
                worker_urls = stack.enter_context(workers)
        yield retriever_urls, worker_urls


@contextmanager
def open_rollouts(
    config: Config,
    model: Model,
    model_folder: Path,
    snapshots: Path,
    check_service: Callable[[Mapping[str, Any]], object] = _ignore,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[Rollouts]:
    """Open the agent loop with the configured sampler and retriever.

    Args:
        config: The run's config.
        model: The run's model.
        model_folder: Folder of config.json and the tokenizer, and of base.json with adapters.
        snapshots: Folder in which policies are published for vLLM workers.
        check_service: Gets the reply of the retriever's health endpoint, and raises to refuse it.
        process_group: The processes of the run.

    Yields:
        Rollouts whose sampler has no weights yet.

    Raises:
        UserError: A service does not start or is refused, or the tokenizer cannot write the actions' tags.
    """
    actions = make_actions(config)
    check_tags(actions, model.tokenizer)
    with open_services(config, model_folder, process_group) as (retriever_urls, worker_urls):
        retriever = RetrieverClient(config.retriever, retriever_urls, Console(config.log.progress).warn)
        if retriever_urls != NO_RETRIEVER_URL:
            check_service(retriever.health())  # all later replies must be of this index
        own_concurrency = _share(config.rollout.max_concurrency, process_group)
        rollout = replace(config.rollout, max_concurrency=own_concurrency)
        base = read_base(model_folder)
        protocol = configured_protocol(config, model.tokenizer)
        stops = StopRule(model.tokenizer, stop_ids(model.hf_config["eos_token_id"], protocol))
        sampler, publish = _make_sampler(config, model, stops, worker_urls, snapshots, base, process_group)
        judge = None
        if config.reward.judge.url:
            judge = load_optional("judge").JudgeClient(config.reward.judge, Console(config.log.progress).warn)
        context = RolloutContext(
            sampler,
            retriever,
            model.tokenizer,
            rollout,
            config.prompt,
            actions,
            judge,
            tool_calls=config.tool_calls,
            answer_from=config.answer_from,
        )
        with Rollouts(context, config.run.seed, publish) as rollouts:
            yield rollouts


def stop_ids(end_of_text_ids: int | Sequence[int], protocol: TurnProtocol) -> set[int]:
    """Return the tokens that end a turn: the policy's end-of-text tokens, and those of the protocol.

    Args:
        end_of_text_ids: One token id, or several.
        protocol: The protocol of the turns.
    """
    ids = [end_of_text_ids] if isinstance(end_of_text_ids, int) else end_of_text_ids
    return {*ids, *protocol.end_of_turn_ids}


def _share(total: int, process_group: ProcessGroup) -> int:
    """Return a process' share of a number, rounded up."""
    return -(-total // process_group.process_count)


def _make_sampler(
    config: Config,
    model: Model,
    stops: StopRule,
    workers: list[str],
    snapshots: Path,
    base: AdapterBase | None,
    process_group: ProcessGroup,
) -> tuple[Sampler, Callable[[int, Params], Any]]:
    """Return the sampler, and the function that converts a version's parameters for it."""
    if config.sampler.name == "jax":
        return _make_embedded_sampler(config, model, stops, process_group)
    from calibadv_jax.sampler.vllm_sampler import VllmSampler

    vocab_size = model.policy.architecture.vocab_size
    publish = _snapshot_publisher(config, model, snapshots, base, process_group)
    sampler = VllmSampler(workers, config.sampler, stops, model.tokenizer_hash, vocab_size)
    return sampler, publish


def _make_embedded_sampler(
    config: Config, model: Model, stops: StopRule, process_group: ProcessGroup
) -> tuple[Sampler, Callable[[int, Params], Any]]:
    """Return the JAX sampler of this process; alone, it samples from the learner's own arrays."""
    from calibadv_jax.sampler.jax_sampler import JaxSampler

    length = config.rollout.max_length
    if process_group.process_count == 1:
        sampler = JaxSampler(model.policy, stops, config.sampler, model.mesh, length)
        return sampler, lambda _, params: params
    own_config = replace(config.sampler, slots=_share(config.sampler.slots, process_group))
    local_copy = LocalCopy(model.mesh, model.policy.numerics.compute_dtype, model.policy.split)
    sampler = JaxSampler(model.policy, stops, own_config, local_copy.mesh, length)
    return sampler, lambda _, params: local_copy(params)


def _snapshot_publisher(
    config: Config, model: Model, snapshots: Path, base: AdapterBase | None, process_group: ProcessGroup
) -> Callable[[int, Params], Path]:
    """Return the function that writes a version's parameters as a snapshot for vLLM workers."""
    from calibadv_jax.snapshots.publish import SnapshotStore

    dtype = jnp.dtype(config.checkpoint.snapshot_dtype or config.sampler_dtype)
    store = SnapshotStore(snapshots, config.checkpoint.snapshots_kept, dtype)
    # Metadata of the base, if snapshots hold the adapters alone.
    shared_base: dict[str, Any] | None = None
    if base and config.policy.lora.snapshots == "adapters":
        shared_base = base.snapshot_metadata()

    def publish(version: int, params: Params) -> Path:
        if shared_base:
            _, params = model.policy.split(params)
        elif model.policy.adapters:
            params = model.policy.fold_adapters(params, dtype)
        with process_group.barrier("snapshot of the policy"):
            return store.publish(
                version,
                params,
                hf_config=model.hf_config,
                tokenizer_hash=model.tokenizer_hash,
                base=shared_base,
                writes=process_group.is_main,
            )

    return publish
