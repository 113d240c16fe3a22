"""Run folders as they lie on disk, finished or not; their evaluations; and the series that they form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from calibadv_jax.config.kept import newest_start, rebase_paths, start_files
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.evaluation.report import COUNTS
from calibadv_jax.metrics.writer import read_metrics
from calibadv_jax.record.schema import kept_steps

Kind = Literal["training run", "cold start"]
TITLES = {"evaluation_before": "Before training", "evaluation_after": "After training"}
TITLES |= {"evaluation": "Evaluation"}
MAX_SERIES = 8  # curves of one chart that can be told apart
IGNORED = marked(Mark.PER_RUN)  # keys that two runs of one experiment may have different
LONGEST_NAME = 22  # letters of a curve's name


@dataclass(frozen=True)
class EvaluationTable:
    title: str
    rows: dict[str, dict[str, str]]  # questions, such as "temperature 0, all" -> metric -> cell
    confidence: float | None  # of the intervals; None: there are none

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for cells in self.rows.values() for name in cells))


@dataclass(frozen=True)
class Run:
    """Contents of one run folder; its config is that of the newest start whose files are whole."""

    folder: Path
    name: str  # the shortest end of the path that no other run of the report has
    kind: Kind
    rows: dict[int, dict[str, Any]]  # step, ascending -> metric -> value; None where it was not finite
    config: dict[str, Any]  # nested as in the YAML file; empty where the folder holds none
    identity: dict[str, str]  # hashes of question file, policy config and vocabulary
    num_starts: int
    evaluations: list[EvaluationTable]
    rollouts: dict[int, Path]  # step -> file of its kept trajectories

    @property
    def steps(self) -> list[int]:
        return list(self.rows)

    def values(self, metric: str) -> dict[int, float | None]:
        """Return step -> value, of the steps that logged the metric; None where it was not finite."""
        return {step: row[metric] for step, row in self.rows.items() if metric in row}

    def setting(self, key: str) -> Any:
        """Return a config value by its dotted key; None where the config lacks it."""
        return flatten(self.config).get(key)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders, in the order given; each must be a run with metrics, all of one kind."""
    resolved = [folder.resolve() for folder in folders]
    if twice := [folder for folder in resolved if resolved.count(folder) > 1]:
        raise UserError(f"{twice[0]}: named twice; name every run once")
    first, *_ = runs = [_read(folder, _shortest_name(folder, resolved)) for folder in resolved]
    for run in runs:
        if run.kind != first.kind:
            kinds = f"{run.folder} is a {run.kind} and {first.folder} a {first.kind}"
            raise UserError(f"{kinds}; make a report of each")
    return runs


def _shortest_name(folder: Path, folders: Sequence[Path]) -> str:
    length = 1
    while [other.parts[-length:] for other in folders].count(folder.parts[-length:]) > 1:
        length += 1
    return str(Path(*folder.parts[-length:]))


def _read(folder: Path, name: str) -> Run:
    path, start = folder / "metrics.jsonl", newest_start(folder)
    if not path.is_file() and start is None:
        within = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        runs = [str(path) for path in within if path.name != "sft_metrics"][:8]
        hint = f"it holds some: {' '.join(runs)}" if runs else "give the run.dir of a training run"
        raise UserError(f"{folder}: not a run folder, it has no metrics.jsonl; {hint}")
    # A resumed run may write a step again; the later row is the one that the policy went on from.
    rows = {row["step"]: row for row in read_metrics(path)} if path.is_file() else {}
    if not rows:
        raise UserError(f"{folder}: no metrics yet; try again when the first step has ended")
    config, identity = (start.config, start.identity) if start else ({}, {})
    kind: Kind = "cold start" if any("sft/loss" in row for row in rows.values()) else "training run"
    evaluations = read_evaluations(folder, (config.get("evaluate") or {}).get("output"))
    rollouts = {step: path for step, path in kept_steps(folder).items() if step in rows}  # none rolled back
    rows, starts = dict(sorted(rows.items())), len(start_files(folder))
    return Run(folder, name, kind, rows, config, identity, starts, evaluations, rollouts)


def read_evaluations(folder: Path, output: str | None) -> list[EvaluationTable]:
    """Read the evaluations of a run, `output` (evaluate.output) too; half-written files are left out."""
    paths = sorted(folder.glob("evaluation*.json"))
    paths.sort(key=lambda path: [*TITLES, path.stem].index(path.stem))  # the others follow alphabetically
    if output and Path(output).is_file() and Path(output).resolve() not in [path.resolve() for path in paths]:
        paths.append(Path(output))
    reports = {path: read_json(path) or {} for path in paths}
    return [_evaluation_table(path, report) for path, report in reports.items() if "scores" in report]


def read_json(path: Path) -> Any:
    """Return the content; None where the file is missing or cut off: another program may be writing it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _evaluation_table(path: Path, report: dict[str, Any]) -> EvaluationTable:
    intervals, rows = report["intervals"], {}
    for temperature, sources in report["scores"].items():
        for source, means in sources.items():
            ends = intervals.get(temperature, {}).get(source, {})
            cells = {name: _cell(name, mean, ends.get(name)) for name, mean in means.items()}
            rows[f"temperature {temperature}, {source}"] = cells
    title = TITLES.get(path.stem, path.stem.replace("_", " "))
    if (method := report.get("method", "agent")) != "agent":
        title += f" ({method})"
    return EvaluationTable(title, rows, report["confidence"] if any(intervals.values()) else None)


def _cell(metric: str, mean: float, interval: Sequence[float] | None) -> str:
    """Format as ``0.512 [0.470, 0.554]``; counts as whole numbers."""
    text = f"{mean:.0f}" if metric in COUNTS else f"{mean:.3f}"
    return f"{text} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else text


def one_metric(
    tables: Sequence[tuple[str, EvaluationTable]], metric: str
) -> tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]:
    """Return a metric of all (run, table): (run, title) of columns, and (questions, cells) of rows."""
    columns = [(run, table) for run, table in tables if metric in table.metrics]
    names = dict.fromkeys(name for _, table in columns for name in table.rows)
    rows = [(name, [table.rows.get(name, {}).get(metric, "-") for _, table in columns]) for name in names]
    return [(run, table.title) for run, table in columns], rows


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seeds only: one curve."""

    name: str
    runs: tuple[Run, ...]

    @property
    def last_step(self) -> int:
        return max(run.steps[-1] for run in self.runs)

    @property
    def seeds(self) -> str:
        seeds = [run.setting("run.seed") for run in self.runs]
        return ", ".join("?" if seed is None else str(seed) for seed in seeds)


@dataclass(frozen=True)
class Setting:
    key: str
    values: tuple[str, ...]  # one a series; more than one value of its runs are joined by " | "
    is_different: bool


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value; lists and empty sections count as values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat


def group_runs(runs: Sequence[Run]) -> list[Series]:
    """Put runs of the same config together, in the order of the first of each, named by what differs."""
    members: dict[Any, list[Run]] = {}
    for run in runs:
        members.setdefault(frozenset(_experiment(run).items()) if run.config else run.folder, []).append(run)
    groups = [tuple(group) for group in members.values()]
    if len(groups) > MAX_SERIES:
        advice = "give fewer runs (runs that differ in run.seed only are one curve)"
        raise UserError(f"{len(groups)} different configs, but a chart can show {MAX_SERIES}; {advice}")
    return list(map(Series, _series_names(groups), groups))


def compare(series: Sequence[Series]) -> list[Setting]:
    """Return every key of every config with its value in each series, in the order of the configs."""
    flat = [[_relative(run) for run in each.runs] for each in series]
    rows = []
    for key in dict.fromkeys(key for configs in flat for config in configs for key in config):
        texts = [[config.get(key, "-") for config in configs] for configs in flat]
        values = tuple(" | ".join(dict.fromkeys(own)) for own in texts)
        rows.append(Setting(key, values, len({text for own in texts for text in own}) > 1))
    return rows


def _experiment(run: Run) -> dict[str, str]:
    """Return the settings that two runs must share to be seeds of one experiment."""
    settings = {key: text for key, text in _relative(run).items() if not among(IGNORED, key)}
    # A generated world has a seed of its own, and other questions and words with it.
    own = ("policy.config",) if run.setting("world.dir") else run.identity
    return settings | {name: run.identity[name] for name in own if name in run.identity}


def _relative(run: Run) -> dict[str, str]:
    """Return the flat config as text, paths in the run's folder written relative to it."""
    flat = flatten(rebase_paths(run.config, Path("${run.dir}")))
    folder = run.setting("run.dir")
    return {key: _as_text(value) for key, value in flat.items()} | ({"run.dir": folder} if folder else {})


def _series_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Name by the value of the one key that differs, by keys and values of two, else by the folders."""
    first = groups[0]
    if len(groups) == 1 and len(first) == 1:
        return [str(Path(*first[0].folder.parts[-2:]))]
    if len(groups) == 1:
        seeds = {(run.setting("run.seed"), run.setting("world.seed")) for run in first}
        return [f"{len(first)} {'seeds' if len(seeds) == len(first) else 'runs'}"]
    experiments = [_experiment(runs[0]) for runs in groups]
    keys = dict.fromkeys(key for experiment in experiments for key in experiment)
    differing = [key for key in keys if len({experiment.get(key) for experiment in experiments}) > 1]
    if all(experiments) and 1 <= len(differing) <= 2:
        labels = {
            key: "" if differing == ["advantage.name"] else f"{key.split('.')[-1]} " for key in differing
        }
        names = [
            ", ".join(label + experiment.get(key, "-") for key, label in labels.items())
            for experiment in experiments
        ]
        if len(set(names)) == len(names) and max(map(len, names)) <= LONGEST_NAME:
            return names
    return [runs[0].name if len(runs) == 1 else f"{runs[0].name} +{len(runs) - 1}" for runs in groups]


def _as_text(value: Any) -> str:
    """Format as YAML on one line: null, true, 0.2, [a, b]."""
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
