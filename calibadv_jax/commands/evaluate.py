"""Evaluation: ``calibadv evaluate --config FILE [key.path=value …]``.

Answers the questions of data.eval with the method evaluate.method and writes scores with their intervals, by
data source, to evaluate.output; beside it the tables and every question with its transcripts. The policy is
evaluate.policy; if that is empty, the newest checkpoint of run.dir; if there is none, policy.path. The
same command continues an evaluation that was interrupted.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.files import write_json, write_text
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Document, Group, Question
from calibadv_jax.data.questions import answer_warnings, load_questions, select_evenly
from calibadv_jax.distributed.joining import require_single_process
from calibadv_jax.evaluation.methods import METHODS, method_config, method_retriever, with_passages
from calibadv_jax.evaluation.records import RowFile, RowKey, ScoredRow, evaluation_identity, make_row
from calibadv_jax.evaluation.score_tables import (
    Means,
    ScoreReport,
    csv_table,
    markdown_table,
    summarise,
    table_rows,
    unanswered_warnings,
)
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rewards.score import score_trajectory, text_scores
from calibadv_jax.rollout.prompts import drop_overlong
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.fingerprints import describe_policy, describe_retriever, judge_hash, tools_hash
from calibadv_jax.run.model import Model, PolicySource, build_model, find_folder, find_policy
from calibadv_jax.run.wiring import open_rollouts
from calibadv_jax.snapshots.checkpoint import saved_steps
from calibadv_jax.snapshots.mirror import fetch_newest

PASSAGE_QUERIES = 64  # Queries of a request in one-shot RAG.

Request = tuple[float, Question]  # temperature and question


def run(config: Config) -> None:
    """Evaluate the configured policy, print a table and write the report.

    Args:
        config: The config of the command.

    Raises:
        UserError: As `evaluate_policy`, or there is no policy.
    """
    require_single_process(config.distributed, "evaluate")
    console = Console(config.log.progress)
    if not config.evaluate.policy:
        fetch_newest(config, console)
    source = choose_policy(config)
    console.say(f"policy: {source}")
    report = evaluate_policy(config, source, console)
    transcripts = Path(config.evaluate.output).with_suffix(".jsonl")
    for line in unanswered_warnings(report.means):
        console.warn(f"{line}; the transcripts are in {transcripts}")
    headers, cells = table_rows(report)
    console.say(table(cells, headers))
    console.note(f"written to {config.evaluate.output}")


def choose_policy(config: Config) -> PolicySource:
    """Return evaluate.policy, else the newest checkpoint of run.dir, else policy.path.

    Args:
        config: The config of the evaluation.

    Returns:
        The policy on disk. A repository of HuggingFace's hub has been fetched.

    Raises:
        UserError: There is none of them, or it cannot be fetched.
    """
    checkpoints = Path(config.run.dir) / "checkpoints"
    trained = str(checkpoints) if saved_steps(checkpoints) else ""
    chosen = config.evaluate.policy or trained or config.policy.path
    if not chosen:
        raise UserError(f"no policy: {checkpoints} has no checkpoint; set evaluate.policy or policy.path")
    folder, _ = find_folder(config, chosen, with_weights=True)
    return find_policy(folder)


def evaluation_questions(config: Config, tokenizer: Any, sample_size: int = 0) -> tuple[list[Question], str]:
    """Return the questions of data.eval whose prompts fit.

    Args:
        config: The config; its evaluate.method decides the prompt.
        tokenizer: The policy's tokenizer.
        sample_size: The most questions to choose, in addition to data.eval_limit; 0: no limit. The choice
            does not depend on run.seed.

    Returns:
        The questions, and a warning of the chosen ones that do not fit ("" if all fit).

    Raises:
        UserError: A file cannot be read, or as `drop_overlong`.
    """
    questions = load_questions(config.data.eval, config.data.columns)
    for limit in (config.data.eval_limit, sample_size):
        if limit:
            questions = select_evenly(questions, limit, seed=0)
    config = method_config(config)
    longest = config.rollout.max_prompt_length
    prompted = questions
    if config.evaluate.method == "rag":
        prompted = [with_passages(question, ()) for question in questions]
    lengths = configured_protocol(config, tokenizer).prompt_lengths(prompted, longest)
    return drop_overlong(questions, lengths, longest, config.data.overlong_prompts, "data.eval")


def validation_questions(config: Config, tokenizer: Any) -> tuple[list[Question], str]:
    """Return the questions of `validate`, at most evaluate.sample_size of them.

    Args:
        config: The run's config. The prompt is the agent's, whatever evaluate.method is.
        tokenizer: The policy's tokenizer.

    Returns:
        The questions, and a warning of the chosen ones that do not fit ("" if all fit).

    Raises:
        UserError: As `evaluation_questions`.
    """
    return evaluation_questions(_with_agent(config), tokenizer, config.evaluate.sample_size)


def _with_agent(config: Config) -> Config:
    """Return the config with the method "agent", by which the policy is validated during training."""
    return replace(config, evaluate=replace(config.evaluate, method="agent"))


def evaluate_policy(config: Config, source: PolicySource, console: Console | None = None) -> ScoreReport:
    """Evaluate a policy on disk with the configured sampler and retriever, and write all files.

    Args:
        config: The config of the evaluation.
        source: The policy.
        console: Gets notes on the progress; None: a new one.

    Returns:
        The scores with their intervals.

    Raises:
        UserError: Bad input, files that another process writes, or too many failed trajectories. The answers
            so far are kept.
    """
    console = console or Console(config.log.progress)
    output = Path(config.evaluate.output)
    refuse_other_run(output, "evaluate.output", Path(config.run.dir))
    stop = Stop(
        saves="the answers so far are kept",
        then="the same command goes on with the questions that are left",
    )
    with stop, locked_output(output, "evaluate.output", console.warn):
        return _evaluate(config, source, console)


def _evaluate(config: Config, source: PolicySource, console: Console) -> ScoreReport:
    """Answer the missing questions, and write the report of all."""
    output = Path(config.evaluate.output)
    evaluate = config.evaluate
    if evaluate.method == "rag" and not config.has_retriever:
        raise UserError(
            "evaluate.method is rag, which looks passages up, but no retriever is named; set retriever.url,"
            " or retriever.corpus to start a service here"
        )
    source = source.at_step()
    model = build_model(method_config(config), str(source.model_folder), source.adapters)
    questions, overlong = evaluation_questions(config, model.tokenizer)
    for line in (*answer_warnings(questions, "data.eval"), overlong):
        if line:
            console.warn(line)
    policy = describe_policy(source)
    retriever = describe_retriever(method_config(config).retriever, console.warn)
    hashes = {"tools": tools_hash(config), "judge": judge_hash(config)}
    evaluation = evaluation_identity(config, policy, retriever, questions, hashes)
    file = RowFile(output.with_suffix(".jsonl"), evaluation, questions)
    if file.num_foreign_rows:
        console.note(f"{file.path}: {file.num_foreign_rows} rows of another evaluation are replaced")
    requests = _requests(evaluate.temperatures, questions)
    missing = [request for key, request in requests.items() if key not in file.rows]
    num_answered = len(requests) - len(missing)
    if num_answered:
        console.note(f"{num_answered} of {len(requests)} answers are there; going on")
    if missing:
        _answer_missing(config, source, model, questions, missing, file, retriever, console)
    rows = file.finish(list(requests))
    report = summarise(rows, evaluate.resamples, evaluate.confidence)
    result = {
        "policy": policy,
        "retriever": retriever,
        "overlong_prompts": overlong,
        "method": evaluate.method,
        "data": config.data.eval,
        "samples": evaluate.samples,
        "seed": config.run.seed,
        "confidence": evaluate.confidence,
        "resamples": evaluate.resamples,
        "scores": report.means,
        "intervals": report.intervals,
    }
    write_json(output, result)
    write_text(output.with_suffix(".md"), markdown_table(report, evaluate.confidence))
    write_text(output.with_suffix(".csv"), csv_table(report))
    return report


def _requests(temperatures: Sequence[float], questions: Sequence[Question]) -> dict[RowKey, Request]:
    """Return a request for each question at each temperature, by the key of its row."""
    requests: dict[RowKey, Request] = {}
    for temperature in temperatures:
        for question in questions:
            key = (f"{temperature:g}", question.data_source, question.id)
            requests[key] = (temperature, question)
    return requests


def _answer_missing(
    config: Config,
    source: PolicySource,
    model: Model,
    questions: Sequence[Question],
    missing: Sequence[Request],
    file: RowFile,
    service: dict[str, Any],
    console: Console,
) -> None:
    """Write a row of each missing request to the file when it is answered.

    `service` describes the retriever, for the rows.
    """
    evaluate = config.evaluate
    config = method_config(config)
    with tempfile.TemporaryDirectory() as snapshots, ExitStack() as stack:
        with console.phase("starting sampler and retriever, loading the policy"):
            context = open_rollouts(config, model, source.model_folder, Path(snapshots))
            rollouts = stack.enter_context(context)
            rollouts.load(0, rollouts.publish(0, source.params(model.policy, model.mesh)))
        num_done = 0
        rollouts_progress = rollouts.progress(of_evaluation=True)

        def progress() -> tuple[int, int, str]:
            """Return the numbers of answered and of missing questions, and the rates."""
            _, _, detail = rollouts_progress()
            return num_done, len(missing), detail

        stack.enter_context(console.live("evaluate", "questions", progress))
        file.start()  # the policy has been loaded: a start that fails before this leaves the file unchanged
        retriever = method_retriever(evaluate.method, rollouts.context.retriever, questions, config.run.seed)
        rollouts.context = replace(rollouts.context, retriever=retriever)

        def add(row: ScoredRow) -> None:
            """Write a row and count it."""
            nonlocal num_done
            file.add(row | {"retriever": service})
            num_done += 1

        for temperature, requests in itertools.groupby(missing, key=lambda request: request[0]):
            num_samples = evaluate.samples if temperature > 0 else 1
            unanswered_questions = [question for _, question in requests]
            answer(config, rollouts, unanswered_questions, temperature, num_samples, add, file.evaluation)


def validate(config: Config, rollouts: Rollouts) -> Means:
    """Evaluate during training: the agent answers a fixed sample of the questions once.

    Nothing is written.

    Args:
        config: The run's config.
        rollouts: The run's agent loop, with the newest policy.

    Returns:
        The mean scores by temperature and data source.

    Raises:
        UserError: Too many trajectories have failed.
    """
    config = _with_agent(config)
    questions, _ = validation_questions(config, rollouts.context.tokenizer)
    rows: list[ScoredRow] = []
    for temperature in dict.fromkeys(config.evaluate.temperatures):
        answered: list[ScoredRow] = []
        answer(config, rollouts, questions, temperature, 1, answered.append)
        answered.sort(key=lambda row: (row["data_source"], row["id"]))
        rows.extend(answered)
    return summarise(rows).means


def answer(
    config: Config,
    rollouts: Rollouts,
    questions: Sequence[Question],
    temperature: float,
    samples: int,
    add: Callable[[ScoredRow], object],
    evaluation: str = "",
) -> None:
    """Answer questions with the sampler's current policy.

    Args:
        config: A config that `method_config` has returned.
        rollouts: The agent loop.
        questions: The questions.
        temperature: Sampling temperature; 0: greedy.
        samples: Number of trajectories for each question.
        add: Called with the row of each question when it is answered, on the thread of the rollouts.
        evaluation: The identity of the evaluation, for the rows; "" for rows that are not kept.

    Raises:
        UserError: Too many trajectories have failed.
    """
    method = config.evaluate.method
    prompted = list(questions)
    if method == "rag":
        prompted = _with_retrieved_passages(rollouts, questions)
    originals = {id(prompt): question for prompt, question in zip(prompted, questions, strict=True)}

    def complete(group: Group) -> None:
        """Score a complete group, and pass on its row."""
        scored = [score_trajectory(trajectory, config.reward) for trajectory in group.trajectories]
        if METHODS[method].template is not None:
            scored = [
                replace(trajectory, metrics=trajectory.metrics | text_scores(trajectory))
                for trajectory in scored
            ]
        question = originals[id(group.question)]
        add(make_row(evaluation, temperature, question, replace(group, trajectories=scored), method))
        # `collect` holds all groups until the last is complete; the turns would fill the memory.
        for trajectory in group.attempts:
            trajectory.turns.clear()

    name = f"eval{temperature}"
    rollouts.collect(prompted, name, config.run.seed, complete, temperature=temperature, group_size=samples)


def _with_retrieved_passages(rollouts: Rollouts, questions: Sequence[Question]) -> list[Question]:
    """Return questions whose prompts hold the passages that were found for them, as many as fit."""
    context = rollouts.context

    def fits(question: Question) -> bool:
        """Return whether the prompt of a question with passages fits."""
        return not context.protocol.prompt_lengths([question], context.rollout.max_prompt_length)

    passages = _passages(rollouts, questions)
    return [
        with_passages(question, documents, fits=fits)
        for question, documents in zip(questions, passages, strict=True)
    ]


def _passages(rollouts: Rollouts, questions: Sequence[Question]) -> list[list[Document]]:
    """Return the documents of each question; none for a query that the retriever refuses."""
    texts = [question.text for question in questions]
    passages: list[list[Document]] = []
    for start in range(0, len(texts), PASSAGE_QUERIES):
        passages.extend(_search(rollouts, texts[start : start + PASSAGE_QUERIES]))
    return passages


def _search(rollouts: Rollouts, texts: list[str]) -> list[list[Document]]:
    """Search in one request, or text by text if the retriever refuses one of them."""
    try:
        return rollouts.run(rollouts.context.retriever.search(texts))
    except QueryRefused:
        if len(texts) == 1:
            return [[]]
        documents: list[list[Document]] = []
        for text in texts:
            documents.extend(_search(rollouts, [text]))
        return documents
