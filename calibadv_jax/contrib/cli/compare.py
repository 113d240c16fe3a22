"""Compares two policies on the same questions: ``calibadv compare A B``.

A and B are per-question files of evaluations (or the .json beside them); several joined by commas are seeds
of one method, whose scores are averaged by question.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.evaluation.records import RowKey, ScoredRow, read_scores, row_key
from calibadv_jax.evaluation.score_tables import (
    ALL,
    AVERAGE,
    MIN_QUESTIONS_FOR_INTERVAL,
    metric_names,
    scores_of,
)
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

Evaluation = dict[RowKey, ScoredRow]
ResultKey = tuple[str, str, str]  # temperature, metric, data source

# Only a comma behind a file's ending separates evaluations: a folder may have a comma in its name.
BETWEEN_FILES = re.compile(r"(?<=\.json),|(?<=\.jsonl),")


@dataclass(frozen=True)
class Policy:
    """One side of the comparison: the evaluations of a policy's seeds, and their mean."""

    argument: str  # as given on the command line
    seeds: dict[str, Evaluation]  # by the name of the file
    mean: Evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("first", metavar="A", help="evaluation of the first policy, or of its seeds: A1,A2")
    parser.add_argument("second", metavar="B", help="evaluation of the second policy, or of its seeds")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=["em", "f1", "cover_em"],
        metavar="NAME",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--resamples",
        type=number(int, least=1),
        default=10000,
        metavar="N",
        help="number of resamples of bootstrap and test (default: %(default)s)",
    )
    parser.add_argument(
        "--confidence",
        type=number(float, least=0.001, below=1),
        default=0.95,
        metavar="C",
        help="coverage of the confidence intervals (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the numbers as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print a table of the differences by temperature, metric and data source.

    Raises:
        UserError: a file is missing or empty, the questions differ, or a policy has no such metric.
    """
    console = Console()
    seeds_of_first = _read_seeds(arguments.first)
    seeds_of_second = _read_seeds(arguments.second)
    evaluations = seeds_of_first | seeds_of_second
    _refuse_different_questions(evaluations)
    retriever_difference = _retriever_difference(evaluations)
    if retriever_difference:
        console.warn(f"different retrievers searched: {retriever_difference}")
    first = Policy(arguments.first, seeds_of_first, _mean_of_seeds(seeds_of_first))
    second = Policy(arguments.second, seeds_of_second, _mean_of_seeds(seeds_of_second))

    results: dict[ResultKey, Comparison] = {}
    temperatures = dict.fromkeys(temperature for temperature, _, _ in first.mean)
    for temperature in temperatures:
        for metric in arguments.metrics:
            for source, comparison in _compare(arguments, temperature, metric, first, second):
                results[temperature, metric, source] = comparison

    console.say(f"A: {arguments.first}\nB: {arguments.second}")
    console.say(_results_table(results, arguments.confidence))
    _warn_of_few_questions(console, results)
    if arguments.output is not None:
        numbers = {
            "first": arguments.first,
            "second": arguments.second,
            "confidence": arguments.confidence,
            "resamples": arguments.resamples,
            "other_retrievers": bool(retriever_difference),
            "differences": _nested(results),
        }
        write_json(arguments.output, numbers)


def _read_seeds(argument: str) -> dict[str, Evaluation]:
    """Return the evaluations that an argument names, each by the name of its file."""
    names = BETWEEN_FILES.split(argument)
    files = {Path(name).resolve().with_suffix("") for name in names}  # .json and .jsonl are one evaluation
    if len(files) < len(names):
        raise UserError(f"{argument}: names an evaluation twice; name each seed once")
    seeds: dict[str, Evaluation] = {}
    for name in names:
        path = Path(name)
        rows = read_scores(path.with_suffix(".jsonl") if path.suffix == ".json" else path)
        evaluation = {row_key(row): row for row in rows}
        if not evaluation:
            raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
        seeds[name] = evaluation
    return seeds


def _refuse_different_questions(evaluations: Mapping[str, Evaluation]) -> None:
    """Raise UserError unless all evaluations asked the same questions at the same temperatures."""
    path, first = next(iter(evaluations.items()))
    for other, evaluation in evaluations.items():
        keys = [key for key in first | evaluation if _question(first, key) != _question(evaluation, key)]
        if keys:
            temperature, source, name = min(keys)
            raise UserError(
                f"{path} and {other}: {len(keys)} questions differ, such as {name!r} of {source!r} at"
                f" temperature {temperature}; evaluate to the end, with one data.eval, data.eval_limit and"
                " evaluate.temperatures"
            )


def _question(evaluation: Evaluation, key: RowKey) -> tuple[Any, Any]:
    """Return the question and its golden answers; None for both where the evaluation lacks it."""
    row = evaluation.get(key, {})
    return row.get("question"), row.get("golden_answers")


def _retriever_difference(evaluations: Mapping[str, Evaluation]) -> str:
    """Name the first two evaluations whose retrievers differ, and the fields in which they do.

    The retriever of an evaluation is that of its first row. An evaluation without searches has none, and does
    not count.

    Returns:
        A clause; empty if no retrievers differ.
    """
    retrievers: dict[str, dict[str, Any]] = {}
    for path, evaluation in evaluations.items():
        first_row = next(iter(evaluation.values()))
        retriever = first_row.get("retriever")
        if retriever:
            retrievers[path] = retriever
    if not retrievers:
        return ""
    first_path, first = next(iter(retrievers.items()))
    for path, retriever in retrievers.items():
        fields = [name for name in first | retriever if first.get(name) != retriever.get(name)]
        if fields:
            return f"{', '.join(fields)} of {first_path} and of {path} differ"
    return ""


def _mean_of_seeds(seeds: Mapping[str, Evaluation]) -> Evaluation:
    """Return the mean scores over the seeds; a metric that a seed lacks is left out."""
    evaluations = list(seeds.values())
    means: Evaluation = {}
    for key, row in evaluations[0].items():
        scores_by_seed = [evaluation[key]["scores"] for evaluation in evaluations]
        mean_scores = {}
        for metric in scores_by_seed[0]:
            if all(metric in scores for scores in scores_by_seed):
                mean_scores[metric] = statistics.fmean(scores[metric] for scores in scores_by_seed)
        means[key] = row | {"scores": mean_scores}
    return means


def _compare(
    arguments: argparse.Namespace, temperature: str, metric: str, first: Policy, second: Policy
) -> Iterator[tuple[str, Comparison]]:
    """Yield comparisons by data source. A question without a score of both policies is left out."""
    keys = [key for key in first.mean if key[0] == temperature]
    for policy in (first, second):
        rows = [policy.mean[key] for key in keys]
        if not any(metric in row["scores"] for row in rows):
            names = ", ".join(metric_names(rows)) or "no scores at all"
            raise UserError(f"{policy.argument}: no metric {metric!r}; it has {names}")
    scored = [
        key for key in keys if metric in first.mean[key]["scores"] and metric in second.mean[key]["scores"]
    ]
    for name, strata in _strata_by_name(scored).items():
        first_scores = _scores_of_strata(first, strata, metric)
        second_scores = _scores_of_strata(second, strata, metric)
        comparison = compare_paired(first_scores, second_scores, arguments.confidence, arguments.resamples)
        yield name, comparison


def _strata_by_name(keys: Sequence[RowKey]) -> dict[str, list[list[RowKey]]]:
    """Return the questions to compare by the name of their row: all, the average, each data source.

    The average over data sources has a stratum for each of them, the others have one stratum.
    """
    by_source: dict[str, list[RowKey]] = {}
    for key in keys:
        _, source, _ = key
        by_source.setdefault(source, []).append(key)
    strata: dict[str, list[list[RowKey]]] = {}
    if keys:
        strata[ALL] = [list(keys)]
    if len(by_source) > 1:
        strata[AVERAGE] = list(by_source.values())
    for source, members in by_source.items():
        strata[source] = [members]
    return strata


def _scores_of_strata(policy: Policy, strata: Sequence[Sequence[RowKey]], metric: str) -> list[np.ndarray]:
    """Return the mean scores of the questions of each stratum, float64 [N] each."""
    return [scores_of([policy.mean[key] for key in keys], metric) for keys in strata]


def _results_table(results: Mapping[ResultKey, Comparison], confidence: float) -> str:
    rows = []
    for (temperature, metric, source), result in results.items():
        interval = "-"
        if result.interval:
            low, high = result.interval
            interval = f"[{low:.3f}, {high:.3f}]"
        rows.append(
            [
                temperature,
                metric,
                source,
                result.questions,
                result.first,
                result.second,
                result.difference,
                interval,
                f"{result.p_value:.4f}",
            ]
        )
    headers = ["temperature", "metric", "data", "questions", "A", "B", "B - A"]
    return table(rows, [*headers, f"{100 * confidence:g}% interval", "p"])


def _warn_of_few_questions(console: Console, results: Mapping[ResultKey, Comparison]) -> None:
    num_questions: dict[str, int] = {}
    for (_, _, source), result in results.items():
        if result.questions < MIN_QUESTIONS_FOR_INTERVAL:
            num_questions[source] = result.questions
    if num_questions:
        counts = ", ".join(f"{source}: {count}" for source, count in num_questions.items())
        console.warn(
            f"fewer than {MIN_QUESTIONS_FOR_INTERVAL} questions ({counts}): their intervals and p-values are"
            " not reliable; evaluate more questions (data.eval_limit)"
        )


def _nested(results: Mapping[ResultKey, Comparison]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return temperature -> metric -> data source -> the fields of the comparison."""
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for (temperature, metric, source), comparison in results.items():
        by_metric = nested.setdefault(temperature, {})
        by_metric.setdefault(metric, {})[source] = asdict(comparison)
    return nested
