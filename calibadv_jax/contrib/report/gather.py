"""Charts: figures filled with the values of runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from calibadv_jax.contrib.report.figures import SECTIONS, Figure, Section
from calibadv_jax.contrib.report.runs import Run, Series
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.metrics.summary import ALIASES
from calibadv_jax.record.schema import SCHEMA

Values = dict[str, dict[int, float | None]]  # metric -> step -> value
# Points of a curve: ALL_POINTS / number of series, so that the page stays below 5 MB.
MIN_POINTS, MAX_POINTS, ALL_POINTS = 60, 360, 640
# Default of the trend: a SMOOTH_SHARE-th of the run, at most MAX_SMOOTH steps so that jumps stay visible.
SMOOTH_SHARE, MAX_SMOOTH = 10, 20
MAX_MARKS = 25  # points up to which each is marked
# Of report_metrics, and as earlier versions named it. A data source is any text, with slashes too.
_TEMPERATURE = r"greedy|temperature_[^/]+"
EVALUATED_F1 = re.compile(
    rf"eval/(?P<source>.+)/f1/(?P<temperature>{_TEMPERATURE})|eval/(?P<first>{_TEMPERATURE})/(?P<last>.+)/f1"
)
SECOND_NAMES = (*ALIASES, "advantage/groups/tied_share")  # the last of earlier runs: it is group/tied
PHASES = ("rollout", "advantage", "update", "record", "publish", "evaluate")


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str  # empty where the chart has one panel
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    figure: Figure
    panels: tuple[Panel, ...]
    limit: float | None = None  # the guard's threshold, where all runs have the same one
    is_by_series: bool = True  # every curve is a series, and keeps its colour in all such charts


@dataclass(frozen=True)
class Options:
    """How curves are made."""

    smooth: int
    max_points: int


@dataclass(frozen=True)
class GatheredSection:
    section: Section
    charts: list[Chart]
    constant: dict[str, float]  # title of what has the same value at every step of every run


@dataclass(frozen=True)
class Gathered:
    sections: list[GatheredSection]
    left_out: list[Figure]  # they need kept trajectories, which no run has
    steps_per_point: int
    smooth: int  # points that the trends are means of


def gather(series: Sequence[Series], smooth: int | None = None) -> Gathered:
    """Everything that the page draws. Figures without a value are left out.

    Args:
        smooth: points that the trends are means of; None: a tenth of the longest run's steps, at
            most MAX_SMOOTH.
    """
    values = [[_values(run) for run in one.runs] for one in series]
    max_points = min(MAX_POINTS, max(MIN_POINTS, ALL_POINTS // len(series)))
    if smooth is None:
        longest = max(len(run.rows) for one in series for run in one.runs)
        smooth = min(MAX_SMOOTH, max(1, longest // SMOOTH_SHARE))
    options = Options(smooth, max_points)
    found = [_section(section, series, values, options) for section in SECTIONS]
    found.append(_others(series, values, options))
    drawn = {chart.figure.key for one in found for chart in one.charts}
    constant = {title for one in found for title in one.constant}
    left_out = [
        figure
        for section in SECTIONS
        for figure in section.figures
        if figure.needs_rollouts and figure.key not in drawn and figure.title not in constant
    ]
    is_training = series[0].runs[0].kind == "training run"
    panels = [panel for one in found for chart in one.charts for panel in chart.panels]
    return Gathered(
        [one for one in found if one.charts or one.constant],
        left_out if is_training else [],
        max((curve.steps_per_point for panel in panels for curve in panel.curves), default=1),
        smooth,
    )


def _section(
    section: Section, series: Sequence[Series], values: Sequence[Sequence[Values]], options: Options
) -> GatheredSection:
    """The section's charts; those whose curves are all flat become a line of text."""
    gathered = GatheredSection(section, [], {})
    for figure in section.figures:
        chart = _chart(figure, series, values, options)
        if chart is None:
            continue
        value = _constant(chart)
        if value is None:
            gathered.charts.append(chart)
        else:
            gathered.constant[chart.figure.title] = value
    return gathered


def _values(run: Run) -> Values:
    """Every metric of a run by step, with those that the report derives."""
    names = dict.fromkeys(name for row in run.rows.values() for name in row)
    values: Values = {name: run.values(name) for name in names if name not in ("step", "nonfinite")}
    values |= {"nonfinite_count": {step: len(row.get("nonfinite", [])) for step, row in run.rows.items()}}
    for name in list(values):
        if match := EVALUATED_F1.fullmatch(name):
            temperature = (match["temperature"] or match["first"]).replace("_", " ")
            values[f"eval_f1/{match['source'] or match['last']}, {temperature}"] = values[name]
    return values | _phases(run) | rollout_values(run)


def _phases(run: Run) -> Values:
    """Seconds by phase, and what is left of the step; a phase that a step did not have took 0."""
    found: Values = {}
    names = [name for name in PHASES if run.values(f"timing_s/{name}")]
    names += [
        name.removeprefix("timing_s/")
        for name in dict.fromkeys(name for row in run.rows.values() for name in row)
        if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step"
    ]
    for step, row in run.rows.items():
        total, known = row.get("timing_s/step"), 0.0
        if total is None:
            continue
        for name in dict.fromkeys(names):
            seconds = row.get(f"timing_s/{name}") or 0.0
            found.setdefault(f"phase/{name}", {})[step] = seconds
            known += seconds
        found.setdefault("phase/rest" if names else "phase/step", {})[step] = max(0.0, total - known)
    return found


def _chart(
    figure: Figure, series: Sequence[Series], values: Sequence[Sequence[Values]], options: Options
) -> Chart | None:
    lines = _lines(figure, [metric for runs in values for one in runs for metric in one])
    names = [one.name if len(series) > 1 else "" for one in series]
    by_series = [[_curve(metric, label, runs, options) for metric, label in lines.items()] for runs in values]
    limit = _limit(figure, series)
    # A panel shows what is to be compared: series where they are the more, else the lines of one series.
    is_by_series = len(lines) == 1 or (len(series) > len(lines) and figure.kind == "lines")
    if is_by_series:
        if len(lines) == 1 and (label := next(iter(lines.values()))):
            figure = replace(figure, title=f"{figure.title}: {label}")
        titles = [label if len(lines) > 1 else "" for label in lines.values()]
        named = [
            [replace(curve, name=name) for curve in one] for one, name in zip(by_series, names, strict=True)
        ]
        rows = [list(curves) for curves in zip(*named, strict=True)]
    else:
        titles, rows = names, by_series
    panels = [
        Panel(title, tuple(shown))
        for title, row in zip(titles, rows, strict=True)
        if (shown := [curve for curve in row if not curve.is_empty])
    ]
    return Chart(figure, tuple(panels), limit, is_by_series) if panels else None


def _curve(metric: str, label: str, runs: Sequence[Values], options: Options) -> Curve:
    by_step = [one.get(metric, {}) for one in runs]
    is_sparse = max(map(len, by_step)) <= MAX_MARKS  # every point of it is marked and stands for itself
    return thin(over_seeds(label, by_step, 1 if is_sparse else options.smooth), options.max_points)


def _lines(figure: Figure, logged: Sequence[str]) -> dict[str, str]:
    """Metric -> name of its line, of those that were logged."""
    lines: dict[str, str] = {}
    for metric, label in figure.metrics.items():
        if not metric.endswith("*"):
            lines |= {metric: label} if metric in logged else {}
            continue
        start = metric.removesuffix("*")
        matching = [name for name in dict.fromkeys(logged) if name.startswith(start)]
        lines |= {name: name.removeprefix(start).replace("_", " ") for name in matching}
    return lines


def _limit(figure: Figure, series: Sequence[Series]) -> float | None:
    if not figure.limit:
        return None
    limits = {run.setting(figure.limit) for one in series for run in one.runs}
    (limit,) = limits if len(limits) == 1 else (None,)
    return float(limit) if isinstance(limit, int | float) else None


def _constant(chart: Chart) -> float | None:
    """The value of a chart whose curves all have one and the same, at every step; None for others."""
    ends = [
        end for panel in chart.panels for curve in panel.curves for end in (*curve.low, *curve.high)
    ]  # NaN equals nothing, itself included
    return float(ends[0]) if all(end == ends[0] for end in ends) else None


def _others(
    series: Sequence[Series], values: Sequence[Sequence[Values]], options: Options
) -> GatheredSection:
    """What no figure shows."""
    logged = {metric for runs in values for one in runs for metric in one}
    figures = [
        Figure(_key(metric), metric, "", "", {metric: ""}, from_zero=False)
        for metric in sorted(logged - set(_shown(logged)))
    ]
    section = Section("other", "Other metrics", "Logged, and in no figure above.", figures)
    return _section(section, series, values, options)


def _shown(logged: set[str]) -> Iterator[str]:
    """Metrics of a figure, second names of metrics, ends of ranges, and what the report derived."""
    patterns = [name for section in SECTIONS for figure in section.figures for name in figure.metrics]
    starts = tuple(name.removesuffix("*") for name in patterns if name.endswith("*"))
    for name in logged:
        base, _, part = name.rpartition("/")
        is_end = part in ("max", "min") and f"{base}/mean" in logged
        is_alias = name in SECOND_NAMES or base in SECOND_NAMES
        is_phase = name.startswith("timing_s/") and name.count("/") == 1
        is_evaluation = name.startswith("eval/")
        if name in patterns or name.startswith(starts) or is_end or is_alias or is_phase or is_evaluation:
            yield name


def _key(metric: str) -> str:
    """Names an anchor and a file; different metrics have different ones."""
    codes = {"/": "-", "_": "_"}
    return "metric_" + "".join(
        letter if letter.isalnum() else codes.get(letter, f"-{ord(letter)}-") for letter in metric
    )


def state(run: Run) -> str:
    """How far a run is, in words."""
    planned = run.setting("sft.steps" if run.kind == "cold start" else "learner.steps")
    last = run.steps[-1]
    if not isinstance(planned, int):
        return f"{last} step{'s' if last > 1 else ''}"
    if last >= planned:
        return f"{last} of {planned} steps"
    return f"{last} of {planned} steps: still running, or stopped early"


def mean_of_last(values: Mapping[int, float | None]) -> float | None:
    """Mean of the last ten finite values."""
    last = [value for _, value in sorted(values.items()) if value is not None][-10:]
    return sum(last) / len(last) if last else None


@dataclass(frozen=True)
class Curve:
    """Means by step. NaN where no run has a finite value at a step that some run logged.

    All arrays have the shape [N] and are ordered by step.
    """

    name: str
    steps: np.ndarray  # float64
    mean: np.ndarray  # float64, over the runs that have the step
    low: np.ndarray  # float64, smallest of them
    high: np.ndarray  # float64, largest of them
    count: np.ndarray  # int64, how many they are
    trend: np.ndarray  # float64, moving mean of `mean`
    steps_per_point: int = 1

    @property
    def has_band(self) -> bool:
        return bool(np.any(self.high > self.low))

    @property
    def is_empty(self) -> bool:
        return not np.any(np.isfinite(self.mean))


def over_seeds(name: str, runs: Sequence[Mapping[int, float | None]], smooth: int = 1) -> Curve:
    """Mean, smallest and largest over the runs, at every step that one of them logged.

    Args:
        runs: step -> value of each run; None where the value was not finite.
        smooth: points that the trend is a mean of.
    """
    steps = sorted({step for run in runs for step in run})
    values = np.full((len(runs), len(steps)), np.nan)  # [runs, N]
    for row, run in zip(values, runs, strict=True):
        for column, step in enumerate(steps):
            value = run.get(step)
            if value is not None:
                row[column] = value
    mean, low, high, count = _spread(values, values, values)
    return Curve(name, np.array(steps, np.float64), mean, low, high, count, moving_mean(mean, smooth))


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite ones of `width` values around each, fewer at both ends; NaN stays NaN."""
    if not len(values):
        return values
    before, after = (width - 1) // 2, width // 2
    padded = np.pad(values, (before, after), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)  # [N, width]
    mean, *_ = _spread(windows.T, windows.T, windows.T)
    return np.where(np.isfinite(values), mean, np.nan)


def thin(curve: Curve, max_points: int) -> Curve:
    """At most `max_points` points: each stands for as many steps in a row, the last one for those left.

    The mean is over its steps, the band from the smallest to the largest value of any run at any of them, so
    that no spike is lost.
    """
    width = -(-len(curve.steps) // max_points)
    if width <= 1:
        return curve

    def split(values: np.ndarray) -> np.ndarray:  # [width, points], NaN at the end
        values = values.astype(np.float64)
        filled = np.pad(values, (0, -len(values) % width), constant_values=np.nan)
        return filled.reshape(-1, width).T

    mean, low, high, _ = _spread(split(curve.mean), split(curve.low), split(curve.high))
    count = np.nanmax(split(curve.count), axis=0).astype(np.int64)
    trend, *_ = _spread(*[split(curve.trend)] * 3)
    steps = np.nanmean(split(curve.steps), axis=0)
    return Curve(curve.name, steps, mean, low, high, count, trend, width)


def _spread(
    values: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum, maximum and number of the finite values of each column; NaN where there is none."""
    is_finite = np.isfinite(values)
    count = is_finite.sum(axis=0)
    total = np.where(is_finite, values, 0.0).sum(axis=0)
    mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    low = np.where(np.isfinite(lowest), lowest, np.inf).min(axis=0, initial=np.inf)
    high = np.where(np.isfinite(highest), highest, -np.inf).max(axis=0, initial=-np.inf)
    return mean, np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan), count


MAX_STEPS = 100  # read of a run, evenly spaced, the last one among them
PERCENTILES = (1, 50, 99)
OF_TURNS = ("kind", "logprobs", "learner_logprobs", "advantage_raw", "advantage")
COLUMNS = ["error", "data_source", "metrics", *(f"turns.list.element.{name}" for name in OF_TURNS)]


def rollout_values(run: Run) -> dict[str, dict[int, float | None]]:
    """Metric -> step -> value, under the names that figures.py gives them; empty where nothing was kept.

    f1/SOURCE: mean F1 of the data source.
    turn_advantage/…: mean over the search or answer turns, before and after the calibration.
    importance/pN: percentile of exp(learner's - sampler's log-probability) over sampled tokens, where the
        learner's were computed.
    """
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for step in chosen_steps(list(run.rollouts)):
        table = _read(run.rollouts[step])
        finished = table.filter(pc.is_null(table["error"]))
        turns = finished["turns"].combine_chunks().flatten()
        for name, value in (_f1(finished) | _advantages(turns) | _importance(turns)).items():
            found[name][step] = value
    return dict(found)


def chosen_steps(steps: list[int]) -> list[int]:
    """Every k-th step, counted from the last one, so that at most MAX_STEPS are read."""
    stride = max(1, -(-len(steps) // MAX_STEPS))
    return sorted(steps)[::-1][::stride][::-1]


def _read(path: Path) -> pa.Table:
    """COLUMNS; no rows where the file was cut off."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=COLUMNS)
    except pa.ArrowInvalid:
        return SCHEMA.empty_table()


def _f1(finished: pa.Table) -> dict[str, float]:
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, metrics in zip(
        finished["data_source"].to_pylist(), finished["metrics"].to_pylist(), strict=True
    ):
        if (score := dict(metrics).get("f1")) is not None:
            by_source[source].append(score)
    return {f"f1/{source}": float(np.mean(scores)) for source, scores in sorted(by_source.items())}


def _advantages(turns: pa.StructArray) -> dict[str, float]:
    """Other actions than search count as searches; turns that are neither action nor answer are left out."""
    values = {}
    kinds = turns.field("kind")
    is_action = pc.invert(pc.is_in(kinds, pa.array(NO_ACTIONS)))
    for kind, members in (("search", is_action), ("answer", pc.equal(kinds, "answer"))):
        some = turns.filter(members)
        for when, field in (("before", "advantage_raw"), ("after", "advantage")):
            mean = pc.mean(some.field(field)).as_py()
            if mean is not None:
                values[f"turn_advantage/{kind} {when}"] = mean
    return values


def _importance(turns: pa.StructArray) -> dict[str, float]:
    known = turns.filter(pc.is_valid(turns.field("learner_logprobs")))
    ours, theirs = (known.field(name).flatten().to_numpy() for name in ("learner_logprobs", "logprobs"))
    if not len(ours):
        return {}
    weights = np.exp(ours.astype(np.float64) - theirs)
    return {f"importance/p{n}": float(np.percentile(weights, n)) for n in PERCENTILES}
