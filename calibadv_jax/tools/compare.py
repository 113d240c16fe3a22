"""Two policies on the same questions: ``calibadv compare A B``.

A and B are the per-question files of two evaluations (or the .json beside them). Where other retrievers
answered, a warning says so; two retrievers with one policy may be what is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.evaluation.records import Row, read_scores
from calibadv_jax.evaluation.report import ALL, AVERAGE, metric_names, scores_of
from calibadv_jax.evaluation.statistics import Comparison, compare_paired
from calibadv_jax.metrics.console import Console, table

DEFAULT_METRICS = ("em", "f1", "cover_em")
Questions = dict[tuple[str, str], Row]  # (data source, id) -> row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A", help="evaluation of the first policy")
    parser.add_argument("second", type=Path, metavar="B", help="evaluation of the second policy")
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
    first, second = (_load(path) for path in (arguments.first, arguments.second))
    common = [temperature for temperature in first if temperature in second]
    if not common:
        raise UserError(
            f"{arguments.first} has temperatures {', '.join(first)} and {arguments.second} has"
            f" {', '.join(second)}: evaluate both at one temperature"
        )
    differing = _differing_service(*(_service(one) for one in (first, second)))
    if differing:
        console.warn(f"other retrievers searched for {arguments.first} and {arguments.second}: {differing}")
    found: dict[str, dict[str, dict[str, Comparison]]] = {}
    for temperature in common:
        _check_same(arguments, temperature, first[temperature], second[temperature])
        found[temperature] = {
            metric: dict(_compare(arguments, metric, first[temperature], second[temperature]))
            for metric in arguments.metrics
        }
    console.say(comparison_table(found, arguments.confidence))
    if arguments.output is not None:
        numbers = {
            temperature: {
                metric: {source: asdict(one) for source, one in sources.items()}
                for metric, sources in metrics.items()
            }
            for temperature, metrics in found.items()
        }
        names = {"first": str(arguments.first), "second": str(arguments.second)}
        about = names | {"confidence": arguments.confidence, "resamples": arguments.resamples}
        about |= {"other_retrievers": bool(differing)}
        write_json(arguments.output, about | {"differences": numbers})


def _load(path: Path) -> dict[str, Questions]:
    """Temperature -> its questions."""
    path = path.with_suffix(".jsonl") if path.suffix == ".json" else path
    found: dict[str, Questions] = {}
    for row in read_scores(path):
        found.setdefault(row["temperature"], {})[row["data_source"], row["id"]] = row
    if not found:
        raise UserError(f"{path}: no questions in it; run calibadv evaluate first")
    return found


def _service(found: dict[str, Questions]) -> dict[str, Any]:
    """What searched for an evaluation (`evaluate.describe_retriever`); empty if it is not known."""
    row = next(iter(next(iter(found.values())).values()))
    service: dict[str, Any] = row.get("retriever") or {}
    return service


def _differing_service(first: dict[str, Any], second: dict[str, Any]) -> str:
    """In words; empty if the two are the same, or one of them searched nothing."""
    names = [name for name in first | second if first.get(name) != second.get(name)]
    if not first or not second:
        return ""
    return ", ".join(f"{name} {first.get(name)!r} and {second.get(name)!r}" for name in names)


def _check_same(arguments: argparse.Namespace, temperature: str, first: Questions, second: Questions) -> None:
    differing = [
        key
        for key in first.keys() & second.keys()
        if any(first[key][name] != second[key][name] for name in ("question", "golden_answers"))
    ]
    differing += first.keys() ^ second.keys()
    if differing:
        source, name = min(differing)
        raise UserError(
            f"{arguments.first} and {arguments.second} did not answer the same questions at temperature"
            f" {temperature}: {len(differing)} differ, such as {name!r} of {source!r}; evaluate both to the"
            " end, with the same data.eval and data.eval_limit"
        )


def _compare(
    arguments: argparse.Namespace, metric: str, first: Questions, second: Questions
) -> Iterator[tuple[str, Comparison]]:
    """By data source. A question of which one policy has no score is left out."""
    for path, rows in ((arguments.first, first), (arguments.second, second)):
        if not any(metric in row["scores"] for row in rows.values()):
            names = ", ".join(metric_names(list(rows.values())))
            raise UserError(f"{path}: no metric {metric!r}; it has {names or 'no scores at all'}")
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
