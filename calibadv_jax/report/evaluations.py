"""Tables of evaluation scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibadv_jax.report.runs import Run

MEANS = ("mean", "value", "estimate")
INTERVALS = ("interval", "ci", "ci95", "confidence_interval")
ENDS = (("low", "high"), ("lower", "upper"))
SCORE_NAMES = {"f1", "em", "cover_em", "format", "searches"}  # one of them makes a mapping a row


@dataclass(frozen=True)
class Score:
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Table:
    """Scores of one run under one title: (names of the row, score by metric)."""

    run: str
    title: str
    metrics: list[str]
    rows: list[tuple[str, dict[str, Score]]]

    @property
    def has_intervals(self) -> bool:
        return any(score.low is not None for _, scores in self.rows for score in scores.values())


def tables(runs: Sequence[Run]) -> list[Table]:
    """Every evaluation of every run, in the order of the runs."""
    found = []
    for run in runs:
        for title, report in run.evaluations.items():
            rows = [(_row_name(path), scores) for path, scores in _rows(report, ())]
            metrics = list(dict.fromkeys(name for _, scores in rows for name in scores))
            if rows:
                found.append(Table(run.name, title, metrics, rows))
    return found


def _rows(
    report: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Score]]]:
    """The mappings that hold scores, wherever they lie, with the names that lead to them."""
    if SCORE_NAMES & report.keys():
        yield path, read_scores(report)
        return
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield from _rows(value, (*path, name))


def read_scores(row: Mapping[str, Any]) -> dict[str, Score]:
    """Scores by metric, each a number or a mapping with mean and interval; other values are left out.

    An interval is a pair, or two values named low and high (lower and upper). It may stand in the metric's
    mapping or beside the metric as NAME_low and NAME_high, or NAME_ci.
    """
    scores = {}
    for name, value in row.items():
        if _is_end(name, row):
            continue
        mean = _first_number(value, MEANS) if isinstance(value, Mapping) else _number(value)
        if mean is not None:
            scores[name] = Score(mean, *_interval(name, value, row))
    return scores


def _is_end(name: str, row: Mapping[str, Any]) -> bool:
    suffixes = [end for pair in ENDS for end in pair] + list(INTERVALS)
    return any(name.endswith(f"_{one}") and name.removesuffix(f"_{one}") in row for one in suffixes)


def _interval(name: str, value: Any, row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    inside = value if isinstance(value, Mapping) else {}
    beside = {one: row.get(f"{name}_{one}") for one in (*INTERVALS, *(end for pair in ENDS for end in pair))}
    for source in (inside, beside):
        for key in INTERVALS:
            pair = source.get(key)
            if isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2:
                return _number(pair[0]), _number(pair[1])
            if isinstance(pair, Mapping):
                source = {**source, **pair}
        for low, high in ENDS:
            ends = _number(source.get(low)), _number(source.get(high))
            if None not in ends:
                return ends
    return None, None


def _first_number(value: Mapping[str, Any], names: Sequence[str]) -> float | None:
    return next((found for found in (_number(value.get(name)) for name in names) if found is not None), None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _row_name(path: tuple[str, ...]) -> str:
    """ "temperature 0, all" for ("0", "all")."""
    named = [f"temperature {part}" if _is_number(part) else part for part in path]
    return ", ".join(named) or "all"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
