"""Doctor."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.config.sections.policy import REST
from calibadv_jax.contrib.commands.coverage import coverage_lines
from calibadv_jax.contrib.judge import JudgeClient
from calibadv_jax.contrib.planning.memory import (
    adapter_lines,
    cpu_lines,
    estimate_memory,
    heads_warnings,
    memory_lines,
)
from calibadv_jax.core import hub
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.tags import leaves_thought_open
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.observation import encode
from calibadv_jax.rollout.prompt_lengths import drop_overlong, prompt_lengths
from calibadv_jax.rollout.prompts import FROM_DATA, open_prompt, template_text
from calibadv_jax.run.actions import check_tags, make_actions
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.model import Model, build_model, find_folder, has_tokenizer, load_tokenizer
from calibadv_jax.sampler.vllm_worker import find_workers, require_vllm
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import open_retriever
from calibadv_jax.services.waiting import ONCE
from calibadv_jax.snapshots.huggingface import check_weights, read_hf_config

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
    folder, _ = find_folder(config, path, known=model.pins)
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


def check_prompt(config: Config) -> list[str]:
    """The template, and whether the longest trajectory that the limits allow fits."""
    rollout = config.rollout
    searches = rollout.max_searches * (rollout.max_turn_length + rollout.max_observation_length)
    longest = rollout.max_prompt_length + searches + rollout.max_turn_length
    room = f"the longest trajectory has {longest} tokens, and rollout.max_length is {rollout.max_length}"
    if longest > rollout.max_length:
        room += ": a trajectory that is longer ends without an answer"
    if config.prompt.template == FROM_DATA:
        return ["the prompt that each row of the data carries", room]
    text = template_text(config.prompt.template)
    return [f"template of {len(text)} characters, {text.count('<answer>')} answer tags", room]


def check_question_files(config: Config) -> list[str]:
    """Those that are here."""
    lines = []
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        files = list(sources.values()) if isinstance(sources, dict) else sources
        files = [files] if isinstance(files, str) else files
        if any(files) and all(Path(file).is_file() for file in files):
            questions = load_questions(sources, config.data.columns)
            lines.append(f"data.{key}: {len(questions)} questions in {', '.join(files)}")
            lines += [f"warning: {line}" for line in answer_warnings(questions, f"data.{key}")]
        else:
            lines.append(f"not checked: data.{key}: {', '.join(files) or 'none'} is not here")
    return lines


def check_shape(config: Config) -> list[str]:
    """The policy's shape, the mesh, and the memory of a device."""
    mesh = mesh_sizes(config)
    shards, rows = mesh["data"] * mesh["fsdp"], config.learner.microbatch_rows
    is_counted = REST in config.mesh.sizes.values()
    demand = f"learner.microbatch_rows is {rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards}"
    if rows % shards and not is_counted:
        raise UserError(f"{demand}: set it to {-(-rows // shards) * shards}")
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    counted = ", as many as there are here" if is_counted else ""
    lines = [f"mesh {sizes} = {math.prod(mesh.values())} device(s){counted}"]
    if rows % shards:
        lines.append(f"warning: {demand} on a machine with as many devices")
    architecture = find_architecture(config)
    if architecture is None:
        where = f"{config.policy.path}/config.json is not here" if config.policy.path else "no policy.path"
        return [*lines, f"not checked: memory: {where}, and policy.init gives no whole shape"]
    name = f"{architecture.model_type}, {architecture.num_parameters / 1e6:.2f}M parameters"
    # What does not fit here is no failure: the run may be meant for another machine.
    memory = [
        line.replace("failed: ", "warning: ", 1)
        for line in memory_lines(estimate_memory(config, architecture, mesh), math.prod(mesh.values()))
    ]
    on_cpu = cpu_lines(config) if math.prod(mesh.values()) <= jax.device_count() else []
    return [
        name,
        *_files_here(config, architecture),
        *adapter_lines(config, architecture),
        *lines,
        *memory,
        *heads_warnings(architecture, mesh),
        *on_cpu,
    ]


def _files_here(config: Config, architecture: Architecture) -> list[str]:
    """Tokenizer and tensors, where their folders are here."""
    lines, folder = [], Path(config.policy.path)
    tokenizer = Path(config.policy.tokenizer or folder)
    if (config.policy.tokenizer or config.policy.path) and tokenizer.is_dir() and has_tokenizer(tokenizer):
        lines.append(f"tokenizer of {len(load_tokenizer(tokenizer))} tokens in {tokenizer}")
    if config.policy.path and any(folder.glob("*.safetensors")):
        lines.append(check_weights(folder, Policy(architecture, Numerics.from_config(config.policy))))
    return lines


def check_updates(config: Config) -> list[str]:
    """How a step's trajectories are divided."""
    learner, rollout = config.learner, config.rollout
    trajectories = rollout.questions_per_step * rollout.group_size
    updates = -(-trajectories // (learner.minibatch_size or trajectories)) * learner.epochs
    return [
        f"{learner.steps} steps of {rollout.questions_per_step} questions x {rollout.group_size} ="
        f" {trajectories} trajectories, {updates} update(s) each: {learner.steps * updates} in all"
    ]


def check_services(config: Config) -> list[str]:
    """Which sampler and retriever the run will ask for, and what of them."""
    sampler, retriever = config.sampler, config.retriever
    who = f"{len(sampler.urls) or sampler.workers} vLLM worker(s)" if sampler.name == "vllm" else "in process"
    what = f"the best {retriever.topk} documents, not reranked"
    if retriever.rerank_topk:
        what = f"{retriever.retrieval_topk} documents reranked to {retriever.rerank_topk}"
    where = retriever.url or retriever.corpus or "none yet (set retriever.url or retriever.corpus)"
    return [f"sampler: {who}, {sampler.slots} trajectories together", f"retriever: {where}: {what}"]


def mesh_sizes(config: Config) -> dict[str, int]:
    """Sizes of the mesh's axes; a size of -1 takes the devices of this machine that the other axes leave."""
    return config.mesh.sizes_on(jax.device_count())


def find_architecture(config: Config) -> Architecture | None:
    """Of the policy's folder if it is here, else of policy.init; None if neither says it all.

    Raises:
        UserError: it cannot be used.
    """
    folder, source = Path(config.policy.path), "policy.init"
    hf_config: dict[str, Any] = dict(config.policy.init)
    if config.policy.path and (folder / "config.json").is_file():
        hf_config, source = read_hf_config(folder), f"{folder}/config.json"
    if "vocab_size" not in hf_config:  # as large as the tokenizer, which may not exist yet
        return None
    return architecture_from_hf(hf_config, source)


OFFLINE_CHECKS: list[tuple[str, Callable[[Config], list[str]]]] = [
    ("calibration", describe_choices),
    ("prompt", check_prompt),
    ("questions", check_question_files),
    ("policy", check_shape),
    ("updates", check_updates),
    ("services", check_services),
]
