"""Charts: figures (figures.yaml) filled with the metrics and kept trajectories of runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from calibadv_jax.contrib.report.runs import Run, Series
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.metrics import catalogue
from calibadv_jax.metrics.summary import ALIASES
from calibadv_jax.record.schema import SCHEMA

Values = dict[str, dict[int, float | None]]  # metric -> step -> value
# Points of a curve: ALL_POINTS / number of series, so that the page stays below 5 MB.
MIN_POINTS, MAX_POINTS, ALL_POINTS = 60, 360, 640
# Default of the trend: a SMOOTH_SHARE-th of the run, at most MAX_SMOOTH steps so that jumps stay visible.
SMOOTH_SHARE, MAX_SMOOTH = 10, 20
MAX_MARKS = 25  # points up to which each is marked
EVALUATED_F1 = re.compile(r"eval/(.+)/f1/(greedy|temperature_[^/]+)")  # a data source may hold slashes
PHASES = ("rollout", "advantage", "update", "record", "publish", "evaluate")
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
    metrics: Mapping[str, str]  # metric -> name of its line; a name ending in "*" stands for all that follow
    kind: Literal["lines", "stack"] = "lines"
    needs_rollouts: bool = False  # its values come from kept trajectories, not from metrics.jsonl
    from_zero: bool = True  # the axis starts at 0 where no value is negative
    cuts_spikes: bool = False  # the axis ends below rare values that are far larger than all others
    limit: str = ""  # config key of the guard's threshold on it


def _figure(
    key: str, title: str, metrics: str | Mapping[str, str], note: str = "", text: str = "", **options: Any
) -> Figure:
    """Return a figure; without a text of its own it has those of its metrics in the catalogue."""
    lines = {metrics: ""} if isinstance(metrics, str) else metrics
    if not text:
        labels: dict[catalogue.Metric, list[str]] = {}
        for name, label in lines.items():
            if (entry := catalogue.find(name)) and not name.endswith("*"):
                labels.setdefault(entry, []).append(label)
        described = "; ".join(
            entry.meaning if len(names) == len(lines) else f"{' and '.join(names)}: {entry.meaning}"
            for entry, names in labels.items()
        )
        text = f"{described[0].upper()}{described[1:]}."
        options = {"unit": next(iter(labels)).unit.strip("-")} | options
    return Figure(key, title, f"{text} {note}".rstrip(), metrics=lines, **options)


_SECTIONS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
SECTIONS = {
    key: (row["title"], row["text"], [_figure(name, **options) for name, options in row["figures"].items()])
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
    steps_per_point: int = 1

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.high > self.low))

    @property
    def is_empty(self) -> bool:
        return not np.any(np.isfinite(self.mean))


@dataclass(frozen=True)
class Panel:
    title: str  # empty where the chart has one panel
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    figure: Figure
    panels: tuple[Panel, ...]
    limit: float | None = None  # the guard's threshold, where all runs have the same one
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
    """Everything that the page draws; `smooth`: points that trends are means of, None: by their length."""

    def __init__(self, series: Sequence[Series], smooth: int | None = None):
        if smooth is None:
            longest = max(len(run.rows) for each in series for run in each.runs)
            smooth = min(MAX_SMOOTH, max(1, longest // SMOOTH_SHARE))
        self.series, self.smooth = series, smooth
        self._values = [[_values(run) for run in each.runs] for each in series]  # by series and run
        self._logged = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(self._values))))
        self._found: set[str] = set()  # keys of figures that have values
        others = {"other": ("Other metrics", "Logged, and in no figure above.", self._other_figures())}
        sections = [self._section(key, *parts) for key, parts in (SECTIONS | others).items()]
        self.sections = [section for section in sections if section.charts or section.constant]
        self.charts = [chart for section in sections for chart in section.charts]
        curves = [curve for chart in self.charts for curve in chart.curves]
        self.steps_per_point = max((curve.steps_per_point for curve in curves), default=1)

    @property
    def left_out(self) -> list[Figure]:
        """Return figures that need kept trajectories, which no run has."""
        if self.series[0].runs[0].kind == "cold start":
            return []
        return [figure for figure in FIGURES if figure.needs_rollouts and figure.key not in self._found]

    def _section(self, key: str, title: str, text: str, figures: Sequence[Figure]) -> Section:
        """Return a section's charts; those whose curves are all flat become a line of text."""
        section = Section(key, title, text, [], {})
        for chart in filter(None, map(self._chart, figures)):
            self._found.add(chart.figure.key)
            ends = np.concatenate([end for curve in chart.curves for end in (curve.low, curve.high)])
            if (ends == ends[0]).all():  # never if one is NaN
                section.constant[chart.figure.title] = float(ends[0])
            else:
                section.charts.append(chart)
        return section

    def _other_figures(self) -> list[Figure]:
        """Return a figure for each metric that no figure of FIGURES shows."""
        names = sorted(name for name in self._logged if not _has_figure(name, self._logged))
        return [Figure(_key(name), name, "", "", {name: ""}, from_zero=False) for name in names]

    def _chart(self, figure: Figure) -> Chart | None:
        lines = self._lines(figure)
        by_series = [
            [self._curve(metric, label, runs) for metric, label in lines.items()] for runs in self._values
        ]
        titles = names = [each.name if len(self.series) > 1 else "" for each in self.series]
        rows = by_series
        # A panel compares series where they are the more, else the lines of one series.
        is_by_series = len(lines) == 1 or (len(self.series) > len(lines) and figure.kind == "lines")
        if is_by_series:
            titles = list(lines.values())
            rows = [
                [replace(curves[line], name=name) for curves, name in zip(by_series, names, strict=True)]
                for line in range(len(lines))
            ]
        if len(lines) == 1 and titles[0]:
            figure, titles = replace(figure, title=f"{figure.title}: {titles[0]}"), [""]
        panels = [
            Panel(title, tuple(curves))
            for title, row in zip(titles, rows, strict=True)
            if (curves := [curve for curve in row if not curve.is_empty])
        ]
        limit, *different = {run.setting(figure.limit) for each in self.series for run in each.runs}
        limit = float(limit) if isinstance(limit, int | float) and not different else None
        return Chart(figure, tuple(panels), limit, is_by_series) if panels else None

    def _lines(self, figure: Figure) -> dict[str, str]:
        lines: dict[str, str] = {}
        for metric, label in figure.metrics.items():
            if (start := metric.removesuffix("*")) != metric:
                matching = [name for name in self._logged if name.startswith(start)]
                lines |= {name: name.removeprefix(start).replace("_", " ") for name in matching}
            elif metric in self._logged:
                lines[metric] = label
        return lines

    def _curve(self, metric: str, label: str, runs: Sequence[Values]) -> Curve:
        by_step = [values.get(metric, {}) for values in runs]
        max_points = min(MAX_POINTS, max(MIN_POINTS, ALL_POINTS // len(self.series)))
        is_sparse = max(map(len, by_step)) <= MAX_MARKS  # every point of it is marked and stands for itself
        return thin(over_seeds(label, by_step, 1 if is_sparse else self.smooth), max_points)


def _values(run: Run) -> Values:
    names = dict.fromkeys(name for row in run.rows.values() for name in row)
    values: Values = {name: run.values(name) for name in names if name not in ("step", "nonfinite")}
    values |= {"nonfinite_count": {step: len(row.get("nonfinite", [])) for step, row in run.rows.items()}}
    for name in list(values):
        if match := EVALUATED_F1.fullmatch(name):
            values[f"eval_f1/{match[1]}, {match[2].replace('_', ' ')}"] = values[name]
    return values | _phases(run, [name for name in names if _is_phase(name)]) | rollout_values(run)


def _phases(run: Run, timed: Sequence[str]) -> Values:
    """Return seconds by phase, and the rest of the step; a phase that a step did not have took 0."""
    logged = [name.removeprefix("timing_s/") for name in timed]
    phases = [name for name in dict.fromkeys((*PHASES, *logged)) if name in logged and name != "step"]
    values: Values = defaultdict(dict)
    for step, total in run.values("timing_s/step").items():
        if total is not None:
            seconds = {name: run.rows[step].get(f"timing_s/{name}") or 0.0 for name in phases}
            seconds["rest" if phases else "step"] = max(0.0, total - sum(seconds.values()))
            for name, value in seconds.items():
                values[f"phase/{name}"][step] = value
    return dict(values)


def _has_figure(name: str, logged: Sequence[str]) -> bool:
    """Whether a figure shows the metric, or another metric that it belongs to."""
    shown = [metric for figure in FIGURES for metric in figure.metrics]
    starts = [metric.removesuffix("*") for metric in shown if metric.endswith("*")]
    base, _, part = name.rpartition("/")
    is_end = part in ("max", "min") and f"{base}/mean" in logged
    is_second = name in ALIASES or base in ALIASES or name == "group/all_zero"  # all_wrong_share
    return name in shown or name.startswith((*starts, "eval/")) or _is_phase(name) or is_end or is_second


def _is_phase(name: str) -> bool:
    return name.startswith("timing_s/") and name.count("/") == 1


def _key(metric: str) -> str:
    """Return a name for an anchor and a file; different metrics have different ones."""
    return "metric_" + re.sub(r"[^\w/]", lambda mark: f"-{ord(mark[0])}-", metric).replace("/", "-")


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
    """Return at most `max_points` points, each for as many steps in a row, the last one for the rest.

    The mean is over its steps, the band from the smallest to the largest value of any run at any of them, so
    that no spike is lost.
    """
    width = -(-len(curve.steps) // max_points)
    if width <= 1:
        return curve
    points = {}
    summaries = dict.fromkeys(("steps", "mean", "trend"), np.ma.mean) | {"low": np.ma.min, "high": np.ma.max}
    for name, summary in summaries.items():
        values = getattr(curve, name)
        padded = np.pad(values, (0, -len(values) % width), constant_values=np.nan)
        points[name] = _finite(summary, padded.reshape(-1, width).T)
    return Curve(curve.name, **points, steps_per_point=width)


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
        except pa.ArrowInvalid:  # cut off
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
