"""Checks a config end to end before a run: ``calibadv doctor --config FILE [--offline]``.

A finding is ok, warn (a run would work, but not well), skip (not checked) or FAIL, which is exit status 1.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from calibadv_jax.config import Config
from calibadv_jax.config.sections.policy import REST
from calibadv_jax.contrib.judge import JudgeClient
from calibadv_jax.contrib.planning.hardware import check_rows
from calibadv_jax.contrib.planning.memory import device_lines, find_architecture
from calibadv_jax.core import hub
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.observation import encode
from calibadv_jax.rollout.prompts import FROM_DATA, drop_overlong, open_prompt, prompt_lengths, template_text
from calibadv_jax.run.actions import check_tags, make_actions
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.model import Model, build_model, find_folder
from calibadv_jax.sampler.rollout_workers import find_workers
from calibadv_jax.sampler.vllm_command import require_vllm
from calibadv_jax.services.http_client import ONCE
from calibadv_jax.services.retriever_client import RetrieverClient, open_retriever
from calibadv_jax.snapshots.huggingface import check_weights

NO_ANSWER = "I do not know"
STATUS = {"warning: ": "warn", "not checked: ": "skip", "failed: ": "FAIL"}  # how a line begins; else ok


def run(config: Config, offline: bool = False) -> None:
    """Run every check and print one line a finding; exit status 1 if a check failed."""
    console = Console(config.log.progress)
    checks = OFFLINE_CHECKS if offline else CHECKS
    tools = [replace(tool, mcp=tool.mcp and replace(tool.mcp, patience=ONCE)) for tool in config.tools]
    config = replace(config, tools=tools)
    failed, counts = 0, Counter[str]()
    for name, check in checks.items():
        try:
            with console.phase(f"checking: {name}", announce=not offline):
                lines = check(config)
        except UserError as error:
            lines = [f"failed: {error}"]
        failed += any(line.startswith("failed: ") for line in lines)
        for line in lines:
            prefix = next(filter(line.startswith, STATUS), "")
            status = STATUS.get(prefix, "ok")
            counts[status] += 1
            console.say(f"{status:4} {name}: {line.removeprefix(prefix)}")
    kind = "offline check" if offline else "check"
    if failed:
        console.say(f"{failed} of {len(checks)} {kind}s failed")
        raise SystemExit(1)
    console.say(f"every {kind} passed; warnings: {counts['warn']}, not checked: {counts['skip']}")


def check_questions(config: Config) -> list[str]:
    """Check both question files, row by row."""
    lines, texts = [], dict[str, set[str]]()
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        questions = load_questions(sources, config.data.columns)
        check_fit(questions, config.data.weights if key == "train" else {}, config.prompt.template)
        names = sorted({question.data_source for question in questions})
        answers = sum(len(question.golden_answers) for question in questions)
        size = f"{len(questions)} questions ({', '.join(names)})"
        lines.append(f"data.{key}: {size} with {answers} golden answers")
        lines += [f"warning: {line}" for line in answer_warnings(questions, f"data.{key}")]
        texts[key] = {question.text for question in questions}
    if shared := texts["train"] & texts["eval"]:
        lines.append(f"warning: {len(shared)} questions are in both files; held-out scores will be too high")
    return lines


def check_policy(config: Config) -> list[str]:
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    tags = grammar_of(make_actions(config)).tags
    return [
        f"mesh {dict(model.mesh.shape)}",
        *weight_lines(config, model),
        "tokens of each tag: " + ", ".join(f"{tag} {len(encode(model.tokenizer, tag))}" for tag in tags),
        *prompt_lines(config, model.tokenizer),
        *device_lines(config, model.policy.architecture, model.mesh.shape),
    ]


def weight_lines(config: Config, model: Model) -> list[str]:
    """Check that the tensors of policy.path have the shapes of its config.json."""
    if not (path := config.policy.path):
        return []
    folder, _ = find_folder(config, path, resolved=model.pins)
    if hub.is_repository(path) and not any(folder.glob("*.safetensors")):
        return [f"not checked: the tensors of {path}, which are not downloaded yet"]
    return [check_weights(folder, model.policy)]


def prompt_lines(config: Config, tokenizer: Any) -> list[str]:
    """Return the number of overlong prompts, unless these are to be refused, and a long prompt that fits."""
    actions, limit, lines = make_actions(config), config.rollout.max_prompt_length, []
    check_tags(actions, tokenizer)
    for key in ("train", "eval"):
        questions = load_questions(getattr(config.data, key), config.data.columns)
        lengths = prompt_lengths(questions, tokenizer, config.prompt, limit, actions)
        kept, overlong = drop_overlong(questions, lengths, limit, config.data.overlong_prompts, f"data.{key}")
        if overlong:
            lines.append(f"warning: {overlong}")
    longest = max(kept, key=lambda question: len(question.text))
    ids, _ = open_prompt(longest, tokenizer, config.prompt, limit, actions)
    shown = f"{len(ids)} of {limit} tokens: {tokenizer.decode(ids)!r}"
    return [*lines, f"the prompt of data.eval's longest question has {shown}"]


def check_sampler(config: Config) -> list[str]:
    """Check that vLLM is installed, or that the workers answer with the routes the trainer needs."""
    sampler = config.sampler
    if sampler.name == "jax":
        return [f"in process, {sampler.slots} trajectories decoded together"]
    if not sampler.urls:
        require_vllm()
        return [f"{sampler.workers} vLLM worker(s) of flavour {sampler.flavour} will be started here"]
    labels, missing = find_workers(replace(sampler, patience=ONCE), lambda _: None)
    lines = [f"{url}: serves weights {label!r}" for url, label in labels.items()]
    return lines + [f"warning: {url} is away ({reason})" for url, reason in missing.items()]


def check_retriever(config: Config) -> list[str]:
    """Check the service's corpus and index (a child service checks them as it starts), and one real query."""
    if not config.has_retriever:
        return ["none: no action of tools asks it"]
    question = load_questions(config.data.eval, config.data.columns)[0]
    impatient = replace(config.retriever, patience=ONCE)
    with open_retriever(impatient, Path(config.run.dir) / "retriever.log", lambda _: None) as url:
        retriever = RetrieverClient(impatient, url)
        health = retriever.health()
        state = ", ".join(f"{name} {value}" for name, value in health.items() if value != "")
        reranked = retriever.check_reranker(health)
        ((documents,),) = asyncio.run(_ask(retriever, retriever.search, [[question.text]]))
        outcome = f"warning: nothing found for {question.text!r}; does the corpus fit data.eval?"
        if documents:
            outcome = f"first document for {question.text!r}: {documents[0].title!r}"
        return [
            f"{retriever.url}: {state or 'answers, but has no /health that names its corpus and index'}",
            *(f"warning: {url} is away ({reason})" for url, reason in retriever.missing.items()),
            reranked,
            outcome,
        ]


async def _ask(
    client: RetrieverClient | JudgeClient, ask: Callable[[Any], Awaitable[Any]], requests: Sequence[Any]
) -> list[Any]:
    try:
        return [await ask(request) for request in requests]
    finally:
        await client.close()


def check_judge(config: Config) -> list[str]:
    """Ask the judge, if there is one, for its verdict on a golden answer, and on none."""
    if not config.reward.judge.url:
        return []
    judge = JudgeClient(replace(config.reward.judge, patience=ONCE))
    question = load_questions(config.data.eval, config.data.columns)[0]
    right = question.golden_answers[0]
    try:
        golden, other = asyncio.run(_ask(judge, partial(judge.verdict, question), [right, NO_ANSWER]))
    except RequestFailed as error:
        raise UserError(str(error)) from error
    lines = [f"{judge.url}: {judge.config.model} gives {right!r} {golden:g} and {NO_ANSWER!r} {other:g}"]
    if golden < 0.5 or other >= 0.5:
        lines.append(f"warning: it misjudges these answers to {question.text!r}; see reward.judge.prompt")
    return lines


def check_prompt(config: Config) -> list[str]:
    if config.prompt.template != FROM_DATA:
        template_text(config.prompt.template)  # refuses an unknown name
    return [f"template {config.prompt.template}"]


def check_shape(config: Config) -> list[str]:
    """Check mesh and memory without the policy's tensors and tokenizer."""
    mesh = config.mesh.sizes_on(jax.device_count())
    lines = ["mesh " + " x ".join(f"{name} {size}" for name, size in mesh.items())]
    if REST in config.mesh.sizes.values():
        lines[0] += ", as many as there are here"
    else:
        check_rows(config, mesh)
    architecture = find_architecture(config)
    if architecture is None:
        fault = "policy.path holds no config.json here, and policy.init no vocab_size"
        return [*lines, f"not checked: memory: {fault}"]
    # A run that does not fit this machine is no failure: it may be meant for another one.
    memory = device_lines(config, architecture, mesh)
    return lines + [line.replace("failed: ", "warning: ", 1) for line in memory]


CHECKS = {
    "calibration": describe_choices,
    "questions": check_questions,
    "policy": check_policy,
    "sampler": check_sampler,
    "retriever": check_retriever,
    "judge": check_judge,
}
OFFLINE_CHECKS = {"calibration": describe_choices, "prompt": check_prompt, "policy": check_shape}
