"""Tables of evaluation scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTS = ("questions", "trajectories", "failed")
TITLES = {
    "evaluation": "Evaluation",
    "evaluation_before": "Before training",
    "evaluation_after": "After training",
}


@dataclass(frozen=True)
class Score:
    mean: float
    low: float | None = None  # ends of the interval, where the evaluation made one
    high: float | None = None


@dataclass(frozen=True)
class Table:
    """Scores of one evaluation."""

    title: str
    rows: dict[str, dict[str, Score]]  # questions, such as "temperature 0, all" -> metric -> score
    confidence: float | None = None  # of the intervals

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for scores in self.rows.values() for name in scores))


def read_evaluations(folder: Path, output: str | None) -> list[Table]:
    """What evaluations and the quickstart left in a run's folder; half-written files are left out.

    Args:
        output: evaluate.output of the run, which may lie elsewhere or have another name.
    """
    paths = sorted(folder.glob("evaluation*.json"), key=lambda path: _order(path.stem))
    if output and Path(output).is_file() and Path(output).resolve() not in [path.resolve() for path in paths]:
        paths.append(Path(output))
    found = [table for path in paths if (table := _table(_title(path.stem), read_json(path)))]
    quickstart = read_json(folder / "quickstart.json")
    if isinstance(quickstart, dict):
        for name in ("before", "after"):
            title = TITLES[f"evaluation_{name}"]
            table = _table(title, quickstart.get(name))
            if table and not any(one.title == title for one in found):
                found.append(table)
    return found


def in_one(
    tables: Sequence[tuple[str, Table]], metric: str
) -> tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]:
    """One metric of all tables: (run, title) of the columns, and (questions, cells) of the rows.

    Args:
        tables: each with the name of its run.
    """
    some = [(run, table) for run, table in tables if metric in table.metrics]
    names = dict.fromkeys(name for _, table in some for name in table.rows)
    rows = [
        (name, [cell(metric, table.rows.get(name, {}).get(metric)) for _, table in some]) for name in names
    ]
    return [(run, table.title) for run, table in some], rows


def cell(metric: str, score: Score | None) -> str:
    """``0.512 [0.470, 0.554]``; counts as whole numbers; ``-`` for what was not measured."""
    if score is None:
        return "-"
    mean = f"{score.mean:.0f}" if metric in COUNTS else f"{score.mean:.3f}"
    return mean if score.low is None else f"{mean} [{score.low:.3f}, {score.high:.3f}]"


def read_json(path: Path) -> Any:
    """None where the file is missing or cut off: another program may be writing it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _table(title: str, report: Any) -> Table | None:
    """Of temperature -> data source -> metric -> mean, alone or under "scores" beside "intervals"."""
    if not isinstance(report, dict):
        return None
    means = report.get("scores", report)
    intervals = report.get("intervals", {})
    method = report.get("method", "agent")
    rows = {
        f"temperature {temperature}, {source}": _scores(
            scores, intervals.get(temperature, {}).get(source, {})
        )
        for temperature, sources in means.items()
        for source, scores in sources.items()
    }
    named = title if method == "agent" else f"{title} ({method})"
    return Table(named, rows, report.get("confidence") if intervals else None) if rows else None


def _scores(means: Mapping[str, float], intervals: Mapping[str, Sequence[float]]) -> dict[str, Score]:
    return {name: Score(mean, *intervals.get(name, (None, None))) for name, mean in means.items()}


def _title(stem: str) -> str:
    return TITLES.get(stem, stem.replace("_", " "))


def _order(stem: str) -> tuple[int, str]:
    """Before and after the training first, then in the order of the alphabet."""
    known = ("evaluation_before", "evaluation_after")
    return (known.index(stem) if stem in known else len(known), stem)
