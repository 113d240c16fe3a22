"""Run folders as they lie on disk, finished or not; their evaluations; and the series that they form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.config.kept import newest_start, rebase_paths, start_files
from calibadv_jax.config.keys import is_among, keys_with_mark
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.evaluation.score_tables import COUNTS
from calibadv_jax.metrics.metrics_writer import read_metrics
from calibadv_jax.rollout_store.schema import kept_steps

MAX_SERIES = 8  # curves of one chart that can be told apart
IGNORED = keys_with_mark(Mark.PER_RUN)  # keys whose values may differ between runs of one experiment
MAX_NAMED_RUNS = 8  # runs in a folder that a message names
LONGEST_NAME = 22  # letters of a curve's name


@dataclass(frozen=True)
class EvaluationRow:
    """Scores of one evaluation on one group of questions."""

    title: str  # name of the evaluation
    method: str  # how the questions were answered (evaluate.method)
    temperature: str  # of sampling, such as "0"
    source: str  # a data source, "all" or "average"
    confidence: float | None  # coverage of the intervals; None: there are none
    means: dict[str, float]  # by metric
    intervals: dict[str, tuple[float, float]]  # by metric: its confidence interval, of those that have one

    @property
    def questions(self) -> str:
        """Which questions were answered and how, such as "temperature 0, all"."""
        return f"temperature {self.temperature}, {self.source}"

    @property
    def cells(self) -> dict[str, str]:
        """Metric -> its mean and interval, such as ``0.512 [0.470, 0.554]``; counts are whole numbers."""
        cells = {}
        for name, mean in self.means.items():
            cells[name] = f"{mean:.0f}" if name in COUNTS else f"{mean:.3f}"
        for name, (low, high) in self.intervals.items():
            cells[name] += f" [{low:.3f}, {high:.3f}]"
        return cells


@dataclass(frozen=True)
class Run:
    """Contents of one run folder; its config is that of the newest start whose files are whole."""

    folder: Path
    name: str  # the path below the folder that holds all runs of the report
    rows: dict[int, dict[str, Any]]  # step, ascending -> metric -> value; None where it was not finite
    config: dict[str, Any]  # nested as in the YAML file; empty where the folder holds none
    identity: dict[str, str]  # hashes of question file, policy config and vocabulary
    num_starts: int
    evaluations: list[EvaluationRow]
    rollouts: dict[int, Path]  # step -> file of its kept trajectories

    def values(self, metric: str) -> dict[int, float | None]:
        """Return step -> value, of the steps that logged the metric; None where it was not finite."""
        return {step: row[metric] for step, row in self.rows.items() if metric in row}

    def setting(self, key: str) -> Any:
        """Return a config value by its dotted key; None where the config lacks it."""
        return flatten(self.config).get(key)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders, in the order given; each must be a run with metrics."""
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if resolved.count(folder) > 1:
            raise UserError(f"{folder}: named twice; name every run once")
    common = os.path.commonpath([folder.parent for folder in resolved]) if resolved else ""
    return [_read(folder, str(folder.relative_to(common))) for folder in resolved]


def _read(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    start = newest_start(folder)
    if not path.is_file() and start is None:
        raise UserError(f"{folder}: not a run folder, it has no metrics.jsonl; {_advice(folder)}")
    rows: dict[int, dict[str, Any]] = {}
    if path.is_file():
        for row in read_metrics(path):
            # A resumed run may write a step again; the later row is the one that the policy went on from.
            rows[row["step"]] = row
    if not rows:
        raise UserError(f"{folder}: no metrics yet; try again when the first step has ended")
    config = start.config if start else {}
    evaluation_section = config.get("evaluate") or {}
    # Steps without metrics were rolled back.
    rollouts = {step: file for step, file in kept_steps(folder).items() if step in rows}
    return Run(
        folder,
        name,
        rows=dict(sorted(rows.items())),
        config=config,
        identity=start.identity if start else {},
        num_starts=len(start_files(folder)),
        evaluations=read_evaluations(folder, evaluation_section.get("output")),
        rollouts=rollouts,
    )


def _advice(folder: Path) -> str:
    """Say which runs lie in a folder that is none itself, or else what to give."""
    runs = []
    for metrics in sorted(folder.glob("*/metrics.jsonl")):
        run = metrics.parent
        if run.name != "sft_metrics":  # metrics of a cold start, in the folder of its run
            runs.append(str(run))
    if not runs:
        return "give the run.dir of a run"
    shown = " ".join(runs[:MAX_NAMED_RUNS])
    num_others = len(runs) - MAX_NAMED_RUNS
    if num_others > 0:
        return f"it holds some: {shown} and {num_others} more; give those that you want"
    return f"it holds some: {shown}; give those that you want"


def read_evaluations(folder: Path, output: str | None) -> list[EvaluationRow]:
    """Read the evaluations of a run.

    Args:
        folder: the run's folder.
        output: file of a further evaluation (evaluate.output), if it is there.

    Raises:
        UserError: a file is damaged.
    """
    # In reverse order evaluation_before comes before evaluation_after.
    paths = sorted(folder.glob("evaluation*.json"), reverse=True)
    if output and Path(output).is_file():
        paths.append(Path(output))
    rows: list[EvaluationRow] = []
    for path in dict.fromkeys(path.resolve() for path in paths):
        report = read_json(path)
        if "scores" in report:
            rows += _evaluation_rows(path.stem.replace("_", " "), report)
    return rows


def _evaluation_rows(title: str, report: dict[str, Any]) -> list[EvaluationRow]:
    method = report.get("method", "agent")
    if method != "agent":
        title += f" ({method})"
    rows = []
    for temperature, sources in report["scores"].items():
        for source, means in sources.items():
            intervals = report["intervals"].get(temperature, {}).get(source, {})
            rows.append(
                EvaluationRow(
                    title,
                    method=method,
                    temperature=temperature,
                    source=source,
                    confidence=report["confidence"] if intervals else None,
                    means=means,
                    intervals={name: (low, high) for name, (low, high) in intervals.items()},
                )
            )
    return rows


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seeds only: one curve."""

    name: str
    runs: tuple[Run, ...]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value; lists and empty sections count as values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def group_runs(runs: Sequence[Run]) -> list[Series]:
    """Put runs of the same config together, in the order of the first of each, named by what differs."""
    runs_by_experiment: dict[Any, list[Run]] = {}
    for run in runs:
        # A run without a config is an experiment of its own.
        experiment = frozenset(_experiment(run).items()) if run.config else run.folder
        runs_by_experiment.setdefault(experiment, []).append(run)
    groups = [tuple(members) for members in runs_by_experiment.values()]
    if len(groups) > MAX_SERIES:
        raise UserError(
            f"{len(groups)} different configs, but a chart can show {MAX_SERIES}; give fewer runs (runs that"
            " differ in run.seed only are one curve)"
        )
    return [Series(name, members) for name, members in zip(_series_names(groups), groups, strict=True)]


def compare(series: Sequence[Series]) -> dict[str, list[list[str]]]:
    """Return key -> the different values of each series' runs, for every key of every config."""
    configs_by_series = [[_relative(run) for run in group.runs] for group in series]
    keys: dict[str, None] = {}  # as an ordered set
    for configs in configs_by_series:
        for config in configs:
            keys.update(dict.fromkeys(config))
    settings: dict[str, list[list[str]]] = {}
    for key in keys:
        settings[key] = []
        for configs in configs_by_series:
            values = [config.get(key, "-") for config in configs]
            settings[key].append(list(dict.fromkeys(values)))
    return settings


def _experiment(run: Run) -> dict[str, str]:
    """Return the settings that two runs must share to be seeds of one experiment."""
    settings = {key: text for key, text in _relative(run).items() if not is_among(IGNORED, key)}
    hashes = dict(run.identity)
    if run.setting("world.dir"):
        # Each run generates a world with a seed of its own, so only the policy's shape must be the same.
        hashes = {name: value for name, value in hashes.items() if name == "policy.config"}
    return settings | hashes


def _relative(run: Run) -> dict[str, str]:
    """Return the flat config as text, paths in the run's folder written relative to it."""
    flat = flatten(rebase_paths(run.config, Path("${run.dir}")))
    return {key: _as_text(value) for key, value in flat.items()}


def _series_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Name by the key that differs if it is one, else by the folders."""
    if len(groups) == 1 and len(groups[0]) > 1:
        return [f"{len(groups[0])} runs"]
    experiments = [_experiment(runs[0]) for runs in groups]
    keys = dict.fromkeys(key for experiment in experiments for key in experiment)  # each once, in order
    differing = [key for key in keys if len({experiment.get(key) for experiment in experiments}) > 1]
    if len(differing) == 1:
        key = differing[0]
        label = "" if key == "advantage.name" else f"{key.split('.')[-1]} "
        names = [f"{label}{experiment.get(key, '-')}" for experiment in experiments]
        if max(len(name) for name in names) <= LONGEST_NAME:
            return names
    names = []
    for runs in groups:
        others = f" +{len(runs) - 1}" if len(runs) > 1 else ""
        names.append(f"{runs[0].name}{others}")
    return names


def _as_text(value: Any) -> str:
    """Format as YAML on one line: null, true, 0.2, [a, b]."""
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
