"""Checks a config end to end before a run: ``calibadv doctor --config FILE [--offline]``.

A finding is ok, warn (a run would work, but not well), skip (not checked) or FAIL, which is exit status 1.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from calibadv_jax.config import Config
from calibadv_jax.config.sections.data import FROM_DATA
from calibadv_jax.config.sections.policy import REMAINING_DEVICES
from calibadv_jax.config.sections.rollout import TOOL_CALLS
from calibadv_jax.contrib import teacher as teaching
from calibadv_jax.contrib.judge import JudgeClient
from calibadv_jax.contrib.planning.hardware import check_rows
from calibadv_jax.contrib.planning.known_models import find_architecture
from calibadv_jax.contrib.planning.memory import device_lines
from calibadv_jax.core import hub
from calibadv_jax.core.errors import Faults, RequestFailed, UserError, each_fault
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.pipeline import check_questions as check_fit
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rollout.prompts import drop_overlong, template_text
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.configured_actions import check_tags, make_actions
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.model import Model, build_model, find_folder
from calibadv_jax.run.untrained_tokens import untrained_text, untrained_tokens
from calibadv_jax.run.wiring import impatient
from calibadv_jax.sampler.rollout_workers import find_workers
from calibadv_jax.sampler.vllm_command import require_vllm
from calibadv_jax.services.http_client import SINGLE_ATTEMPT
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import open_retriever
from calibadv_jax.snapshots.huggingface import check_weights

NO_ANSWER = "I do not know"  # a wrong answer to any question, for the judge
MANY_EPOCHS = 100  # a question that is asked more often is learned by heart
STAND_IN = Question("stand-in", "What is the capital of France?", ("Paris",), "doctor")
# How a check's line begins -> the status that is printed before it. Other lines are ok.
STATUS = {"warning: ": "warn", "not checked: ": "skip", "failed: ": "FAIL"}


def run(config: Config, offline: bool = False) -> None:
    """Run every check and print one line for each finding.

    Args:
        config: the config of the run.
        offline: run only the checks that need no network, no services and no files.

    Raises:
        SystemExit: with status 1 if a check failed.
    """
    console = Console(config.log.progress)
    checks = OFFLINE_CHECKS if offline else CHECKS
    config = impatient(config)
    num_failed = 0
    counts: Counter[str] = Counter()  # lines by status
    for name, check in checks.items():
        try:
            with console.phase(f"checking: {name}", announce=not offline):
                lines = check(config)
        except UserError as error:
            lines = [f"failed: {fault}" for fault in each_fault(error)]
        if any(line.startswith("failed: ") for line in lines):
            num_failed += 1
        for line in lines:
            status, text = _split_status(line)
            counts[status] += 1
            console.say(f"{status:4} {name}: {text}")
    kind = "offline check" if offline else "check"
    if num_failed:
        console.say(f"{num_failed} of {len(checks)} {kind}s failed")
        raise SystemExit(1)
    console.say(f"every {kind} passed; warnings: {counts['warn']}, not checked: {counts['skip']}")


def _split_status(line: str) -> tuple[str, str]:
    """Return the status that a check's line begins with ("ok" without one), and the rest of the line."""
    for prefix, status in STATUS.items():
        if line.startswith(prefix):
            return status, line.removeprefix(prefix)
    return "ok", line


def check_questions(config: Config) -> list[str]:
    """Check both question files, row by row."""
    lines = []
    faults = Faults()
    train: list[Question] = []
    held_out: list[Question] = []
    with faults.collected():
        train = load_questions(config.data.train, config.data.columns)
        check_fit(train, config.data.weights, config.prompt.template)
        lines += _question_lines(train, "data.train")
    with faults.collected():
        held_out = load_questions(config.data.eval, config.data.columns)
        check_fit(held_out, {}, config.prompt.template)
        lines += _question_lines(held_out, "data.eval")
    faults.raise_all()
    num_epochs = config.learner.steps * config.rollout.questions_per_step / len(train)
    if num_epochs > MANY_EPOCHS:
        lines.append(
            f"warning: data.train's {len(train)} questions are asked {num_epochs:,.0f} times each in"
            f" learner.steps={config.learner.steps}; lower it, or add questions"
        )
    train_texts = {question.text for question in train}
    held_out_texts = {question.text for question in held_out}
    num_shared = len(train_texts & held_out_texts)
    if num_shared:
        lines.append(f"warning: {num_shared} questions are in both files; held-out scores will be too high")
    return lines


def _question_lines(questions: Sequence[Question], key: str) -> list[str]:
    """Return the size of the file that a config key names, and warnings of its answers."""
    sources = sorted({question.data_source for question in questions})
    num_answers = sum(len(question.golden_answers) for question in questions)
    lines = [f"{key}: {len(questions)} questions ({', '.join(sources)}) with {num_answers} golden answers"]
    lines += [f"warning: {line}" for line in answer_warnings(questions, key)]
    return lines


def check_policy(config: Config) -> list[str]:
    """Check mesh, tensors, tokenizer, prompts and memory of the policy."""
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    lines = [f"mesh {dict(model.mesh.shape)}"]
    # The tags come before the tensors: an action that cannot be made is reported first.
    protocol = configured_protocol(config, model.tokenizer)
    faults = Faults()
    with faults.collected():
        lines += weight_lines(config, model)
    lines += protocol.diagnose()
    with faults.collected():
        lines += prompt_lines(config, model.tokenizer)
    with faults.collected():
        lines += device_lines(config, model.policy.architecture, model.mesh.shape)
    faults.raise_all()
    return lines


def weight_lines(config: Config, model: Model) -> list[str]:
    """Check the shapes of policy.path's tensors, and that the protocol's control tokens were trained."""
    path = config.policy.path
    if not path:
        return []
    folder, _ = find_folder(config, path, resolved=model.pins)
    if hub.is_repository(path) and not any(folder.glob("*.safetensors")):
        return [f"not checked: the tensors of {path}, which are not downloaded yet"]
    lines = [check_weights(folder, model.policy)]
    tokens = untrained_tokens(config, model, path)
    if tokens:
        status = "failed: " if config.policy.lora.rank else "warning: "
        lines.append(f"{status}{path}: {untrained_text(tokens)}")
    return lines


def prompt_lines(config: Config, tokenizer: Any) -> list[str]:
    """Return the number of overlong prompts, unless these are to be refused, and a long prompt that fits."""
    protocol = configured_protocol(config, tokenizer)
    limit = config.rollout.max_prompt_length
    lines = []
    check_tags(make_actions(config), tokenizer)
    for key in ("train", "eval"):
        questions = load_questions(getattr(config.data, key), config.data.columns)
        lengths = protocol.prompt_lengths(questions, limit)
        kept, overlong = drop_overlong(questions, lengths, limit, config.data.overlong_prompts, f"data.{key}")
        if overlong:
            lines.append(f"warning: {overlong}")
    # The second pass of the loop leaves the questions of data.eval in `kept`.
    longest = max(kept, key=lambda question: len(question.text))
    ids, _ = protocol.open_prompt(longest, limit)
    lines.append(
        f"the prompt of data.eval's longest question has {len(ids)} of {limit} tokens:"
        f" {tokenizer.decode(ids)!r}"
    )
    return lines


def check_sampler(config: Config) -> list[str]:
    """Check that vLLM is installed, or that the workers answer with the routes the trainer needs."""
    sampler = config.sampler
    if sampler.name == "jax":
        return [f"in process, {sampler.slots} trajectories decoded together"]
    if not sampler.urls:
        require_vllm()
        return [f"{sampler.workers} vLLM worker(s) of flavour {sampler.flavour} will be started here"]
    labels, missing = find_workers(replace(sampler, patience=SINGLE_ATTEMPT), lambda _: None)
    lines = [f"{url}: serves weights {label!r}" for url, label in labels.items()]
    lines += [f"warning: {url} is away ({reason})" for url, reason in missing.items()]
    return lines


def check_retriever(config: Config) -> list[str]:
    """Check the service's corpus and index (a child service checks them as it starts), and one real query."""
    if not config.has_retriever:
        return ["none: no action of tools asks it"]
    question = _first_question(config)
    retriever_config = impatient(config).retriever
    with open_retriever(retriever_config, Path(config.run.dir) / "retriever.log", lambda _: None) as url:
        retriever = RetrieverClient(retriever_config, url)
        health = retriever.health()
        state = ", ".join(f"{name} {value}" for name, value in health.items() if value != "")
        reranked = retriever.check_reranker(health)
        documents = asyncio.run(_search_once(retriever, question.text))
        lines = [f"{retriever.url}: {state or 'answers, but has no /health that names its corpus and index'}"]
        lines += [f"warning: {url} is away ({reason})" for url, reason in retriever.unreachable.items()]
        lines.append(reranked)
        if documents:
            lines.append(f"first document for {question.text!r}: {documents[0].title!r}")
        else:
            lines.append(f"warning: nothing found for {question.text!r}; does the corpus fit data.eval?")
        return lines


def _first_question(config: Config) -> Question:
    """Return the first question of data.eval, or STAND_IN if the file cannot be read (`check_questions`)."""
    try:
        return load_questions(config.data.eval, config.data.columns)[0]
    except UserError:
        return STAND_IN


async def _search_once(retriever: RetrieverClient, query: str) -> Sequence[Document]:
    """Return the documents of one query, and close the client."""
    try:
        results = await retriever.search([query])
        return results[0]
    finally:
        await retriever.close()


def check_teacher(config: Config) -> list[str]:
    """Check the vocabulary and the weights of the teacher, if there is one, or its server."""
    teacher = config.teacher
    if not teacher.is_on:
        return []
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    teaching.check_teacher(impatient(config), model)
    place = teacher.policy or f"{teacher.model} at {teacher.url}"
    return [f"teacher {place}: has the policy's vocabulary"]


def check_judge(config: Config) -> list[str]:
    """Ask the judge, if there is one, for its verdict on a golden answer, and on none."""
    if not config.reward.judge.url:
        return []
    judge = JudgeClient(replace(config.reward.judge, patience=SINGLE_ATTEMPT))
    question = _first_question(config)
    right = question.golden_answers[0]
    try:
        right_verdict, wrong_verdict = asyncio.run(_judge_both(judge, question, right))
    except RequestFailed as error:
        raise UserError(str(error)) from error
    lines = [
        f"{judge.url}: {judge.config.model} gives {right!r} {right_verdict:g} and {NO_ANSWER!r}"
        f" {wrong_verdict:g}"
    ]
    if judge.form.differences():
        lines.append(f"it takes no usual request, and is asked with {judge.form.differences()}")
    if right_verdict < 0.5 or wrong_verdict >= 0.5:
        lines.append(f"warning: it misjudges these answers to {question.text!r}; see reward.judge.prompt")
    return lines


async def _judge_both(judge: JudgeClient, question: Question, right: str) -> tuple[float, float]:
    """Return the verdicts on a right answer and on NO_ANSWER, and close the client."""
    try:
        right_verdict = await judge.verdict(question, right)
        wrong_verdict = await judge.verdict(question, NO_ANSWER)
        return right_verdict, wrong_verdict
    finally:
        await judge.close()


def check_prompt(config: Config) -> list[str]:
    """Check that there is a prompt template of the name."""
    if config.rollout.protocol == TOOL_CALLS and config.prompt.template != FROM_DATA:
        return ["prompt.system and prompt.user, for tool calls"]
    if config.prompt.template != FROM_DATA:
        template_text(config.prompt.template)  # refuses an unknown name
    return [f"template {config.prompt.template}"]


def check_shape(config: Config) -> list[str]:
    """Check mesh and memory without the policy's tensors and tokenizer."""
    mesh = config.mesh.sizes_on(jax.device_count())
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    if REMAINING_DEVICES in config.mesh.sizes.values():
        lines = [f"mesh {shape}, as many as there are here"]
    else:
        lines = [f"mesh {shape}"]
        check_rows(config, mesh)
    planned = find_architecture(config)
    if planned is None:
        lines.append(
            "not checked: memory: neither policy.path nor sft.init_from holds a config.json here, and"
            " policy.init no vocab_size"
        )
        return lines
    lines.append(f"shape of {planned.source}")
    # A run that does not fit this machine is no failure: it may be meant for another one.
    for line in device_lines(config, planned.architecture, mesh):
        lines.append(line.replace("failed: ", "warning: ", 1))
    return lines


CHECKS = {
    "calibration": describe_choices,
    "questions": check_questions,
    "policy": check_policy,
    "sampler": check_sampler,
    "retriever": check_retriever,
    "judge": check_judge,
    "teacher": check_teacher,
}
OFFLINE_CHECKS = {
    "calibration": describe_choices,
    "prompt": check_prompt,
    "policy": check_shape,
}
