"""Evaluation: ``calibadv evaluate --config FILE [key.path=value …]``.

Answers the questions of data.eval with the method evaluate.method and writes scores with their intervals, by
data source, to evaluate.output; beside it the tables and every question with its transcripts. The policy is
evaluate.policy; if that is empty, the newest checkpoint of run.dir; if there is none, policy.path. The
same command continues an evaluation that was interrupted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, RetrieverConfig
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.files import write_json, write_text
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.trajectory import Document, Group, Question
from calibadv_jax.data.questions import answer_warnings, load_questions, select_evenly
from calibadv_jax.evaluation.methods import METHODS, method_config, method_retriever, with_passages
from calibadv_jax.evaluation.records import Key, RowFile, ScoredRow, identity, make_row
from calibadv_jax.evaluation.report import (
    Means,
    ScoreReport,
    csv_table,
    markdown_table,
    summarise,
    table_rows,
    unanswered,
)
from calibadv_jax.hosts.joining import alone
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rewards.score import score_trajectory, text_scores
from calibadv_jax.rollout.prompts import drop_overlong, prompt_lengths
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.folder import judge_hash, tools_hash
from calibadv_jax.run.model import Model, PolicySource, build_model, find_folder, find_policy
from calibadv_jax.run.wiring import open_rollouts
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_replies import identity as index_identity
from calibadv_jax.snapshots.checkpoint import has_checkpoint, newest_step
from calibadv_jax.snapshots.mirror import bring_newest

PASSAGE_QUERIES = 64  # questions that one-shot RAG looks up together


def run(config: Config) -> None:
    """Evaluates, prints a table and writes the report."""
    alone(config.distributed, "evaluate")
    console = Console(config.log.progress)
    if not config.evaluate.policy:
        bring_newest(config, console)
    source = choose_policy(config)
    console.say(f"policy: {source}")
    report = evaluate_policy(config, source, console)
    for line in unanswered(report.means):
        console.warn(f"{line}; the transcripts are in {Path(config.evaluate.output).with_suffix('.jsonl')}")
    console.say(report_table(report))
    console.note(f"written to {config.evaluate.output}")


def choose_policy(config: Config) -> PolicySource:
    """The policy that the config means.

    Raises:
        UserError: none is named, and the run has no checkpoint.
    """
    checkpoints = Path(config.run.dir) / "checkpoints"
    trained = str(checkpoints) if has_checkpoint(checkpoints) else ""
    chosen = config.evaluate.policy or trained or config.policy.path
    if not chosen:
        raise UserError(f"no policy: {checkpoints} has no checkpoint; set evaluate.policy or policy.path")
    return find_policy(find_folder(config, chosen, with_weights=True)[0])


def evaluation_questions(config: Config, tokenizer: Any, sample_size: int = 0) -> tuple[list[Question], str]:
    """The questions of data.eval, at most data.eval_limit and `sample_size` (0: no limit) of them.

    The same questions for every run.seed.

    Returns:
        The questions whose prompts fit, and in words how many do not; "" if all fit.

    Raises:
        UserError: a file cannot be read, or prompts are too long; see `drop_overlong`.
    """
    questions = load_questions(config.data.eval, config.data.columns)
    for limit in (config.data.eval_limit, sample_size):
        questions = select_evenly(questions, limit, seed=0) if limit else questions
    config = method_config(config)
    asked = [with_passages(one, ()) for one in questions] if config.evaluate.method == "rag" else questions
    longest = config.rollout.max_prompt_length
    lengths = prompt_lengths(asked, tokenizer, config.prompt, longest, make_actions(config))
    return drop_overlong(questions, lengths, longest, config.data.overlong_prompts, "data.eval")


def validation_questions(config: Config, tokenizer: Any) -> tuple[list[Question], str]:
    """Likewise those of `validate`."""
    agent = replace(config, evaluate=replace(config.evaluate, method="agent"))
    return evaluation_questions(agent, tokenizer, config.evaluate.sample_size)


def evaluate_policy(config: Config, source: PolicySource, console: Console | None = None) -> ScoreReport:
    """Evaluates a policy on disk with the configured sampler and retriever; writes all files.

    Raises:
        UserError: bad input, another process writes the same files, or too many trajectories failed; what
            was answered is kept.
    """
    console = console or Console(config.log.progress)
    refuse_other_run(Path(config.evaluate.output), "evaluate.output", Path(config.run.dir))
    stop = Stop(
        saves="the answers so far are kept", then="the same command goes on with the questions that are left"
    )
    with stop, locked_output(Path(config.evaluate.output), "evaluate.output", console.warn):
        return _evaluate(config, source, console)


def _evaluate(config: Config, source: PolicySource, console: Console) -> ScoreReport:
    output = Path(config.evaluate.output)
    if config.evaluate.method == "rag" and not config.has_retriever:
        raise UserError(
            "evaluate.method is rag, which looks passages up, but no retriever is named; set retriever.url,"
            " or retriever.corpus to start a service here"
        )
    source = at_step(source)
    model = build_model(method_config(config), str(source.model_folder), source.adapters)
    questions, overlong = evaluation_questions(config, model.tokenizer)
    for line in answer_warnings(questions, "data.eval"):
        console.warn(line)
    if overlong:
        console.warn(overlong)
    policy = describe_policy(source)
    retriever = describe_retriever(method_config(config).retriever, console.warn)
    told = {"tools": tools_hash(config), "judge": judge_hash(config)}
    evaluation = identity(config, policy, retriever, questions, told)
    file = RowFile(output.with_suffix(".jsonl"), evaluation, questions)
    if file.others:
        console.note(f"{file.path}: {file.others} lines of another evaluation are replaced")
    temperatures = dict.fromkeys(config.evaluate.temperatures)
    wanted = [(temperature, question) for temperature in temperatures for question in questions]
    missing = [one for one in wanted if _key(*one) not in file.rows]
    if len(missing) < len(wanted):
        console.note(f"{len(wanted) - len(missing)} of {len(wanted)} answers are there; going on")
    if missing:
        _answer_missing(config, source, model, questions, missing, file, retriever, console)
    rows = file.finish([_key(*one) for one in wanted])
    report = summarise(rows, config.evaluate.resamples, config.evaluate.confidence)
    about = {"policy": policy, "retriever": retriever, "overlong_prompts": overlong}
    _write(output, config, about, report)
    return report


def _key(temperature: float, question: Question) -> Key:
    return f"{temperature:g}", question.data_source, question.id


def at_step(source: PolicySource) -> PolicySource:
    """The newest checkpoint by its step: a run that goes on does not change which one is meant."""
    if source.kind == "checkpoint" and source.step is None:
        return replace(source, step=newest_step(source.path))
    return source


def describe_policy(source: PolicySource) -> dict[str, Any]:
    """Which policy it is, as plain values; `modified` tells apart what was written to one place in turn."""
    step = int(source.path.name.removeprefix("v")) if source.kind == "snapshot" else source.step
    path = source.path / str(step) if source.kind == "checkpoint" else source.path
    files = [path, *path.glob("*.safetensors")]
    modified = max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
    return {"kind": source.kind, "path": str(source.path), "step": step, "modified": modified}


def describe_retriever(config: RetrieverConfig, warn: Callable[[str], object]) -> dict[str, Any]:
    """What answers the searches, as plain values; empty where nothing is searched.

    A running service is what it says of itself. One that does not say which corpus it has is its address. A
    service that is started here is its corpus and its pages: `modified` tells apart what was written to one
    place in turn.

    Args:
        warn: told what is waited for.

    Raises:
        UserError: a running service cannot be reached.
    """
    if config.url == NO_RETRIEVER:
        return {}
    if config.url:
        client = RetrieverClient(config, config.url, warn)
        health = client.health()
        said = index_identity(health)
        return said if {"identity", "corpus_sha256"} & said.keys() else said | {"url": redact(client.url)}
    about = _written("corpus", "modified", config.corpus)
    return about | (_written("pages", "pages_modified", config.pages) if config.pages else {})


def _written(name: str, when: str, path: str) -> dict[str, Any]:
    """A file of the service that is started here, and when it was written."""
    file = Path(path)
    return {name: str(file)} | ({when: file.stat().st_mtime_ns} if file.is_file() else {})


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
    """Writes the rows of `missing` to the file as they are answered, with the `service` that searched."""
    asked, name = method_config(config), config.evaluate.method
    with (
        tempfile.TemporaryDirectory() as snapshots,
        ExitStack() as stack,
    ):
        with console.phase("starting sampler and retriever, loading the policy"):
            opened = open_rollouts(asked, model, source.model_folder, Path(snapshots))
            rollouts = stack.enter_context(opened)
            rollouts.load(0, rollouts.publish(0, source.params(model.policy, model.mesh)))
        show = stack.enter_context(console.bar("evaluate", len(missing), "questions"))
        file.start()  # only now, when the policy has been found good
        retriever = method_retriever(name, rollouts.context.retriever, questions, config.run.seed)
        rollouts.context = replace(rollouts.context, retriever=retriever)
        done = 0

        def keep(row: ScoredRow) -> None:
            nonlocal done
            file.add(row | {"retriever": service})
            done += 1
            show(done)

        for temperature in dict.fromkeys(temperature for temperature, _ in missing):
            some = [question for at, question in missing if at == temperature]
            samples = config.evaluate.samples if temperature > 0 else 1
            answer(asked, rollouts, some, temperature, samples, keep, file.evaluation)


def validate(config: Config, rollouts: Rollouts) -> Means:
    """The cheap evaluation during training: a fixed sample of the questions, one trajectory each.

    The agent answers, whatever evaluate.method is, and nothing is written.
    """
    config = replace(config, evaluate=replace(config.evaluate, method="agent"))
    questions, _ = validation_questions(config, rollouts.context.tokenizer)
    rows: list[ScoredRow] = []
    for temperature in dict.fromkeys(config.evaluate.temperatures):
        found: list[ScoredRow] = []
        answer(config, rollouts, questions, temperature, 1, found.append)
        rows += sorted(found, key=lambda row: (row["data_source"], row["id"]))
    return summarise(rows).means


def answer(
    config: Config,
    rollouts: Rollouts,
    questions: Sequence[Question],
    temperature: float,
    samples: int,
    keep: Callable[[ScoredRow], object],
    evaluation: str = "",
) -> None:
    """Answers questions with the sampler's current policy, and hands over the row of each when complete.

    Args:
        config: that of the method; see `method_config`.
        keep: called on the thread of the rollouts.
        evaluation: identity for the rows.
    """
    method = config.evaluate.method
    asked = list(questions)
    if method == "rag":
        found = zip(asked, _passages(rollouts, asked), strict=True)
        asked = [with_passages(*one, fits=lambda one: _fits(one, rollouts)) for one in found]
    original = {id(one): question for one, question in zip(asked, questions, strict=True)}

    def complete(group: Group) -> None:
        scored = [score_trajectory(trajectory, config.reward) for trajectory in group.trajectories]
        if METHODS[method].template is not None:
            scored = [replace(one, metrics=one.metrics | text_scores(one)) for one in scored]
        found = replace(group, trajectories=scored)
        keep(make_row(evaluation, temperature, original[id(group.question)], found, method))
        for trajectory in group.attempts:  # `collect` holds the groups until all are there
            trajectory.turns.clear()

    rollouts.collect(
        asked,
        f"eval{temperature}",
        config.run.seed,
        complete,
        temperature=temperature,
        group_size=samples,
    )


def _fits(question: Question, rollouts: Rollouts) -> bool:
    context = rollouts.context
    longest = context.rollout.max_prompt_length
    return not prompt_lengths([question], context.tokenizer, context.prompt, longest, context.actions)


def _passages(rollouts: Rollouts, questions: Sequence[Question]) -> list[list[Document]]:
    """What the retriever finds for each question; nothing for a query that it refuses."""
    texts = [question.text for question in questions]
    found: list[list[Document]] = []
    for start in range(0, len(texts), PASSAGE_QUERIES):
        some = texts[start : start + PASSAGE_QUERIES]
        try:
            found += rollouts.search(some)
        except QueryRefused:
            found += [_passages_of_one(rollouts, text) for text in some]
    return found


def _passages_of_one(rollouts: Rollouts, text: str) -> list[Document]:
    try:
        return rollouts.search([text])[0]
    except QueryRefused:
        return []


def _write(output: Path, config: Config, about: dict[str, Any], report: ScoreReport) -> None:
    evaluate = config.evaluate
    about |= {
        "method": evaluate.method,
        "data": config.data.eval,
        "samples": evaluate.samples,
        "seed": config.run.seed,
        "confidence": evaluate.confidence,
        "resamples": evaluate.resamples,
    }
    scores = {"scores": report.means, "intervals": report.intervals}
    write_json(output, about | scores)
    write_text(output.with_suffix(".md"), markdown_table(report, evaluate.confidence))
    write_text(output.with_suffix(".csv"), csv_table(report))


def report_table(report: ScoreReport) -> str:
    """One row for each temperature and data source, for the console."""
    headers, rows = table_rows(report)
    return table(rows, headers)
