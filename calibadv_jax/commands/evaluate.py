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
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.trajectory import Document, Group, Question
from calibadv_jax.data.questions import answer_warnings, load_questions, select_evenly
from calibadv_jax.distributed.joining import alone
from calibadv_jax.evaluation.methods import METHODS, method_config, method_retriever, with_passages
from calibadv_jax.evaluation.records import RowFile, RowKey, ScoredRow, identity, make_row
from calibadv_jax.evaluation.report import (
    Means,
    ScoreReport,
    csv_table,
    markdown_table,
    summarise,
    table_rows,
    unanswered,
)
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rewards.score import score_trajectory, text_scores
from calibadv_jax.rollout.prompts import drop_overlong, prompt_lengths
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.fingerprints import describe_policy, describe_retriever, judge_hash, tools_hash
from calibadv_jax.run.model import Model, PolicySource, build_model, find_folder, find_policy
from calibadv_jax.run.wiring import open_rollouts
from calibadv_jax.snapshots.checkpoint import saved_steps
from calibadv_jax.snapshots.mirror import bring_newest

PASSAGE_QUERIES = 64  # queries per request in one-shot RAG


def run(config: Config) -> None:
    """Evaluate the configured policy, print a table and write the report."""
    alone(config.distributed, "evaluate")
    console = Console(config.log.progress)
    if not config.evaluate.policy:
        bring_newest(config, console)
    source = choose_policy(config)
    console.say(f"policy: {source}")
    report = evaluate_policy(config, source, console)
    for line in unanswered(report.means):
        console.warn(f"{line}; the transcripts are in {Path(config.evaluate.output).with_suffix('.jsonl')}")
    headers, cells = table_rows(report)
    console.say(table(cells, headers))
    console.note(f"written to {config.evaluate.output}")


def choose_policy(config: Config) -> PolicySource:
    """Return evaluate.policy, or run.dir's newest checkpoint, or policy.path; UserError if none is set."""
    checkpoints = Path(config.run.dir) / "checkpoints"
    trained = str(checkpoints) if saved_steps(checkpoints) else ""
    chosen = config.evaluate.policy or trained or config.policy.path
    if not chosen:
        raise UserError(f"no policy: {checkpoints} has no checkpoint; set evaluate.policy or policy.path")
    return find_policy(find_folder(config, chosen, with_weights=True)[0])


def evaluation_questions(config: Config, tokenizer: Any, sample_size: int = 0) -> tuple[list[Question], str]:
    """Return the questions of data.eval, at most data.eval_limit and `sample_size` (0: no limit).

    The choice does not depend on run.seed. Returns the questions whose prompts fit, and a warning of the
    others ("" if all fit). Raises UserError if a file cannot be read, or as `drop_overlong`.
    """
    questions = load_questions(config.data.eval, config.data.columns)
    for limit in (config.data.eval_limit, sample_size):
        questions = select_evenly(questions, limit, seed=0) if limit else questions
    config = method_config(config)
    is_rag, longest = config.evaluate.method == "rag", config.rollout.max_prompt_length
    prompted = [with_passages(question, ()) for question in questions] if is_rag else questions
    lengths = prompt_lengths(prompted, tokenizer, config.prompt, longest, make_actions(config))
    return drop_overlong(questions, lengths, longest, config.data.overlong_prompts, "data.eval")


def validation_questions(config: Config, tokenizer: Any) -> tuple[list[Question], str]:
    """Return the questions of `validate`, as `evaluation_questions`."""
    agent = replace(config, evaluate=replace(config.evaluate, method="agent"))
    return evaluation_questions(agent, tokenizer, config.evaluate.sample_size)


def evaluate_policy(config: Config, source: PolicySource, console: Console | None = None) -> ScoreReport:
    """Evaluate a policy on disk with the configured sampler and retriever; write all files.

    Raises UserError for bad input, files that another process writes, and too many failed trajectories; the
    answers so far are kept.
    """
    console = console or Console(config.log.progress)
    refuse_other_run(Path(config.evaluate.output), "evaluate.output", Path(config.run.dir))
    remaining = "the same command goes on with the questions that are left"
    stop = Stop(saves="the answers so far are kept", then=remaining)
    with stop, locked_output(Path(config.evaluate.output), "evaluate.output", console.warn):
        return _evaluate(config, source, console)


def _evaluate(config: Config, source: PolicySource, console: Console) -> ScoreReport:
    output, evaluate = Path(config.evaluate.output), config.evaluate
    if evaluate.method == "rag" and not config.has_retriever:
        fault = "evaluate.method is rag, which looks passages up, but no retriever is named"
        raise UserError(f"{fault}; set retriever.url, or retriever.corpus to start a service here")
    source = source.at_step()
    model = build_model(method_config(config), str(source.model_folder), source.adapters)
    questions, overlong = evaluation_questions(config, model.tokenizer)
    for line in filter(None, (*answer_warnings(questions, "data.eval"), overlong)):
        console.warn(line)
    policy = describe_policy(source)
    retriever = describe_retriever(method_config(config).retriever, console.warn)
    hashes = {"tools": tools_hash(config), "judge": judge_hash(config)}
    evaluation = identity(config, policy, retriever, questions, hashes)
    file = RowFile(output.with_suffix(".jsonl"), evaluation, questions)
    requests: dict[RowKey, tuple[float, Question]] = {
        (f"{temperature:g}", question.data_source, question.id): (temperature, question)
        for temperature in evaluate.temperatures
        for question in questions
    }
    missing = [request for key, request in requests.items() if key not in file.rows]
    if len(missing) < len(requests):
        console.note(f"{len(requests) - len(missing)} of {len(requests)} answers are there; going on")
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


def _answer_missing(
    config: Config,
    source: PolicySource,
    model: Model,
    questions: Sequence[Question],
    missing: Sequence[tuple[float, Question]],
    file: RowFile,
    service: dict[str, Any],
    console: Console,
) -> None:
    """Write the rows of `missing` to the file as they are answered, with the `service` that searched."""
    evaluate = config.evaluate
    config = method_config(config)
    with tempfile.TemporaryDirectory() as snapshots, ExitStack() as stack:
        with console.phase("starting sampler and retriever, loading the policy"):
            context = open_rollouts(config, model, source.model_folder, Path(snapshots))
            rollouts = stack.enter_context(context)
            rollouts.load(0, rollouts.publish(0, source.params(model.policy, model.mesh)))
        done, progress = 0, rollouts.progress(of_collect=True)
        live = console.live("evaluate", "questions", lambda: (done, len(missing), progress()[2]))
        stack.enter_context(live)
        file.start()  # only now, when the policy has been loaded
        retriever = rollouts.context.retriever
        retriever = method_retriever(evaluate.method, retriever, questions, config.run.seed)
        rollouts.context = replace(rollouts.context, retriever=retriever)

        def add(row: ScoredRow) -> None:
            nonlocal done
            file.add(row | {"retriever": service})
            done += 1

        for temperature, group in itertools.groupby(missing, key=lambda request: request[0]):
            samples = evaluate.samples if temperature > 0 else 1
            unanswered_questions = [question for _, question in group]
            answer(config, rollouts, unanswered_questions, temperature, samples, add, file.evaluation)


def validate(config: Config, rollouts: Rollouts) -> Means:
    """Evaluate during training: the agent answers a fixed sample of the questions once; writes nothing."""
    config = replace(config, evaluate=replace(config.evaluate, method="agent"))
    questions, _ = validation_questions(config, rollouts.context.tokenizer)
    rows: list[ScoredRow] = []
    for temperature in dict.fromkeys(config.evaluate.temperatures):
        answered: list[ScoredRow] = []
        answer(config, rollouts, questions, temperature, 1, answered.append)
        rows += sorted(answered, key=lambda row: (row["data_source"], row["id"]))
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

    `config` is that of `method_config`. `add` gets the row of each question, with the identity `evaluation`,
    on the thread of the rollouts.
    """
    method, context = config.evaluate.method, rollouts.context

    def fits(question: Question) -> bool:
        longest = context.rollout.max_prompt_length
        return not prompt_lengths([question], context.tokenizer, context.prompt, longest, context.actions)

    prompted = list(questions)
    if method == "rag":
        pairs = zip(questions, _passages(rollouts, questions), strict=True)
        prompted = [with_passages(*pair, fits=fits) for pair in pairs]
    original = {id(each): question for each, question in zip(prompted, questions, strict=True)}

    def complete(group: Group) -> None:
        scored = [score_trajectory(trajectory, config.reward) for trajectory in group.trajectories]
        if METHODS[method].template is not None:
            scored = [replace(each, metrics=each.metrics | text_scores(each)) for each in scored]
        question = original[id(group.question)]
        add(make_row(evaluation, temperature, question, replace(group, trajectories=scored), method))
        for trajectory in group.attempts:  # `collect` holds the groups until all are there
            trajectory.turns.clear()

    name = f"eval{temperature}"
    rollouts.collect(prompted, name, config.run.seed, complete, temperature=temperature, group_size=samples)


def _passages(rollouts: Rollouts, questions: Sequence[Question]) -> list[list[Document]]:
    """Return the documents of each question; none for a query that the retriever refuses."""

    def search(texts: list[str]) -> list[list[Document]]:
        try:
            return rollouts.run(rollouts.context.retriever.search(texts))
        except QueryRefused:
            return [[]] if len(texts) == 1 else [documents for text in texts for documents in search([text])]

    texts = [question.text for question in questions]
    batches = (texts[start : start + PASSAGE_QUERIES] for start in range(0, len(texts), PASSAGE_QUERIES))
    return [documents for batch in batches for documents in search(batch)]
