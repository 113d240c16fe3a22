"""Charts: figures (figures.yaml) filled with the metrics and kept trajectories of runs."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from calibadv_jax.contrib.report.runs import Run, Series
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.metrics import catalogue
from calibadv_jax.metrics.summary import ALIASES
from calibadv_jax.rollout_store.schema import SCHEMA

Values = dict[str, dict[int, float | None]]  # metric -> step -> value
# Points of a curve: ALL_POINTS / number of series, so that the page stays below 5 MB.
MAX_POINTS, ALL_POINTS = 360, 640
SMOOTH = 10  # steps that trends are means of, by default
MAX_MARKS = 25  # points up to which each is marked
MAX_STEPS = 100  # kept steps that are read of a run
PERCENTILES = (1, 50, 99)
_OF_TURNS = ("kind", "logprobs", "learner_logprobs", "advantage_raw", "advantage")
COLUMNS = ["error", "data_source", "metrics", *(f"turns.list.element.{name}" for name in _OF_TURNS)]


@dataclass(frozen=True)
class Figure:
    """One figure. Metrics that no run logged are left out of it, and a figure without any is left out."""

    key: str  # names its anchor and its PNG file
    title: str
    text: str  # the values and how to read them
    unit: str
    metrics: Mapping[str, str]  # metric -> name of its line; "*" stands for any text, which names the line
    from_zero: bool = True  # the axis starts at 0 where no value is negative
    cuts_spikes: bool = False  # the axis ends at twice the 95th percentile


def _figure(key: str, options: dict[str, Any]) -> Figure:
    """Return a figure of figures.yaml; text and unit that are missing there are the catalogue's."""
    metrics, note = options.pop("metrics"), options.pop("note", "")
    lines = {metrics: ""} if isinstance(metrics, str) else metrics
    if "text" not in options:
        labels: dict[catalogue.Metric, list[str]] = defaultdict(list)
        for name, label in lines.items():
            if entry := catalogue.find(name):
                labels[entry].append(label)
        meanings = [f"{' and '.join(names)}: {entry.meaning}" for entry, names in labels.items()]
        text = "; ".join(meanings) if len(labels) > 1 else next(iter(labels)).meaning
        unit = next(iter(labels)).unit.strip("-")
        options = {"unit": unit, "text": f"{text[0].upper()}{text[1:]}."} | options
    options["text"] = f"{options['text']} {note}".rstrip()
    return Figure(key, metrics=lines, **options)


_SECTIONS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
SECTIONS = {
    key: (row["title"], row["text"], [_figure(name, values) for name, values in row["figures"].items()])
    for key, row in _SECTIONS.items()
}
FIGURES = [figure for _, _, figures in SECTIONS.values() for figure in figures]


@dataclass(frozen=True)
class Curve:
    """Values by step; NaN where no run had a finite one. Every array has one element a point, [N]."""

    name: str
    steps: np.ndarray  # float64
    mean: np.ndarray  # float64, over the runs that have the step
    low: np.ndarray  # float64, smallest of them
    high: np.ndarray  # float64, largest of them
    trend: np.ndarray  # float64, moving mean of `mean`

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.high > self.low))


@dataclass(frozen=True)
class Panel:
    title: str  # empty where the chart has one panel
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    figure: Figure
    panels: tuple[Panel, ...]
    is_by_series: bool = True  # every curve is a series, and keeps its colour in all such charts

    @property
    def curves(self) -> list[Curve]:
        return [curve for panel in self.panels for curve in panel.curves]


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    text: str
    charts: list[Chart]
    constant: dict[str, float]  # title of a figure with the same value at every step of every run


class Gathered:
    """Everything that the page draws; trends are means of `smooth` steps."""

    def __init__(self, series: Sequence[Series], smooth: int = SMOOTH):
        self.series, self.smooth = series, smooth
        self._values = [[_values(run) for run in each.runs] for each in series]  # by series and run
        self._logged = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(self._values))))
        others = {"other": ("Other metrics", "Logged, and in no figure above.", self._other_figures())}
        sections = [self._section(key, *parts) for key, parts in (SECTIONS | others).items()]
        self.sections = [section for section in sections if section.charts or section.constant]
        self.charts = [chart for section in sections for chart in section.charts]

    def _section(self, key: str, title: str, text: str, figures: Sequence[Figure]) -> Section:
        """Return a section's charts; those whose curves are all flat become a line of text."""
        section = Section(key, title, text, [], {})
        for chart in filter(None, map(self._chart, figures)):
            ends = np.concatenate([end for curve in chart.curves for end in (curve.low, curve.high)])
            if (ends == ends[0]).all():  # never if one is NaN
                section.constant[chart.figure.title] = float(ends[0])
            else:
                section.charts.append(chart)
        return section

    def _other_figures(self) -> list[Figure]:
        """Return a figure for each metric that no figure of FIGURES shows."""
        figures = []
        for name in sorted(name for name in self._logged if not _has_figure(name, self._logged)):
            # Different metrics have different keys, which name anchors and files.
            key = "metric_" + re.sub(r"[^\w/]", lambda mark: f"-{ord(mark[0])}-", name).replace("/", "-")
            figures.append(Figure(key, name, "", "", {glob.escape(name): ""}, from_zero=False))
        return figures

    def _chart(self, figure: Figure) -> Chart | None:
        lines = self._lines(figure)
        if len(lines) == 1:
            ((metric, label),) = lines.items()
            figure = replace(figure, title=f"{figure.title}: {label}" if label else figure.title)
            lines = {metric: ""}
        # A panel compares series where they are the more, else the lines of one series.
        is_by_series = len(lines) == 1 or len(self.series) > len(lines)
        panels: dict[str, list[Curve]] = {}
        for series, runs in zip(self.series, self._values, strict=True):
            name = series.name if len(self.series) > 1 else ""
            for metric, label in lines.items():
                curve = self._curve(metric, name if is_by_series else label, runs)
                if np.isfinite(curve.mean).any():
                    panels.setdefault(label if is_by_series else name, []).append(curve)
        drawn = tuple(Panel(title, tuple(curves)) for title, curves in panels.items())
        return Chart(figure, drawn, is_by_series) if drawn else None

    def _lines(self, figure: Figure) -> dict[str, str]:
        lines: dict[str, str] = {}
        for metric, label in figure.metrics.items():
            for name in fnmatch.filter(self._logged, metric):
                start, star, _ = metric.partition("*")
                lines[name] = name.removeprefix(start).replace("_", " ") if star else label
        return lines

    def _curve(self, metric: str, name: str, runs: Sequence[Values]) -> Curve:
        by_step = [values.get(metric, {}) for values in runs]
        is_sparse = max(map(len, by_step)) <= MAX_MARKS  # every point of it is marked and stands for itself
        curve = over_seeds(name, by_step, 1 if is_sparse else self.smooth)
        return thin(curve, min(MAX_POINTS, ALL_POINTS // len(self.series)))


def _values(run: Run) -> Values:
    names = dict.fromkeys(name for row in run.rows.values() for name in row)
    values: Values = {name: run.values(name) for name in names if name not in ("step", "nonfinite")}
    values["nonfinite_count"] = {step: len(row.get("nonfinite", [])) for step, row in run.rows.items()}
    return values | rollout_values(run)


def _has_figure(name: str, logged: Sequence[str]) -> bool:
    """Whether a figure shows the metric, its mean, or the same value under another name."""
    base, _, part = name.rpartition("/")
    is_end = part in ("max", "min") and f"{base}/mean" in logged
    is_alias = name in ALIASES or base in ALIASES
    patterns = ["eval/*", *chain.from_iterable(figure.metrics for figure in FIGURES)]
    return is_end or is_alias or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def over_seeds(name: str, runs: Sequence[Mapping[int, float | None]], smooth: int = 1) -> Curve:
    """Return mean, smallest and largest over the runs at every logged step; None: was not finite."""
    steps = sorted({step for run in runs for step in run})
    values = np.array([[run.get(step) for step in steps] for run in runs], np.float64)  # None: NaN
    mean, low, high = (_finite(summary, values) for summary in (np.ma.mean, np.ma.min, np.ma.max))
    return Curve(name, np.array(steps, np.float64), mean, low, high, moving_mean(mean, smooth))


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the finite values among `width` around each, fewer at both ends; NaN stays NaN."""
    if not len(values):
        return values
    padded = np.pad(values, ((width - 1) // 2, width // 2), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width).T  # [width, N]
    return np.where(np.isfinite(values), _finite(np.ma.mean, windows), np.nan)


def thin(curve: Curve, max_points: int) -> Curve:
    """Return at most `max_points` points: means of as many steps each, with a band of all their values."""
    width = max(1, -(-len(curve.steps) // max_points))
    points = {}
    summaries = dict.fromkeys(("steps", "mean", "trend"), np.ma.mean) | {"low": np.ma.min, "high": np.ma.max}
    for name, summary in summaries.items():
        values = getattr(curve, name)
        padded = np.pad(values, (0, -len(values) % width), constant_values=np.nan)
        points[name] = _finite(summary, padded.reshape(-1, width).T)
    return Curve(curve.name, **points)


def _finite(summary: Any, values: np.ndarray) -> np.ndarray:
    """Summarise each column's finite values; NaN where there is none."""
    return summary(np.ma.masked_invalid(values), axis=0).filled(np.nan)


def rollout_values(run: Run) -> Values:
    """Return values from kept trajectories, under the names of figures.yaml; empty where nothing was kept."""
    values: Values = defaultdict(dict)
    for step in chosen_steps(list(run.rollouts)):
        try:
            with pq.ParquetFile(run.rollouts[step]) as file:
                table = file.read(columns=COLUMNS)
        except (pa.ArrowInvalid, OSError):  # cut off, damaged, or removed by a run in progress
            table = SCHEMA.empty_table()
        finished = table.filter(pc.is_null(table["error"]))
        turns = finished["turns"].combine_chunks().flatten()
        for name, value in (_f1(finished) | _advantages(turns) | _importance(turns)).items():
            values[name][step] = value
    return dict(values)


def chosen_steps(steps: list[int]) -> list[int]:
    """Return every k-th step, counted from the last one, so that at most MAX_STEPS are read."""
    stride = max(1, -(-len(steps) // MAX_STEPS))
    return sorted(steps)[::-1][::stride][::-1]


def _f1(finished: pa.Table) -> dict[str, float]:
    """Return ``f1/SOURCE``: mean F1 of the data source."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in finished.select(["data_source", "metrics"]).to_pylist():
        by_source[row["data_source"]] += [score for name, score in row["metrics"] if name == "f1"]
    return {f"f1/{source}": float(np.mean(scores)) for source, scores in sorted(by_source.items()) if scores}


def _advantages(turns: pa.StructArray) -> dict[str, float]:
    """Return ``turn_advantage/…``: means over the answer turns, and over search turns (any action is one)."""
    kinds, values = turns.field("kind"), {}
    is_action = pc.invert(pc.is_in(kinds, pa.array(NO_ACTIONS)))
    for kind, members in (("search", is_action), ("answer", pc.equal(kinds, "answer"))):
        for when, field in (("before", "advantage_raw"), ("after", "advantage")):
            mean = pc.mean(turns.filter(members).field(field)).as_py()
            if mean is not None:
                values[f"turn_advantage/{kind} {when}"] = mean
    return values


def _importance(turns: pa.StructArray) -> dict[str, float]:
    """Return ``importance/pN``: percentiles of exp(learner's - sampler's log-probability), where computed."""
    scored = turns.filter(pc.is_valid(turns.field("learner_logprobs")))
    learner, sampler = (scored.field(name).flatten().to_numpy() for name in ("learner_logprobs", "logprobs"))
    weights = np.exp(learner.astype(np.float64) - sampler)
    return {f"importance/p{n}": float(np.percentile(weights, n)) for n in PERCENTILES if len(weights)}
