"""Charts: the figures of figures.py filled with the metrics and kept trajectories of runs."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.contrib.report.curves import Curve, over_seeds, thin
from calibadv_jax.contrib.report.figures import FIGURES, SECTIONS, Figure, FigureSection
from calibadv_jax.contrib.report.runs import Run, Series
from calibadv_jax.contrib.report.trajectories import Values, rollout_values
from calibadv_jax.metrics.summary import ALIASES

# A curve has at most MAX_POINTS points, and fewer if there are many series: the page stays below 5 MB.
MAX_POINTS = 360
ALL_POINTS = 640  # points of the curves of all series together
SMOOTH = 10  # steps that trends are means of, by default
MAX_MARKS = 25  # a curve with at most so many points has a mark at each


@dataclass(frozen=True)
class Panel:
    """Curves that share axes."""

    title: str  # empty where the chart has one panel
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    """A figure filled with curves."""

    figure: Figure
    panels: tuple[Panel, ...]
    is_by_series: bool = True  # every curve is a series, and keeps its colour in all such charts

    @property
    def curves(self) -> list[Curve]:
        """The curves of all panels."""
        return [curve for panel in self.panels for curve in panel.curves]


@dataclass(frozen=True)
class Section:
    """Charts under a common heading."""

    key: str
    title: str
    text: str
    charts: list[Chart]
    # Title of a figure whose value is the same at every step of every run -> that value.
    constant: dict[str, float]


class Gathered:
    """Everything that the page draws.

    Args:
        series: the runs, by curve.
        smooth: steps that the trends are means of.

    Attributes:
        sections: sections with a chart or a constant.
        charts: the charts of all sections.
        left_out: titles of the figures of a training run that need kept trajectories, and have no values.
    """

    def __init__(self, series: Sequence[Series], smooth: int = SMOOTH):
        self.series = series
        self.smooth = smooth
        self._values = [[_values(run) for run in group.runs] for group in series]  # by series and run
        self._logged = self._logged_metrics()
        other = FigureSection("Other metrics", "Logged, and in no figure above.", self._other_figures())
        sections = [self._section(key, section) for key, section in (SECTIONS | {"other": other}).items()]
        self.sections = [section for section in sections if section.charts or section.constant]
        self.charts = [chart for section in sections for chart in section.charts]
        self.left_out = self._left_out_titles()

    def _logged_metrics(self) -> list[str]:
        """Return the metrics of all runs, each once."""
        names: dict[str, None] = {}  # as an ordered set
        for runs in self._values:
            for values in runs:
                names.update(dict.fromkeys(values))
        return list(names)

    def _left_out_titles(self) -> list[str]:
        """Return the titles of figures without values, whose values come from kept trajectories.

        The list is empty where all runs are cold starts, which keep none.
        """
        if "reward/mean" not in self._logged:
            return []
        titles = []
        for figure in FIGURES:
            if figure.needs_rollouts and not self._lines(figure):
                titles.append(figure.title)
        return titles

    def _section(self, key: str, section: FigureSection) -> Section:
        """Return a section's charts; those whose curves are all flat become a line of text."""
        filled = Section(key, section.title, section.text, [], {})
        for figure in section.figures:
            chart = self._chart(figure)
            if chart is None:
                continue
            bounds = np.concatenate([bound for curve in chart.curves for bound in (curve.low, curve.high)])
            is_constant = bool((bounds == bounds[0]).all())  # never with a NaN, which equals nothing
            if is_constant:
                filled.constant[chart.figure.title] = float(bounds[0])
            else:
                filled.charts.append(chart)
        return filled

    def _other_figures(self) -> tuple[Figure, ...]:
        """Return a figure for each metric that no figure of FIGURES shows."""
        names = [name for name in self._logged if not _has_figure(name, self._logged)]
        figures = []
        for name in sorted(names):
            # Other marks become "-CODE-", so that different metrics have different keys.
            escaped = re.sub(r"[^\w/]", lambda mark: f"-{ord(mark[0])}-", name)
            key = "metric_" + escaped.replace("/", "-")
            figures.append(Figure(key, name, "", "", {glob.escape(name): ""}, from_zero=False))
        return tuple(figures)

    def _chart(self, figure: Figure) -> Chart | None:
        """Return the figure with its curves; None where no run has a finite value."""
        lines = self._lines(figure)
        if len(lines) == 1:
            ((metric, label),) = lines.items()
            if label:
                figure = replace(figure, title=f"{figure.title}: {label}")
            lines = {metric: ""}
        # A panel compares the series if they are more than the lines, or else the lines of one series.
        is_by_series = len(lines) == 1 or len(self.series) > len(lines)
        curves_by_panel: dict[str, list[Curve]] = {}
        for series, runs in zip(self.series, self._values, strict=True):
            series_name = series.name if len(self.series) > 1 else ""
            for metric, label in lines.items():
                if is_by_series:
                    panel_title = label
                    curve_name = series_name
                else:
                    panel_title = series_name
                    curve_name = label
                curve = self._curve(metric, curve_name, runs)
                if np.isfinite(curve.mean).any():
                    curves_by_panel.setdefault(panel_title, []).append(curve)
        if not curves_by_panel:
            return None
        panels = tuple(Panel(title, tuple(curves)) for title, curves in curves_by_panel.items())
        return Chart(figure, panels, is_by_series)

    def _lines(self, figure: Figure) -> dict[str, str]:
        """Return the logged metrics of a figure, each with the name of its line."""
        lines: dict[str, str] = {}
        for pattern, label in figure.metrics.items():
            prefix, star, _ = pattern.partition("*")
            for name in fnmatch.filter(self._logged, pattern):
                if star:
                    lines[name] = name.removeprefix(prefix).replace("_", " ")
                else:
                    lines[name] = label
        return lines

    def _curve(self, metric: str, name: str, runs: Sequence[Values]) -> Curve:
        """Return the curve of a metric over the runs of one series."""
        values_by_run = [values.get(metric, {}) for values in runs]
        most_points = max(len(values) for values in values_by_run)
        # Every point of a short curve has a mark and stands for itself.
        smooth = 1 if most_points <= MAX_MARKS else self.smooth
        curve = over_seeds(name, values_by_run, smooth)
        return thin(curve, min(MAX_POINTS, ALL_POINTS // len(self.series)))


def _values(run: Run) -> Values:
    """Return every value of a run: logged ones, and those of its kept trajectories."""
    names = dict.fromkeys(name for row in run.rows.values() for name in row)  # each once, in order
    values: Values = {}
    for name in names:
        if name not in ("step", "nonfinite"):
            values[name] = run.values(name)
    values["nonfinite_count"] = {step: len(row.get("nonfinite", [])) for step, row in run.rows.items()}
    values.update(rollout_values(run))
    return values


def _has_figure(name: str, logged: Sequence[str]) -> bool:
    """Return whether a figure shows the metric, its mean, or the same value under another name."""
    base, _, part = name.rpartition("/")
    is_extreme = part in ("max", "min") and f"{base}/mean" in logged
    is_alias = name in ALIASES or base in ALIASES
    patterns = ["eval/*"]
    for figure in FIGURES:
        patterns += figure.metrics
    return is_extreme or is_alias or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
