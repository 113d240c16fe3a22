"""The figures of the report, in sections: ``figures.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from calibadv_jax.metrics import catalogue


@dataclass(frozen=True)
class Figure:
    """One figure. Metrics that no run logged are left out of it, and a figure without any is left out."""

    key: str  # names its anchor and its PNG file
    title: str
    text: str  # the values and how to read them
    unit: str
    metrics: Mapping[str, str]  # metric -> name of its line; a name ending in "*" stands for all that follow
    kind: Literal["lines", "stack"] = "lines"
    needs_rollouts: bool = False  # its values come from kept trajectories, not from metrics.jsonl
    from_zero: bool = True  # the axis starts at 0 where no value is negative
    cuts_spikes: bool = False  # the axis ends below rare values that are far larger than all others
    limit: str = ""  # config key of the guard's threshold on it


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    text: str
    figures: list[Figure]


def _figure(
    key: str, title: str, metrics: str | Mapping[str, str], note: str = "", text: str = "", **options: Any
) -> Figure:
    """Return a figure; without a text of its own it has those of its metrics in the catalogue."""
    lines = {metrics: ""} if isinstance(metrics, str) else metrics
    labels: dict[catalogue.Metric, list[str]] = {}
    for name, label in lines.items():
        if (entry := catalogue.find(name)) and not name.endswith("*"):
            labels.setdefault(entry, []).append(label)
    if not text:
        parts = [
            entry.meaning if len(names) == len(lines) else f"{' and '.join(names)}: {entry.meaning}"
            for entry, names in labels.items()
        ]
        described = "; ".join(parts)
        text = f"{described[0].upper()}{described[1:]}."
        options = {"unit": next(iter(labels)).unit.strip("-")} | options
    return Figure(key, title, f"{text} {note}".rstrip(), metrics=lines, **options)


SECTIONS = [
    Section(
        key, entry["title"], entry["text"], [_figure(name, **row) for name, row in entry["figures"].items()]
    )
    for key, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
]
