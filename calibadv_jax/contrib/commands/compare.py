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
from itertools import product
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.evaluation.records import ScoredRow, read_scores
from calibadv_jax.evaluation.report import ALL, AVERAGE, FEW, metric_names, scores_of
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

Evaluation = dict[tuple[str, str, str], ScoredRow]  # (temperature, data source, id) -> row
BETWEEN_FILES = re.compile(r"(?<=\.json),|(?<=\.jsonl),")  # no other comma: a folder may have one in its name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="evaluation of the first policy, or of its seeds: A1,A2")
    parser.add_argument("second", metavar="B", help="evaluation of the second policy, or of its seeds")
    metrics = ["em", "f1", "cover_em"]
    parser.add_argument("--metrics", nargs="+", default=metrics, metavar="NAME", help="default: %(default)s")
    text = "number of resamples of bootstrap and test (default: %(default)s)"
    parser.add_argument("--resamples", type=number(int, least=1), default=10000, metavar="N", help=text)
    text = "coverage of the confidence intervals (default: %(default)s)"
    share = number(float, least=0.001, below=1)
    parser.add_argument("--confidence", type=share, default=0.95, metavar="C", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the numbers as JSON")


def run(arguments: argparse.Namespace) -> None:
    console = Console()
    sides = [_seeds(argument) for argument in (arguments.first, arguments.second)]
    first, second = map(_means, sides)
    common = [temperature for temperature in _temperatures(first) if temperature in _temperatures(second)]
    if not common:
        raise UserError(
            f"{arguments.first} has temperatures {', '.join(_temperatures(first))} and {arguments.second} has"
            f" {', '.join(_temperatures(second))}: evaluate both at one temperature"
        )
    first, second = ({key: row for key, row in side.items() if key[0] in common} for side in (first, second))
    _check_same(arguments.first, arguments.second, first, second)
    if differing := _differing_services({**sides[0], **sides[1]}):
        console.warn(f"other retrievers searched {differing}")
    results: dict[tuple[str, str, str], Comparison] = {}  # by temperature, metric and data source
    for temperature, metric in product(common, arguments.metrics):
        for source, comparison in _compare(arguments, temperature, metric, first, second):
            results[temperature, metric, source] = comparison
    console.say(f"A: {arguments.first}\nB: {arguments.second}")
    rows = [
        [*key, each.questions, each.first, each.second, each.difference]
        + ["[{:.3f}, {:.3f}]".format(*each.interval) if each.interval else "-", f"{each.p_value:.4f}"]
        for key, each in results.items()
    ]
    headers = ["temperature", "metric", "data", "questions", "A", "B", "B - A"]
    console.say(table(rows, [*headers, f"{100 * arguments.confidence:g}% interval", "p"]))
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
    names, seeds = BETWEEN_FILES.split(argument), dict[str, Evaluation]()
    if len({Path(name).resolve().with_suffix("") for name in names}) < len(names):
        raise UserError(f"{argument}: names an evaluation twice; name each seed once")
    for name in names:
        path = Path(name)
        rows = read_scores(path.with_suffix(".jsonl") if path.suffix == ".json" else path)
        seeds[name] = {(row["temperature"], row["data_source"], row["id"]): row for row in rows}
        if not seeds[name]:
            raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
    return seeds


def _temperatures(evaluation: Evaluation) -> list[str]:
    return list(dict.fromkeys(temperature for temperature, *_ in evaluation))


def _means(seeds: dict[str, Evaluation]) -> Evaluation:
    """Return the means of the scores over the seeds; a metric that a seed lacks is left out."""
    (path, first), *further = seeds.items()
    for other, evaluation in further:
        if set(_temperatures(evaluation)) != set(_temperatures(first)):
            raise UserError(
                f"{path} has temperatures {', '.join(_temperatures(first))} and {other} has"
                f" {', '.join(_temperatures(evaluation))}: evaluate every seed at the same temperatures"
            )
        _check_same(path, other, first, evaluation)
    means: Evaluation = {}
    for key, row in first.items():
        scores = [evaluation[key]["scores"] for evaluation in seeds.values()]
        names = [name for name in scores[0] if all(name in own for own in scores)]
        means[key] = row | {"scores": {name: statistics.fmean(own[name] for own in scores) for name in names}}
    return means


def _differing_services(evaluations: dict[str, Evaluation]) -> str:
    """Describe the first two retrievers that differ; empty if none do. No retriever is no difference."""
    rows = {path: next(iter(evaluation.values())) for path, evaluation in evaluations.items()}
    services = {path: service for path, row in rows.items() if (service := row.get("retriever"))}
    path, first = next(iter(services.items()), ("", {}))
    for other, service in services.items():
        if names := [name for name in first | service if first.get(name) != service.get(name)]:
            differing = ", ".join(f"{name} {first.get(name)!r} and {service.get(name)!r}" for name in names)
            return f"for {path} and {other}: {differing}"
    return ""


def _check_same(a: str, b: str, first: Evaluation, second: Evaluation) -> None:
    keys = first.keys() ^ second.keys()
    for name in ("question", "golden_answers"):
        keys |= {key for key in first.keys() & second.keys() if first[key][name] != second[key][name]}
    if differing := {(source, name) for _, source, name in keys}:
        source, name = min(differing)
        raise UserError(
            f"{a} and {b} did not answer the same questions: {len(differing)} differ, such as {name!r} of"
            f" {source!r}; evaluate both to the end, with the same data.eval and data.eval_limit"
        )


def _compare(
    arguments: argparse.Namespace, temperature: str, metric: str, first: Evaluation, second: Evaluation
) -> Iterator[tuple[str, Comparison]]:
    """Yield comparisons by data source. A question without a score of both policies is left out."""
    keys = [key for key in first if key[0] == temperature]
    for argument, side in ((arguments.first, first), (arguments.second, second)):
        rows = [side[key] for key in keys]
        if not any(metric in row["scores"] for row in rows):
            names = ", ".join(metric_names(rows)) or "no scores at all"
            raise UserError(f"{argument}: no metric {metric!r}; it has {names}")
    both = [key for key in keys if metric in first[key]["scores"] and metric in second[key]["scores"]]
    by_source: dict[str, list[tuple[str, str, str]]] = {}
    for key in both:
        by_source.setdefault(key[1], []).append(key)
    groups = {ALL: [both]} if both else {}
    groups |= {AVERAGE: list(by_source.values())} if len(by_source) > 1 else {}
    groups |= {source: [members] for source, members in by_source.items()}
    for name, strata in groups.items():
        a, b = (
            [scores_of([side[key] for key in members], metric) for members in strata]
            for side in (first, second)
        )
        yield name, compare_paired(a, b, arguments.confidence, arguments.resamples)
