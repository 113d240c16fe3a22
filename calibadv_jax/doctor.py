"""Checks a config end to end before a run: ``calibadv doctor --config FILE [--offline]``.

Every finding comes with its fix. Exit status 1 if something would stop the run. With --offline only what
needs no network, no services and no model or data files: `offline_checks`.
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
from calibadv_jax.coverage import coverage_lines
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import load_questions
from calibadv_jax.errors import UserError
from calibadv_jax.memory import GAPS, GIB, estimate_memory, heads_warnings, memory_line, peak_memory
from calibadv_jax.metrics.console import Console
from calibadv_jax.model import Model, build_model
from calibadv_jax.offline_checks import OFFLINE_CHECKS
from calibadv_jax.protocol import TAGS
from calibadv_jax.rollout.observation import encode
from calibadv_jax.rollout.prompts import build_prompt
from calibadv_jax.sampler.vllm_worker import require_vllm
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import check_running, open_retriever
from calibadv_jax.trajectory import Document


def run(config: Config, offline: bool = False) -> None:
    """Runs every check and prints one line a finding; status 1 if one failed."""
    console = Console(config.log.progress)
    failed = 0
    for name, check in OFFLINE_CHECKS if offline else CHECKS:
        try:
            lines = check(config)
        except UserError as error:
            failed += 1
            console.say(f"FAIL {name}: {error}")
            continue
        for line in lines:
            console.say(f"ok   {name}: {line}")
    checks = "offline check" if offline else "check"
    done = f"{failed} of {len(OFFLINE_CHECKS if offline else CHECKS)} {checks}s failed"
    console.say(done if failed else f"ready: every {checks} passed")
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
        check_running(config.retriever)
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
    """Estimated bytes on one device, and warnings where they exceed what it has or are held in vain."""
    architecture = model.policy.architecture
    estimate = estimate_memory(config, architecture, model.mesh.shape)
    lines = [memory_line(estimate), *heads_warnings(architecture, model.mesh.shape)]
    device = jax.devices()[0]
    stats: dict[str, Any] = device.memory_stats() or {}
    limit, peak = stats.get("bytes_limit"), peak_memory(estimate)
    gaps = GAPS.get(device.platform, 1.0)
    if limit and peak * gaps > limit:
        gapped = f", and programs can need {gaps} times the estimate (docs/scale.md)" if peak <= limit else ""
        lines.append(
            f"warning: the device has {limit / GIB:.1f} GiB{gapped}; raise mesh.fsdp or mesh.tensor, or lower"
            " learner.microbatch_rows, sampler.slots or learner.row_length"
        )
    return lines


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
        health = retriever.health()
        state = ", ".join(f"{name} {value}" for name, value in health.items() if value != "")
        reranked = retriever.check_reranker(health)
        begun = time.monotonic()
        (documents,) = asyncio.run(_search_once(retriever, question.text))
        seconds = time.monotonic() - begun
        if not documents:
            raise UserError(f"{retriever.url}: no document for {question.text!r}; is its corpus empty?")
        return [
            f"{retriever.url}: {state}",
            reranked,
            f"answered in {1000 * seconds:.0f} ms: {question.text!r} -> {documents[0].title!r}",
            *coverage_lines(config, url),
        ]


async def _search_once(retriever: RetrieverClient, query: str) -> list[list[Document]]:
    try:
        return await retriever.search([query])
    finally:
        await retriever.close()


Check = Callable[[Config], list[str]]
CHECKS: list[tuple[str, Check]] = [
    ("calibration", lambda config: describe(config.advantage)),
    ("questions", check_questions),
    ("policy", check_policy),
    ("sampler", check_sampler),
    ("retriever", check_retriever),
]


if __name__ == "__main__":
    cli.main("doctor", run)
