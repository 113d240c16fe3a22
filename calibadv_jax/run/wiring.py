"""Open the services, the sampler and the rollouts of a run from its config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from calibadv_jax.config import Config
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.interfaces import Sampler
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import load_questions
from calibadv_jax.distributed.exchange import ALONE, Hosts
from calibadv_jax.distributed.joining import own_workers
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.sharding import LocalCopy
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.actions import check_tags, make_actions
from calibadv_jax.run.model import AdapterBase, Model, read_base
from calibadv_jax.sampler.stopping import StopRule
from calibadv_jax.services.retriever_client import RetrieverClient, check_running, open_retriever


def check_inputs(config: Config, warn: Callable[[str], object] = lambda _: None) -> None:
    """Check (UserError) the evaluation file and the running services, before minutes of work begin.

    `warn` gets a line while a service is waited for, up to its `patience`.
    """
    if config.evaluate.every:
        check_questions(load_questions(config.data.eval, config.data.columns), {}, config.prompt.template)
    if config.retriever.url:
        check_running(config.retriever, warn)
    if config.sampler.name == "vllm" and config.sampler.urls:
        from calibadv_jax.sampler.rollout_workers import find_workers

        find_workers(config.sampler, warn)


@contextmanager
def open_services(
    config: Config, model_folder: Path, hosts: Hosts = ALONE
) -> Iterator[tuple[str | list[str], list[str]]]:
    """Yield the URLs of the retriever and of the vLLM workers (none if sampler.name is jax).

    Services without a URL in the config are started here, and end with the block; their output goes to the
    run's folder. The first process starts the retriever for all `hosts`; each has its own workers, with
    config.json and tokenizer of `model_folder`.
    """
    folder, warn = Path(config.run.dir), Console(config.log.progress).warn
    section = config.retriever if config.has_retriever else config.retriever.at(NO_RETRIEVER)
    with ExitStack() as stack:
        service = open_retriever(section, folder / "retriever.log", warn)
        retriever = hosts.run_on_main_and_broadcast("retriever", lambda: stack.enter_context(service))
        urls: list[str] = []
        if config.sampler.name == "vllm":
            from calibadv_jax.sampler.rollout_workers import open_workers

            share, first = own_workers(config.sampler, hosts.index, hosts.count)
            dtype, length = config.sampler_dtype, config.rollout.max_length
            workers = open_workers(share, model_folder, folder, dtype, length, warn, first=first)
            with hosts.local_work("vLLM workers"):
                urls = stack.enter_context(workers)
        yield retriever, urls


@contextmanager
def open_rollouts(
    config: Config,
    model: Model,
    model_folder: Path,
    snapshots: Path,
    check_service: Callable[[Mapping[str, Any]], object] = lambda _: None,
    hosts: Hosts = ALONE,
) -> Iterator[Rollouts]:
    """Yield rollouts with the configured sampler and retriever, without weights yet.

    Policies are published for vLLM workers in the folder `snapshots`. `check_service` gets the reply of the
    retriever's health endpoint, and raises to refuse it.
    """
    actions = make_actions(config)
    check_tags(actions, model.tokenizer)
    with open_services(config, model_folder, hosts) as (urls, workers):
        retriever = RetrieverClient(config.retriever, urls, Console(config.log.progress).warn)
        if urls != NO_RETRIEVER:
            check_service(retriever.health())  # all later replies must be of this index
        share = replace(config.rollout, max_concurrency=-(-config.rollout.max_concurrency // hosts.count))
        base = read_base(model_folder)
        sampler, publish = _make_sampler(config, model, workers, snapshots, base, hosts)
        judge = config.reward.judge
        client = load_optional("judge").JudgeClient(judge) if judge.url else None
        context = RolloutContext(sampler, retriever, model.tokenizer, share, config.prompt, actions, client)
        with Rollouts(context, config.run.seed, publish) as rollouts:
            yield rollouts


def _make_sampler(
    config: Config, model: Model, workers: list[str], snapshots: Path, base: AdapterBase | None, hosts: Hosts
) -> tuple[Sampler, Callable[[int, Params], Any]]:
    """Return the sampler, and the function that converts a version's parameters for it."""
    stops = StopRule(model.tokenizer, model.hf_config["eos_token_id"])
    if config.sampler.name == "jax":
        from calibadv_jax.sampler.jax_sampler import JaxSampler

        share, length = config.sampler, config.rollout.max_length
        if hosts.count == 1:
            return JaxSampler(model.policy, stops, share, model.mesh, length), lambda _, params: params
        share = replace(share, slots=-(-share.slots // hosts.count))
        copied = LocalCopy(model.mesh, model.policy.numerics.compute_dtype, model.policy.split)
        sampler = JaxSampler(model.policy, stops, share, copied.mesh, length)
        return sampler, lambda _, params: copied(params)
    from calibadv_jax.sampler.vllm_sampler import VllmSampler
    from calibadv_jax.snapshots.publish import SnapshotStore

    dtype = config.checkpoint.snapshot_dtype or config.sampler_dtype
    store = SnapshotStore(snapshots, config.checkpoint.snapshots_kept, jnp.dtype(dtype))
    shared = base.shared() if base and config.policy.lora.snapshots == "adapters" else None

    def publish(version: int, params: Params) -> Path:
        if shared:
            params = model.policy.split(params)[1]
        elif model.policy.adapters:
            params = model.policy.merged(params, jnp.dtype(dtype))
        with hosts.barrier("snapshot of the policy"):
            return store.publish(
                version,
                params,
                hf_config=model.hf_config,
                tokenizer_hash=model.tokenizer_hash,
                base=shared,
                writes=hosts.is_first,
            )

    vocab_size = model.policy.architecture.vocab_size
    return VllmSampler(workers, config.sampler, stops, model.tokenizer_hash, vocab_size), publish
