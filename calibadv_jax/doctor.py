"""Checks a config end to end before a run: ``calibadv doctor --config FILE``.

Every finding comes with its fix. Exit status 1 if something would stop the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax

from calibadv_jax import cli
from calibadv_jax.advantages.registry import describe
from calibadv_jax.config import Config
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import load_questions
from calibadv_jax.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.model import Model, build_model
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.protocol import TAGS
from calibadv_jax.rollout.observation import encode
from calibadv_jax.rollout.prompts import build_prompt
from calibadv_jax.sampler.vllm_worker import require_vllm
from calibadv_jax.services.retriever_client import RetrieverClient, open_retriever
from calibadv_jax.trajectory import Document

GIB = 1024**3


def run(config: Config) -> None:
    """Runs every check and prints one line a finding; status 1 if one failed."""
    console = Console(config.log.progress)
    failed = 0
    checks: list[tuple[str, Callable[[Config], list[str]]]] = [
        ("calibration", lambda config: describe(config.advantage)),
        ("questions", check_questions),
        ("policy", check_policy),
        ("sampler", check_sampler),
        ("retriever", check_retriever),
    ]
    for name, check in checks:
        try:
            lines = check(config)
        except UserError as error:
            failed += 1
            console.say(f"FAIL {name}: {error}")
            continue
        for line in lines:
            console.say(f"ok   {name}: {line}")
    console.say(f"{failed} of {len(checks)} checks failed" if failed else "ready: every check passed")
    if failed:
        raise SystemExit(1)


def check_inputs(config: Config) -> None:
    """What costs next to nothing to check and would be found minutes later, at the start of a run.

    Raises:
        UserError: the evaluation file is missing or malformed, or a service does not answer.
    """
    if config.evaluate.every:
        check_fit(load_questions(config.data.eval), {}, config.prompt.template)
    if config.retriever.url:
        RetrieverClient(config.retriever, config.retriever.url).health()
    if config.sampler.urls:
        check_sampler(config)


def check_questions(config: Config) -> list[str]:
    """Both question files, row by row."""
    lines = []
    for key in ("train", "eval"):
        path = getattr(config.data, key)
        questions = load_questions(path)
        check_fit(questions, config.data.weights if key == "train" else {}, config.prompt.template)
        sources = sorted({question.data_source for question in questions})
        lines.append(f"data.{key}: {len(questions)} questions ({', '.join(sources)}) in {path}")
    shared = {q.text for q in load_questions(config.data.train)} & {
        q.text for q in load_questions(config.data.eval)
    }
    if shared:
        lines.append(f"warning: {len(shared)} questions are in both files; held-out scores will be too high")
    return lines


def check_policy(config: Config) -> list[str]:
    """Tokenizer, prompt lengths of every question, mesh and memory."""
    model = build_model(config, config.policy.path)
    pieces = {tag: len(encode(model.tokenizer, tag)) for tag in TAGS}
    longest = 0
    example = ""
    for path in (config.data.train, config.data.eval):
        for question in load_questions(path):
            ids = build_prompt(question, model.tokenizer, config.prompt, config.rollout.max_prompt_length)
            if len(ids) > longest:
                longest, example = len(ids), model.tokenizer.decode(ids)
    architecture = model.policy.architecture
    return [
        f"{architecture.model_type}, {architecture.num_parameters / 1e6:.2f}M parameters, mesh"
        f" {dict(model.mesh.shape)}",
        "tokens of each tag: " + ", ".join(f"{tag} {count}" for tag, count in pieces.items()),
        f"longest prompt {longest} of {config.rollout.max_prompt_length} tokens: {example!r}",
        *memory_lines(config, model),
    ]


def memory_lines(config: Config, model: Model) -> list[str]:
    """Estimated bytes on one device, and a warning where they exceed what it has."""
    shape = model.mesh.shape
    shards = shape["fsdp"] * shape["tensor"]
    estimate = estimate_memory(config, model.policy.architecture, shards, shape["data"] * shape["fsdp"])
    total = sum(estimate.values())
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in estimate.items())
    lines = [f"estimated memory a device: {total / GIB:.2f} GiB ({parts})"]
    stats: dict[str, Any] = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit and total > limit:
        lines.append(
            f"warning: the device has {limit / GIB:.1f} GiB; raise mesh.fsdp or mesh.tensor, or lower"
            " learner.microbatch_rows, sampler.slots or learner.row_length"
        )
    return lines


def estimate_memory(
    config: Config, architecture: Architecture, shards: int, batch_shards: int
) -> dict[str, float]:
    """Bytes on one device by purpose; an estimate from shapes, not a measurement.

    Args:
        shards: devices that share the parameters. batch_shards: devices that share the rows.
    """
    sizes = {"float32": 4, "bfloat16": 2}
    stored = sizes[config.policy.param_dtype]
    computed = sizes[config.policy.compute_dtype]
    count = architecture.num_parameters / shards
    moments = 1 if config.learner.optimizer.name == "muon" else 2
    tokens = config.learner.microbatch_rows * config.learner.row_length / batch_shards
    width = architecture.hidden_size
    per_layer = 1 if config.policy.remat == "full" else 12
    chunk = min(config.policy.logprob_chunk, config.learner.row_length)
    rows = config.learner.microbatch_rows / batch_shards
    cache = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    estimate = {
        "parameters": count * stored,
        "optimizer": count * stored * moments,
        "gradients": count * 4 * 2,  # accumulated, and those of the microbatch
        "activations": tokens * width * computed * (architecture.num_layers * per_layer + 16),
        "logits": 3 * rows * chunk * architecture.vocab_size * 4,
    }
    if config.sampler.name == "jax":  # vLLM's workers have their own memory
        estimate["sampler weights"] = count * computed
        slots = config.sampler.slots * config.rollout.max_length
        estimate["kv cache"] = cache * slots * computed / batch_shards
    return estimate


def check_sampler(config: Config) -> list[str]:
    """vLLM: that it is installed, or that the workers answer with the routes the trainer needs."""
    sampler = config.sampler
    if sampler.name == "jax":
        return [f"in process, {sampler.slots} trajectories decoded together"]
    if not sampler.urls:
        require_vllm()
        return [f"{sampler.workers} vLLM worker(s) of flavour {sampler.flavour} will be started here"]
    lines = []
    for url in sampler.urls:
        try:
            answer = httpx.get(f"{url.rstrip('/')}/weight_info", timeout=30.0, trust_env=False)
        except httpx.HTTPError as error:
            raise UserError(
                f"vLLM worker {url}: cannot be reached ({type(error).__name__}); start it with"
                " scripts/launch_vllm_worker.sh or correct sampler.urls"
            ) from error
        if answer.status_code != 200:
            raise UserError(f"{url}: no /weight_info; start the worker with scripts/launch_vllm_worker.sh")
        lines.append(f"{url}: serves weights {answer.json()['weight_version']!r}")
    return lines


def check_retriever(config: Config) -> list[str]:
    """The service's corpus and index (a child service checks them as it starts), and one real query."""
    question = load_questions(config.data.eval)[0]
    with open_retriever(config.retriever, Path(config.run.dir) / "retriever.log") as url:
        # Asked once: what is loading or gone is what the doctor is to tell.
        retriever = RetrieverClient(replace(config.retriever, patience=config.retriever.timeout), url)
        state = ", ".join(f"{name} {value}" for name, value in retriever.health().items())
        begun = time.monotonic()
        (documents,) = asyncio.run(_search_once(retriever, question.text))
        seconds = time.monotonic() - begun
        if not documents:
            raise UserError(f"{retriever.url}: no document for {question.text!r}; is its corpus empty?")
        return [
            f"{retriever.url}: {state}",
            f"answered in {1000 * seconds:.0f} ms: {question.text!r} -> {documents[0].title!r}",
        ]


async def _search_once(retriever: RetrieverClient, query: str) -> list[list[Document]]:
    try:
        return await retriever.search([query])
    finally:
        await retriever.close()


if __name__ == "__main__":
    cli.main("doctor", run)
