"""Two policies on the same questions: ``calibadv compare A B``.

A and B are the per-question files of two evaluations (or the .json beside them), or several of each, joined
by commas: one method trained with several seeds. Then the scores of a question are averaged over the seeds,
and it stays the unit. Where other retrievers answered, a warning says so; two retrievers with one policy may
be what is compared.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.evaluation.records import ScoredRow, read_scores
from calibadv_jax.evaluation.report import ALL, AVERAGE, FEW, metric_names, scores_of
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

DEFAULT_METRICS = ("em", "f1", "cover_em")
Questions = dict[tuple[str, str], ScoredRow]  # (data source, id) -> row
Found = dict[str, Questions]  # by temperature
BETWEEN_FILES = re.compile(r"(?<=\.json),|(?<=\.jsonl),")  # no other comma: a folder may have one in its name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seeds = "or of its seeds: A1,A2"
    parser.add_argument("first", metavar="A", help=f"evaluation of the first policy, {seeds}")
    parser.add_argument("second", metavar="B", help="evaluation of the second policy, or of its seeds")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=list(DEFAULT_METRICS),
        metavar="NAME",
        help="metrics to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=10000,
        metavar="N",
        help="number of resamples of bootstrap and test (default: %(default)s)",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="C",
        help="coverage of the confidence intervals (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the numbers to this JSON file"
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the differences B - A by temperature, metric and data source.

    Raises:
        UserError: the two did not answer the same questions at a common temperature, or lack a metric.
    """
    if arguments.resamples < 1 or not 0 < arguments.confidence < 1:
        raise UserError("--resamples must be at least 1, and --confidence between 0 and 1")
    console = Console()
    sides = [_seeds(given) for given in (arguments.first, arguments.second)]
    first, second = (_means(side) for side in sides)
    common = [temperature for temperature in first if temperature in second]
    if not common:
        raise UserError(
            f"{arguments.first} has temperatures {', '.join(first)} and {arguments.second} has"
            f" {', '.join(second)}: evaluate both at one temperature"
        )
    differing = _differing_services({**sides[0], **sides[1]})
    if differing:
        console.warn(f"other retrievers searched {differing}")
    found: dict[str, dict[str, dict[str, Comparison]]] = {}
    for temperature in common:
        _check_same(arguments.first, arguments.second, temperature, first[temperature], second[temperature])
        found[temperature] = {
            metric: dict(_compare(arguments, metric, first[temperature], second[temperature]))
            for metric in arguments.metrics
        }
    console.say(f"A: {arguments.first}\nB: {arguments.second}")
    console.say(comparison_table(found, arguments.confidence))
    few = {
        source: comparison.questions
        for metrics in found.values()
        for sources in metrics.values()
        for source, comparison in sources.items()
        if comparison.questions < FEW
    }
    if few:
        counts = ", ".join(f"{source}: {questions}" for source, questions in few.items())
        console.warn(
            f"fewer than {FEW} questions ({counts}): their intervals and p-values are not reliable; evaluate"
            " more questions (data.eval_limit)"
        )
    if arguments.output is not None:
        numbers = {
            temperature: {
                metric: {source: asdict(one) for source, one in sources.items()}
                for metric, sources in metrics.items()
            }
            for temperature, metrics in found.items()
        }
        names = {"first": arguments.first, "second": arguments.second}
        about = names | {"confidence": arguments.confidence, "resamples": arguments.resamples}
        about |= {"other_retrievers": bool(differing)}
        write_json(arguments.output, about | {"differences": numbers})


def _seeds(given: str) -> dict[str, Found]:
    """The evaluations that an argument names, by their paths."""
    paths = BETWEEN_FILES.split(given)
    if len({Path(path).resolve().with_suffix("") for path in paths}) < len(paths):
        raise UserError(f"{given}: names an evaluation twice; name each seed once")
    return {path: _load(Path(path)) for path in paths}


def _means(seeds: dict[str, Found]) -> Found:
    """The evaluation whose scores are the means over the seeds; a metric that a seed lacks is left out."""
    (path, first), *others = seeds.items()
    if not others:
        return first
    for other, found in others:
        if found.keys() != first.keys():
            raise UserError(
                f"{path} has temperatures {', '.join(first)} and {other} has {', '.join(found)}:"
                " evaluate every seed at the same temperatures"
            )
        for temperature, rows in found.items():
            _check_same(path, other, temperature, first[temperature], rows)
    means: Found = {}
    for temperature, rows in first.items():
        means[temperature] = {}
        for key, row in rows.items():
            scores = [found[temperature][key]["scores"] for found in seeds.values()]
            names = [name for name in scores[0] if all(name in one for one in scores)]
            mean = {name: statistics.fmean(one[name] for one in scores) for name in names}
            means[temperature][key] = row | {"scores": mean}
    return means


def _load(path: Path) -> Found:
    path = path.with_suffix(".jsonl") if path.suffix == ".json" else path
    found: Found = {}
    for row in read_scores(path):
        found.setdefault(row["temperature"], {})[row["data_source"], row["id"]] = row
    if not found:
        raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
    return found


def _service(found: Found) -> dict[str, Any]:
    """What searched for an evaluation (`evaluate.describe_retriever`); empty if it is not known."""
    row = next(iter(next(iter(found.values())).values()))
    service: dict[str, Any] = row.get("retriever") or {}
    return service


def _differing_services(evaluations: dict[str, Found]) -> str:
    """The first two that differ, in words; empty if there are none. Who searched nothing does not count."""
    services = {path: _service(found) for path, found in evaluations.items()}
    known = [(path, service) for path, service in services.items() if service]
    path, first = known[0] if known else ("", {})
    for other, service in known[1:]:
        names = [name for name in first | service if first.get(name) != service.get(name)]
        if names:
            differing = ", ".join(f"{name} {first.get(name)!r} and {service.get(name)!r}" for name in names)
            return f"for {path} and {other}: {differing}"
    return ""


def _check_same(a: str, b: str, temperature: str, first: Questions, second: Questions) -> None:
    differing = [
        key
        for key in first.keys() & second.keys()
        if any(first[key][name] != second[key][name] for name in ("question", "golden_answers"))
    ]
    differing += first.keys() ^ second.keys()
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
    """By data source. A question of which one policy has no score is left out."""
    for given, rows in ((arguments.first, first), (arguments.second, second)):
        if not any(metric in row["scores"] for row in rows.values()):
            names = ", ".join(metric_names(list(rows.values())))
            raise UserError(f"{given}: no metric {metric!r}; it has {names or 'no scores at all'}")
    both = [key for key in first if metric in first[key]["scores"] and metric in second[key]["scores"]]
    by_source: dict[str, list[tuple[str, str]]] = {}
    for key in both:
        by_source.setdefault(key[0], []).append(key)
    groups: dict[str, Sequence[Sequence[tuple[str, str]]]] = {ALL: [both]} if both else {}
    if len(by_source) > 1:
        groups[AVERAGE] = list(by_source.values())
    groups |= {source: [keys] for source, keys in by_source.items()}
    for name, strata in groups.items():
        a, b = (
            [scores_of([rows[key] for key in keys], metric) for keys in strata] for rows in (first, second)
        )
        yield name, compare_paired(a, b, arguments.confidence, arguments.resamples)


def comparison_table(found: dict[str, dict[str, dict[str, Comparison]]], confidence: float) -> str:
    """A row for each temperature, metric and data source."""
    rows = [
        [temperature, metric, source, one.questions, one.first, one.second, one.difference]
        + ["[{:.3f}, {:.3f}]".format(*one.interval) if one.interval else "-", f"{one.p_value:.4f}"]
        for temperature, metrics in found.items()
        for metric, sources in metrics.items()
        for source, one in sources.items()
    ]
    headers = ["temperature", "metric", "data", "questions", "A", "B", "B - A"]
    return table(rows, [*headers, f"{100 * confidence:g}% interval", "p"])
