"""Every metric that a run logs: name, unit and meaning, from ``catalogue.yaml``.

``python -m scripts.document_metrics`` writes docs/metrics.md from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
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
        """Return the names with every ``{a,b}`` written out."""
        match = re.search(r"\{([^}]*)\}", self.name)
        if match is None:
            return [self.name]
        before, after = self.name[: match.start()], self.name[match.end() :]
        return [f"{before}{choice}{after}" for choice in match[1].split(",")]


@functools.cache
def sections() -> dict[str, tuple[Metric, ...]]:
    """Return the metrics of every section of the page."""
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {
        section: tuple(Metric(name, *text.split("; ", 1)) for name, text in rows.items())
        for section, rows in table.items()
    }


def metrics() -> Iterator[Metric]:
    """Yield every metric, section by section."""
    return chain.from_iterable(sections().values())


def authors_names(name: str) -> list[str]:
    """Return the CalibAdv authors' names under which the value of `name` is logged too."""
    ends = ("", "/mean", "/max", "/min")
    return [alias + end for alias, own in ALIASES.items() for end in ends if own + end == name]


@functools.cache
def find(name: str) -> Metric | None:
    """Return the entry of a logged name, the authors' names included; None if there is none."""
    for metric in metrics():
        for own in metric.names():
            pattern = ".+".join(re.escape(part) for part in re.split(r"<[^>]*>", own))
            if re.fullmatch(pattern, name) or name in authors_names(own):
                return metric
    return None
