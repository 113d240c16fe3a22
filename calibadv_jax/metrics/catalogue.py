"""Every metric that a run logs: name, unit and meaning, from ``catalogue.yaml``.

``python -m scripts.document_metrics`` writes docs/metrics.md from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from calibadv_jax.metrics.summary import ALIASES

_TABLE = Path(__file__).with_name("catalogue.yaml")


@dataclass(frozen=True)
class Metric:
    """A line of the page. In its name ``{a,b}`` stands for a and for b, ``<word>`` for any text."""

    name: str
    unit: str
    meaning: str

    def names(self) -> list[str]:
        """Return the names with ``{a,b}`` written out."""
        match = re.search(r"\{([^}]*)\}", self.name)
        if match is None:
            return [self.name]
        before = self.name[: match.start()]
        after = self.name[match.end() :]
        return [f"{before}{choice}{after}" for choice in match[1].split(",")]


@functools.cache
def sections() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics of every section of the page."""
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    metrics_by_section = {}
    for section, rows in table.items():
        section_metrics = []
        for name, text in rows.items():
            unit, meaning = text.split("; ", 1)
            section_metrics.append(Metric(name, unit, meaning))
        metrics_by_section[section] = tuple(section_metrics)
    return metrics_by_section


def metrics() -> Iterator[Metric]:
    """Yield every metric, section by section."""
    for section_metrics in sections().values():
        yield from section_metrics


def authors_names(name: str) -> list[str]:
    """Return the CalibAdv authors' names under which the value of `name` is logged too."""
    names = []
    for alias, own_name in ALIASES.items():
        for suffix in ("", "/mean", "/max", "/min"):
            if own_name + suffix == name:
                names.append(alias + suffix)
    return names


@functools.cache
def find_metric(name: str) -> Metric | None:
    """Return the entry of a logged name, the authors' names included; None if there is none."""
    for metric in metrics():
        for entry_name in metric.names():
            literals = re.split(r"<[^>]*>", entry_name)
            pattern = ".+".join(re.escape(literal) for literal in literals)
            if re.fullmatch(pattern, name) or name in authors_names(entry_name):
                return metric
    return None
