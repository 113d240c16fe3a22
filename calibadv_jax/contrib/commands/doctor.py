"""Checks a config end to end before a run: ``calibadv doctor --config FILE [--offline]``.

Every finding comes with its fix, and with a status: ok, warn (a run would work, but not well), skip (it was
not checked) or FAIL. Exit status 1 if something would stop the run. With --offline only what
needs no network, no services and no model or data files: `offline_checks`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.contrib.commands.coverage import coverage_lines
from calibadv_jax.contrib.commands.offline_checks import OFFLINE_CHECKS
from calibadv_jax.contrib.judge import JudgeClient
from calibadv_jax.contrib.planning.fit import cpu_lines, memory_lines
from calibadv_jax.contrib.planning.memory import adapter_lines, estimate_memory, heads_warnings
from calibadv_jax.core import hub
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.tags import leaves_thought_open
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.observation import encode
from calibadv_jax.rollout.prompts import drop_overlong, open_prompt, prompt_lengths
from calibadv_jax.run.actions import check_tags, make_actions
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.model import Model, build_model, find_folder
from calibadv_jax.sampler.vllm_worker import find_workers, require_vllm
from calibadv_jax.services.http_client import ONCE
from calibadv_jax.services.retriever_client import RetrieverClient, open_retriever
from calibadv_jax.snapshots.huggingface import check_weights

NO_ANSWER = "I do not know"
STATUS = {"warning: ": "warn", "not checked: ": "skip", "failed: ": "FAIL"}  # how a line begins; else ok


def run(config: Config, offline: bool = False) -> None:
    """Runs every check and prints one line a finding; status 1 if one failed."""
    console = Console(config.log.progress)
    checks = OFFLINE_CHECKS if offline else CHECKS
    tools = [replace(tool, mcp=tool.mcp and replace(tool.mcp, patience=ONCE)) for tool in config.tools]
    config = replace(config, tools=tools)
    failed = 0
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}  # what failed -> the check that says so
    for name, check in checks:
        try:
            with console.phase(f"checking: {name}", announce=not offline):
                lines = check(config)
        except UserError as error:
            lines = [f"failed: {error}"]
        findings = [with_status(_once(line, name, failures)) for line in lines]
        for status, line in findings:
            console.say(f"{status:4} {name}: {line}")
        statuses = [status for status, _ in findings]
        counts.update(statuses)
        failed += "FAIL" in statuses
    console.say(summary(failed, len(checks), "offline check" if offline else "check", counts))
    if failed:
        raise SystemExit(1)


def _once(line: str, name: str, failures: dict[str, str]) -> str:
    """The line; of a failure that another check has named, only that it stands in the way of this one."""
    first = failures.setdefault(line, name) if line.startswith("failed: ") else name
    return line if first == name else f"not checked: what failed under {first!r} is needed here too"


def with_status(line: str) -> tuple[str, str]:
    """The status that a check's line begins with, and the rest of it."""
    for prefix, status in STATUS.items():
        if line.startswith(prefix):
            return status, line.removeprefix(prefix)
    return "ok", line


def summary(failed: int, total: int, what: str, counts: Counter[str]) -> str:
    """The last line. Only if everything was checked, and nothing is to be thought of, is it "ready"."""
    if failed:
        return f"{failed} of {total} {what}s failed"
    said = [f"{counts['warn']} warning{'s' if counts['warn'] > 1 else ''}"] if counts["warn"] else []
    if counts["skip"]:
        said.append(f"{counts['skip']} thing{'s' if counts['skip'] > 1 else ''} not checked")
    return f"every {what} passed, with {' and '.join(said)}" if said else f"ready: every {what} passed"


def check_questions(config: Config) -> list[str]:
    """Both question files, row by row."""
    lines = []
    for key in ("train", "eval"):
        path = getattr(config.data, key)
        questions = load_questions(path, config.data.columns)
        check_fit(questions, config.data.weights if key == "train" else {}, config.prompt.template)
        sources = sorted({question.data_source for question in questions})
        answers = sum(len(question.golden_answers) for question in questions)
        found = f"{len(questions)} questions ({', '.join(sources)}) in {path}"
        lines.append(f"data.{key}: {found}, with {answers} golden answers")
        lines += [f"warning: {line}" for line in answer_warnings(questions, f"data.{key}")]
    shared = {q.text for q in load_questions(config.data.train, config.data.columns)} & {
        q.text for q in load_questions(config.data.eval, config.data.columns)
    }
    if shared:
        lines.append(f"warning: {len(shared)} questions are in both files; held-out scores will be too high")
    return lines


def check_policy(config: Config) -> list[str]:
    """Tokenizer, prompt lengths of every question, mesh and memory."""
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    tags = grammar_of(make_actions(config)).tags
    pieces = {tag: len(encode(model.tokenizer, tag)) for tag in tags}
    architecture = model.policy.architecture
    return [
        f"{architecture.model_type}, {architecture.num_parameters / 1e6:.2f}M parameters, mesh"
        f" {dict(model.mesh.shape)}",
        *weight_lines(config, model),
        *adapter_lines(config, architecture),
        "tokens of each tag: " + ", ".join(f"{tag} {count}" for tag, count in pieces.items()),
        *prompt_lines(config, model.tokenizer),
        *memory_lines(estimate_memory(config, architecture, model.mesh.shape), model.mesh.size),
        *heads_warnings(architecture, model.mesh.shape),
        *cpu_lines(config),
    ]


def weight_lines(config: Config, model: Model) -> list[str]:
    """Whether the tensors of policy.path have the shapes that its config.json says."""
    path = config.policy.path
    if not path:
        return []
    folder, _ = find_folder(config, path, resolved=model.pins)
    if hub.is_repository(path) and not any(folder.glob("*.safetensors")):
        return [f"not checked: the tensors of {path}, which are not downloaded yet"]
    return [check_weights(folder, model.policy)]


def prompt_lines(config: Config, tokenizer: Any) -> list[str]:
    """The longest prompt that fits, and how many do not.

    Raises:
        UserError: some do not, and data.overlong_prompts is "refuse".
    """
    actions = make_actions(config)
    check_tags(actions, tokenizer)
    limit, warnings, example = config.rollout.max_prompt_length, [], (np.zeros(0, np.int32), "")
    for key in ("train", "eval"):
        questions = load_questions(getattr(config.data, key), config.data.columns)
        lengths = prompt_lengths(questions, tokenizer, config.prompt, limit, actions)
        kept, overlong = drop_overlong(questions, lengths, limit, config.data.overlong_prompts, f"data.{key}")
        warnings += [f"warning: {overlong}"] if overlong else []
        longest = max(kept, key=lambda question: len(question.text))
        prompt = open_prompt(longest, tokenizer, config.prompt, limit, actions)
        example = max(example, prompt, key=lambda prompt: len(prompt[0]))
    ids, opening = example
    shown = f"the longest question's prompt has {len(ids)} of {limit} tokens"
    return [*warnings, f"{shown}: {tokenizer.decode(ids)!r}", *opening_lines(config, opening)]


def opening_lines(config: Config, opening: str) -> list[str]:
    """Which text of the prompt counts as the beginning of the first turn."""
    if opening == config.prompt.opening:
        return []
    if not leaves_thought_open(opening):
        return [
            f"the prompt ends in {opening!r}: the first turn counts with it, or with a thought of its own;"
            " later turns need one"
        ]
    later = (
        "opens later turns too"
        if config.prompt.prepend_think
        else "is off: the policy opens later turns itself"
    )
    return [f"the prompt opens the first turn with {opening!r}; prompt.prepend_think {later}"]


def check_sampler(config: Config) -> list[str]:
    """vLLM: that it is installed, or that the workers answer with the routes the trainer needs."""
    sampler = config.sampler
    if sampler.name == "jax":
        return [f"in process, {sampler.slots} trajectories decoded together"]
    if not sampler.urls:
        require_vllm()
        return [f"{sampler.workers} vLLM worker(s) of flavour {sampler.flavour} will be started here"]
    found = find_workers(replace(sampler, patience=ONCE), lambda _: None)
    lines = [f"{url}: serves weights {label!r}" for url, label in found.answers.items()]
    return lines + [f"warning: {url} is away ({reason})" for url, reason in found.missing.items()]


def check_retriever(config: Config) -> list[str]:
    """The service's corpus and index (a child service checks them as it starts), and one real query."""
    if not config.has_retriever:
        return ["none: no action of tools asks it"]
    question = load_questions(config.data.eval, config.data.columns)[0]
    asked = replace(config.retriever, patience=ONCE)
    with open_retriever(asked, Path(config.run.dir) / "retriever.log", lambda _: None) as url:
        retriever = RetrieverClient(asked, url)
        health = retriever.health()
        state = ", ".join(f"{name} {value}" for name, value in health.items() if value != "")
        reranked = retriever.check_reranker(health)
        begun = time.monotonic()
        (documents,) = asyncio.run(_search_once(retriever, question.text))
        seconds = time.monotonic() - begun
        if documents:
            outcome = f"answered in {1000 * seconds:.0f} ms: {question.text!r} -> {documents[0].title!r}"
        else:
            outcome = f"warning: nothing found for {question.text!r}; does the corpus fit data.eval?"
        return [
            f"{retriever.url}: {state or 'answers, but has no /health that names its corpus and index'}",
            *(f"warning: {url} is away ({reason})" for url, reason in retriever.missing.items()),
            reranked,
            outcome,
            *coverage_lines(replace(config, retriever=asked), url),
        ]


async def _search_once(retriever: RetrieverClient, query: str) -> list[list[Document]]:
    try:
        return await retriever.search([query])
    finally:
        await retriever.close()


def check_judge(config: Config) -> list[str]:
    """Where a judge is asked: what it says of a golden answer, and of none."""
    if not config.reward.judge.url:
        return []
    judge = JudgeClient(replace(config.reward.judge, patience=ONCE))
    question = load_questions(config.data.eval, config.data.columns)[0]
    answers = question.golden_answers[0], NO_ANSWER
    begun = time.monotonic()
    try:
        golden, other = asyncio.run(_judged(judge, question, answers))
    except RequestFailed as error:
        raise UserError(str(error)) from error
    said = f"{judge.config.model} gives {answers[0]!r} {golden:g} and {NO_ANSWER!r} {other:g}"
    lines = [f"{judge.url}: {said} in {1000 * (time.monotonic() - begun):.0f} ms"]
    asked = f"to {question.text!r}"
    if golden < 0.5:
        lines.append(
            f"warning: it finds the golden answer {answers[0]!r} {asked} wrong; see reward.judge.prompt"
        )
    if other >= 0.5:
        lines.append(f"warning: it finds {NO_ANSWER!r} {asked} right; see reward.judge.prompt")
    return lines


async def _judged(judge: JudgeClient, question: Question, answers: Sequence[str]) -> list[float]:
    try:
        return [await judge.verdict(question, answer) for answer in answers]
    finally:
        await judge.close()


Check = Callable[[Config], list[str]]
CHECKS: list[tuple[str, Check]] = [
    ("calibration", describe_choices),
    ("questions", check_questions),
    ("policy", check_policy),
    ("sampler", check_sampler),
    ("retriever", check_retriever),
    ("judge", check_judge),
]
