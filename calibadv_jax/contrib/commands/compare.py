"""Compares two policies on the same questions: ``calibadv compare A B``.

A and B are per-question files of evaluations (or the .json beside them); several joined by commas are seeds
of one method, whose scores are averaged by question.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.evaluation.records import ScoredRow, read_scores
from calibadv_jax.evaluation.report import ALL, AVERAGE, FEW, metric_names, scores_of
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

Questions = dict[tuple[str, str], ScoredRow]  # (data source, id) -> row
Evaluation = dict[str, Questions]  # by temperature
Results = dict[tuple[str, str, str], Comparison]  # (temperature, metric, data source) -> comparison
BETWEEN_FILES = re.compile(r"(?<=\.json),|(?<=\.jsonl),")  # no other comma: a folder may have one in its name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="evaluation of the first policy, or of its seeds: A1,A2")
    parser.add_argument("second", metavar="B", help="evaluation of the second policy, or of its seeds")
    text = "metrics to compare (default: %(default)s)"
    parser.add_argument("--metrics", nargs="+", default=["em", "f1", "cover_em"], metavar="NAME", help=text)
    text = "number of resamples of bootstrap and test (default: %(default)s)"
    parser.add_argument("--resamples", type=number(int, least=1), default=10000, metavar="N", help=text)
    text = "coverage of the confidence intervals (default: %(default)s)"
    share = number(float, least=0.001, below=1)
    parser.add_argument("--confidence", type=share, default=0.95, metavar="C", help=text)
    text = "also write the numbers to this JSON file"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> None:
    console = Console()
    sides = [_seeds(argument) for argument in (arguments.first, arguments.second)]
    first, second = (_means(side) for side in sides)
    common = [temperature for temperature in first if temperature in second]
    if not common:
        raise UserError(
            f"{arguments.first} has temperatures {', '.join(first)} and {arguments.second} has"
            f" {', '.join(second)}: evaluate both at one temperature"
        )
    if differing := _differing_services({**sides[0], **sides[1]}):
        console.warn(f"other retrievers searched {differing}")
    results: Results = {}
    for temperature in common:
        _check_same(arguments.first, arguments.second, temperature, first[temperature], second[temperature])
        for metric in arguments.metrics:
            for source, comparison in _compare(arguments, metric, first[temperature], second[temperature]):
                results[temperature, metric, source] = comparison
    console.say(f"A: {arguments.first}\nB: {arguments.second}")
    console.say(comparison_table(results, arguments.confidence))
    if few := {source: each.questions for (*_, source), each in results.items() if each.questions < FEW}:
        counts = ", ".join(f"{source}: {questions}" for source, questions in few.items())
        console.warn(
            f"fewer than {FEW} questions ({counts}): their intervals and p-values are not reliable; evaluate"
            " more questions (data.eval_limit)"
        )
    if arguments.output is not None:
        numbers: Any = {temperature: {metric: {} for metric in arguments.metrics} for temperature in common}
        for (temperature, metric, source), comparison in results.items():
            numbers[temperature][metric][source] = asdict(comparison)
        about = {name: getattr(arguments, name) for name in ("first", "second", "confidence", "resamples")}
        write_json(arguments.output, about | {"other_retrievers": bool(differing), "differences": numbers})


def _seeds(argument: str) -> dict[str, Evaluation]:
    paths = BETWEEN_FILES.split(argument)
    if len({Path(path).resolve().with_suffix("") for path in paths}) < len(paths):
        raise UserError(f"{argument}: names an evaluation twice; name each seed once")
    return {path: _load(Path(path)) for path in paths}


def _means(seeds: dict[str, Evaluation]) -> Evaluation:
    """Return the means of the scores over the seeds; a metric that a seed lacks is left out."""
    (path, first), *further = seeds.items()
    if not further:
        return first
    for other, evaluation in further:
        if evaluation.keys() != first.keys():
            raise UserError(
                f"{path} has temperatures {', '.join(first)} and {other} has {', '.join(evaluation)}:"
                " evaluate every seed at the same temperatures"
            )
        for temperature, rows in evaluation.items():
            _check_same(path, other, temperature, first[temperature], rows)

    def mean(temperature: str, key: tuple[str, str], row: ScoredRow) -> ScoredRow:
        scores = [evaluation[temperature][key]["scores"] for evaluation in seeds.values()]
        names = [name for name in scores[0] if all(name in own for own in scores)]
        return row | {"scores": {name: statistics.fmean(own[name] for own in scores) for name in names}}

    return {
        temperature: {key: mean(temperature, key, row) for key, row in rows.items()}
        for temperature, rows in first.items()
    }


def _load(path: Path) -> Evaluation:
    path = path.with_suffix(".jsonl") if path.suffix == ".json" else path
    evaluation: Evaluation = {}
    for row in read_scores(path):
        evaluation.setdefault(row["temperature"], {})[row["data_source"], row["id"]] = row
    if not evaluation:
        raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
    return evaluation


def _differing_services(evaluations: dict[str, Evaluation]) -> str:
    """Describe the first two retrievers that differ; empty if none do. No retriever is no difference."""
    services: dict[str, dict[str, Any]] = {}
    for path, evaluation in evaluations.items():
        row = next(iter(next(iter(evaluation.values())).values()))
        services |= {path: service} if (service := row.get("retriever")) else {}
    path, first = next(iter(services.items()), ("", {}))
    for other, service in services.items():
        if names := [name for name in first | service if first.get(name) != service.get(name)]:
            differing = ", ".join(f"{name} {first.get(name)!r} and {service.get(name)!r}" for name in names)
            return f"for {path} and {other}: {differing}"
    return ""


def _check_same(a: str, b: str, temperature: str, first: Questions, second: Questions) -> None:
    differing = first.keys() ^ second.keys()
    for name in ("question", "golden_answers"):
        differing |= {key for key in first.keys() & second.keys() if first[key][name] != second[key][name]}
    if differing:
        source, name = min(differing)
        raise UserError(
            f"{a} and {b} did not answer the same questions at temperature"
            f" {temperature}: {len(differing)} differ, such as {name!r} of {source!r}; evaluate both to the"
            " end, with the same data.eval and data.eval_limit"
        )


def _compare(
    arguments: argparse.Namespace, metric: str, first: Questions, second: Questions
) -> Iterator[tuple[str, Comparison]]:
    """Yield comparisons by data source. A question without a score of both policies is left out."""
    for argument, rows in ((arguments.first, first), (arguments.second, second)):
        if not any(metric in row["scores"] for row in rows.values()):
            names = ", ".join(metric_names(list(rows.values())))
            raise UserError(f"{argument}: no metric {metric!r}; it has {names or 'no scores at all'}")
    both = [key for key in first if metric in first[key]["scores"] and metric in second[key]["scores"]]
    by_source: dict[str, list[tuple[str, str]]] = {}
    for key in both:
        by_source.setdefault(key[0], []).append(key)
    groups = {ALL: [both]} if both else {}
    groups |= {AVERAGE: list(by_source.values())} if len(by_source) > 1 else {}
    groups |= {source: [keys] for source, keys in by_source.items()}
    for name, strata in groups.items():
        a, b = (
            [scores_of([rows[key] for key in keys], metric) for keys in strata] for rows in (first, second)
        )
        yield name, compare_paired(a, b, arguments.confidence, arguments.resamples)


def comparison_table(results: Results, confidence: float) -> str:
    rows = [
        [*key, each.questions, each.first, each.second, each.difference]
        + ["[{:.3f}, {:.3f}]".format(*each.interval) if each.interval else "-", f"{each.p_value:.4f}"]
        for key, each in results.items()
    ]
    headers = ["temperature", "metric", "data", "questions", "A", "B", "B - A"]
    return table(rows, [*headers, f"{100 * confidence:g}% interval", "p"])
