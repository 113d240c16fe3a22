"""Run folders as they lie on disk, finished or not; their evaluations; and the series that they form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.config.kept import newest_start, rebase_paths, start_files
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.evaluation.report import COUNTS
from calibadv_jax.metrics.writer import read_metrics
from calibadv_jax.rollout_store.schema import kept_steps

MAX_SERIES = 8  # curves of one chart that can be told apart
IGNORED = marked(Mark.PER_RUN)  # keys that two runs of one experiment may have different
LONGEST_NAME = 22  # letters of a curve's name


@dataclass(frozen=True)
class EvaluationRow:
    """Scores of one evaluation on one group of questions."""

    title: str  # of the evaluation
    questions: str  # such as "temperature 0, all"
    confidence: float | None  # of the intervals; None: there are none
    cells: dict[str, str]  # metric -> ``0.512 [0.470, 0.554]``; counts are whole numbers


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
    if twice := [folder for folder in resolved if resolved.count(folder) > 1]:
        raise UserError(f"{twice[0]}: named twice; name every run once")
    common = os.path.commonpath([folder.parent for folder in resolved]) if resolved else ""
    return [_read(folder, str(folder.relative_to(common))) for folder in resolved]


def _read(folder: Path, name: str) -> Run:
    path, start = folder / "metrics.jsonl", newest_start(folder)
    if not path.is_file() and start is None:
        raise UserError(f"{folder}: not a run folder, it has no metrics.jsonl; give the run.dir of a run")
    # A resumed run may write a step again; the later row is the one that the policy went on from.
    rows = {row["step"]: row for row in read_metrics(path)} if path.is_file() else {}
    if not rows:
        raise UserError(f"{folder}: no metrics yet; try again when the first step has ended")
    config, identity = (start.config, start.identity) if start else ({}, {})
    evaluations = read_evaluations(folder, (config.get("evaluate") or {}).get("output"))
    rollouts = {step: path for step, path in kept_steps(folder).items() if step in rows}  # none rolled back
    rows, starts = dict(sorted(rows.items())), len(start_files(folder))
    return Run(folder, name, rows, config, identity, starts, evaluations, rollouts)


def read_evaluations(folder: Path, output: str | None) -> list[EvaluationRow]:
    """Read the evaluations of a run, `output` (evaluate.output) too; UserError if one is damaged."""
    paths = sorted(folder.glob("evaluation*.json"), reverse=True)  # evaluation_before, then evaluation_after
    if output and Path(output).is_file():
        paths.append(Path(output))
    rows: list[EvaluationRow] = []
    for path in dict.fromkeys(path.resolve() for path in paths):
        report = read_json(path)
        if "scores" in report:
            rows += _evaluation_rows(path.stem.replace("_", " "), report)
    return rows


def _evaluation_rows(title: str, report: dict[str, Any]) -> list[EvaluationRow]:
    if (method := report.get("method", "agent")) != "agent":
        title += f" ({method})"
    rows = []
    for temperature, sources in report["scores"].items():
        for source, means in sources.items():
            intervals = report["intervals"].get(temperature, {}).get(source, {})
            cells = {name: f"{mean:.0f}" if name in COUNTS else f"{mean:.3f}" for name, mean in means.items()}
            for name, (low, high) in intervals.items():
                cells[name] += f" [{low:.3f}, {high:.3f}]"
            confidence = report["confidence"] if intervals else None
            rows.append(EvaluationRow(title, f"temperature {temperature}, {source}", confidence, cells))
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


def compare(series: Sequence[Series]) -> dict[str, list[list[str]]]:
    """Return key -> the different values of each series' runs, for every key of every config."""
    configs = [[_relative(run) for run in each.runs] for each in series]
    settings = {}
    for key in dict.fromkeys(chain.from_iterable(chain.from_iterable(configs))):
        by_series = [[config.get(key, "-") for config in run_configs] for run_configs in configs]
        settings[key] = [list(dict.fromkeys(values)) for values in by_series]
    return settings


def _experiment(run: Run) -> dict[str, str]:
    """Return the settings that two runs must share to be seeds of one experiment."""
    settings = {key: text for key, text in _relative(run).items() if not among(IGNORED, key)}
    # A generated world has a seed of its own, and other questions and words with it.
    hashes = ("policy.config",) if run.setting("world.dir") else run.identity
    return settings | {name: run.identity[name] for name in hashes if name in run.identity}


def _relative(run: Run) -> dict[str, str]:
    """Return the flat config as text, paths in the run's folder written relative to it."""
    flat = flatten(rebase_paths(run.config, Path("${run.dir}")))
    return {key: _as_text(value) for key, value in flat.items()}


def _series_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Name by the key that differs if it is one, else by the folders."""
    if len(groups) == 1 and len(groups[0]) > 1:
        return [f"{len(groups[0])} runs"]
    experiments = [_experiment(runs[0]) for runs in groups]
    keys = dict.fromkeys(chain.from_iterable(experiments))
    differing = [key for key in keys if len({experiment.get(key) for experiment in experiments}) > 1]
    if len(differing) == 1:
        label = "" if differing == ["advantage.name"] else f"{differing[0].split('.')[-1]} "
        names = [f"{label}{experiment.get(differing[0], '-')}" for experiment in experiments]
        if max(map(len, names)) <= LONGEST_NAME:
            return names
    return [runs[0].name if len(runs) == 1 else f"{runs[0].name} +{len(runs) - 1}" for runs in groups]


def _as_text(value: Any) -> str:
    """Format as YAML on one line: null, true, 0.2, [a, b]."""
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
