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
from calibadv_jax.evaluation.records import RowKey, ScoredRow, key_of, read_scores
from calibadv_jax.evaluation.report import ALL, AVERAGE, FEW, metric_names, scores_of
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

Evaluation = dict[RowKey, ScoredRow]
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
    sides = [_read_seeds(argument) for argument in (arguments.first, arguments.second)]
    evaluations = sides[0] | sides[1]
    _check_same(evaluations)
    services = [next(iter(evaluation.values())).get("retriever") for evaluation in evaluations.values()]
    services = [service for service in services if service]  # an evaluation without searches has none
    has_other_retrievers = any(service != services[0] for service in services)
    if has_other_retrievers:
        console.warn('different retrievers searched; compare "retriever" in the lines of the files')
    first, second = map(_means, sides)
    results: dict[tuple[str, str, str], Comparison] = {}  # by temperature, metric and data source
    for temperature, metric in product(dict.fromkeys(key[0] for key in first), arguments.metrics):
        for source, comparison in _compare(arguments, temperature, metric, first, second):
            results[temperature, metric, source] = comparison
    console.say(f"A: {arguments.first}\nB: {arguments.second}")
    rows = [
        [*key, result.questions, result.first, result.second, result.difference]
        + ["[{:.3f}, {:.3f}]".format(*result.interval) if result.interval else "-", f"{result.p_value:.4f}"]
        for key, result in results.items()
    ]
    headers = ["temperature", "metric", "data", "questions", "A", "B", "B - A"]
    console.say(table(rows, [*headers, f"{100 * arguments.confidence:g}% interval", "p"]))
    if few := {key[2]: result.questions for key, result in results.items() if result.questions < FEW}:
        counts = ", ".join(f"{source}: {questions}" for source, questions in few.items())
        advice = "their intervals and p-values are not reliable; evaluate more questions (data.eval_limit)"
        console.warn(f"fewer than {FEW} questions ({counts}): {advice}")
    if arguments.output is not None:
        numbers: dict[str, Any] = {}
        for (temperature, metric, source), comparison in results.items():
            numbers.setdefault(temperature, {}).setdefault(metric, {})[source] = asdict(comparison)
        about = {name: getattr(arguments, name) for name in ("first", "second", "confidence", "resamples")}
        write_json(
            arguments.output, about | {"other_retrievers": has_other_retrievers, "differences": numbers}
        )


def _read_seeds(argument: str) -> dict[str, Evaluation]:
    names, seeds = BETWEEN_FILES.split(argument), dict[str, Evaluation]()
    if len({Path(name).resolve().with_suffix("") for name in names}) < len(names):
        raise UserError(f"{argument}: names an evaluation twice; name each seed once")
    for name in names:
        path = Path(name)
        rows = read_scores(path.with_suffix(".jsonl") if path.suffix == ".json" else path)
        seeds[name] = {key_of(row): row for row in rows}
        if not seeds[name]:
            raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
    return seeds


def _check_same(evaluations: dict[str, Evaluation]) -> None:
    path, first = next(iter(evaluations.items()))
    for other, evaluation in evaluations.items():
        keys = [key for key in first | evaluation if _asked(first, key) != _asked(evaluation, key)]
        if keys:
            temperature, source, name = min(keys)
            fault = (
                f"{len(keys)} questions differ, such as {name!r} of {source!r} at temperature {temperature}"
            )
            way_out = "evaluate to the end, with one data.eval, data.eval_limit and evaluate.temperatures"
            raise UserError(f"{path} and {other}: {fault}; {way_out}")


def _asked(evaluation: Evaluation, key: RowKey) -> tuple[Any, Any]:
    row = evaluation.get(key, {})
    return row.get("question"), row.get("golden_answers")


def _means(seeds: dict[str, Evaluation]) -> Evaluation:
    """Return the means of the scores over the seeds; a metric that a seed lacks is left out."""
    first, *_ = seeds.values()
    means: Evaluation = {}
    for key, row in first.items():
        scores = [evaluation[key]["scores"] for evaluation in seeds.values()]
        names = [name for name in scores[0] if all(name in of_seed for of_seed in scores)]
        mean = {name: statistics.fmean(of_seed[name] for of_seed in scores) for name in names}
        means[key] = row | {"scores": mean}
    return means


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
    by_source: dict[str, list[RowKey]] = {}
    for key in both:
        by_source.setdefault(key[1], []).append(key)
    groups = {ALL: [both]} if both else {}
    groups |= {AVERAGE: list(by_source.values())} if len(by_source) > 1 else {}
    groups |= {source: [members] for source, members in by_source.items()}
    for name, strata in groups.items():
        before, after = (
            [scores_of([side[key] for key in members], metric) for members in strata]
            for side in (first, second)
        )
        yield name, compare_paired(before, after, arguments.confidence, arguments.resamples)
