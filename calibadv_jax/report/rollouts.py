"""Figures that the metrics do not hold, from the kept trajectories of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from calibadv_jax.report.runs import Run

MAX_STEPS = 100  # read of a run, evenly spaced, the last one among them
COLUMNS = ["error", "data_source", "metrics", "advantage_raw", "turns"]
TURN_FIELDS = ("kind", "logprobs", "learner_logprobs", "advantage_raw", "advantage")
PERCENTILES = (1, 50, 99)


def rollout_values(run: Run) -> dict[str, dict[int, float | None]]:
    """Metric -> step -> value, under the names that figures.py gives them; empty where nothing was kept.

    f1/SOURCE: mean F1 of the data source.
    turn_advantage/…: mean over the search or answer turns, before and after the calibration (Parquet only).
    importance/pN: percentile of exp(learner's - sampler's log-probability) over sampled tokens (Parquet only,
        and only where the learner's were computed).
    """
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for step in chosen_steps(list(run.rollouts)):
        path = run.rollouts[step]
        rows = read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
        for name, value in _values([row for row in rows if row["error"] is None]).items():
            found[name][step] = value
    return dict(found)


def chosen_steps(steps: list[int]) -> list[int]:
    """Every k-th step, counted from the last one, so that at most MAX_STEPS are read."""
    stride = max(1, -(-len(steps) // MAX_STEPS))
    return sorted(steps)[::-1][::stride][::-1]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The columns that the figures need; no row where the file is cut off, as a killed run may leave it."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid:
        return []
    with file:
        nested = [f"turns.list.element.{name}" for name in TURN_FIELDS]
        known = set(_leaves(file))
        columns = [name for name in COLUMNS if name in file.schema_arrow.names and name != "turns"]
        columns += [name for name in nested if any(leaf.startswith(name) for leaf in known)]
        rows: list[dict[str, Any]] = file.read(columns=columns).to_pylist()
    for row in rows:
        row["metrics"] = dict(row["metrics"] or [])  # a map comes as a list of pairs
    return rows


def _leaves(file: Any) -> Iterator[str]:
    schema = file.schema
    for index in range(len(schema)):
        yield schema.column(index).path


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines; a last one that was cut off is left out."""
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in complete]
    return [row for row in rows if "data_source" in row]  # the first line may be about the file


def _values(rows: list[dict[str, Any]]) -> dict[str, float]:
    by_source: dict[str, list[float]] = defaultdict(list)
    turns: dict[str, list[float]] = defaultdict(list)
    differences: list[np.ndarray] = []
    for row in rows:
        if "f1" in row["metrics"]:
            by_source[row["data_source"]].append(row["metrics"]["f1"])
        for place, turn in _judged(row.get("turns") or []):
            for when, field in (("before", "advantage_raw"), ("after", "advantage")):
                if turn.get(field) is not None:
                    turns[f"{place} {when}"].append(turn[field])
        for turn in row.get("turns") or []:
            if turn.get("learner_logprobs") and turn.get("logprobs"):
                ours, theirs = (np.asarray(turn[name]) for name in ("learner_logprobs", "logprobs"))
                differences.append(ours.astype(np.float64) - theirs)
    values = {f"f1/{source}": float(np.mean(scores)) for source, scores in sorted(by_source.items())}
    values |= {f"turn_advantage/{name}": float(np.mean(turns[name])) for name in sorted(turns, reverse=True)}
    if differences:
        at = np.percentile(np.exp(np.concatenate(differences)), PERCENTILES)
        values |= {f"importance/p{n}": float(value) for n, value in zip(PERCENTILES, at, strict=True)}
    return values


def _judged(turns: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Search and answer turns with the name of their kind."""
    for turn in turns:
        if turn.get("kind") in ("search", "answer"):
            yield turn["kind"], turn
