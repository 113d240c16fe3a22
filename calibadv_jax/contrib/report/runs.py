"""Run folders, their evaluations, and the series that they form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.config.starts import newest_start, start_files
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.writer import read_metrics
from calibadv_jax.record.schema import kept_steps

Kind = Literal["training run", "cold start"]


@dataclass(frozen=True)
class Run:
    """What one run folder holds.

    Every start of a run leaves a config; that of the newest start whose files are whole counts.
    """

    folder: Path
    name: str  # the shortest end of the path that no other run of the report has
    kind: Kind
    rows: dict[int, dict[str, Any]]  # step -> metric -> value; None where it was not finite
    config: dict[str, Any]  # nested as in the YAML file; empty where the folder holds none
    identity: dict[str, str]  # hashes of question file, policy config and vocabulary
    num_starts: int
    evaluations: list[Table]
    rollouts: dict[int, Path]  # step -> file of its kept trajectories

    @property
    def steps(self) -> list[int]:
        return sorted(self.rows)

    def values(self, metric: str) -> dict[int, float | None]:
        """step -> value, of the steps that logged the metric; None where it was not finite."""
        return {step: self.rows[step][metric] for step in self.steps if metric in self.rows[step]}

    def setting(self, key: str) -> Any:
        """A config value by its dotted key; None where the config lacks it."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the folders, in the order given.

    Raises:
        UserError: one is no run folder, has no metrics yet, is named twice, or is another kind of run.
    """
    resolved = [folder.resolve() for folder in folders]
    twice = next((folder for folder in resolved if resolved.count(folder) > 1), None)
    if twice is not None:
        raise UserError(f"{twice}: named twice; name every run once")
    names = _names(resolved)
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    for run in runs:
        if run.kind != runs[0].kind:
            raise UserError(
                f"{run.folder} is a {run.kind} and {runs[0].folder} a {runs[0].kind}; make a report of each"
            )
    return runs


def _read(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    start = newest_start(folder)
    if not path.is_file() and start is None:
        raise UserError(f"{folder}: not a run folder, it has no metrics.jsonl; {_hint(folder)}")
    # A resumed run may write a step again; the later row is the one that the policy went on from.
    rows = {row["step"]: row for row in read_metrics(path)} if path.is_file() else {}
    if not rows:
        raise UserError(f"{folder}: no metrics yet; try again when the first step has ended")
    config = start.config if start else {}
    output = (config.get("evaluate") or {}).get("output")
    return Run(
        folder,
        name,
        "cold start" if any("sft/loss" in row for row in rows.values()) else "training run",
        rows,
        config,
        start.identity if start else {},
        len(start_files(folder)),
        read_evaluations(folder, output),
        {step: path for step, path in kept_steps(folder).items() if step in rows},  # not those rolled back
    )


def _hint(folder: Path) -> str:
    within = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    within = [path for path in within if path.name != "sft_metrics"]
    if within:
        return "it holds some: " + " ".join(str(path) for path in within[:8])
    return "give the run.dir of a training run"


def _names(folders: Sequence[Path]) -> list[str]:
    names = []
    for folder in folders:
        others = [other.parts for other in folders if other != folder]
        length = 1
        while any(parts[-length:] == folder.parts[-length:] for parts in others):
            length += 1
        names.append(os.path.join(*folder.parts[-length:]))
    return names


COUNTS = ("questions", "trajectories", "failed")
TITLES = {
    "evaluation": "Evaluation",
    "evaluation_before": "Before training",
    "evaluation_after": "After training",
}


@dataclass(frozen=True)
class Score:
    mean: float
    low: float | None = None  # ends of the interval, where the evaluation made one
    high: float | None = None


@dataclass(frozen=True)
class Table:
    """Scores of one evaluation."""

    title: str
    rows: dict[str, dict[str, Score]]  # questions, such as "temperature 0, all" -> metric -> score
    confidence: float | None = None  # of the intervals

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for scores in self.rows.values() for name in scores))


def read_evaluations(folder: Path, output: str | None) -> list[Table]:
    """What evaluations and the quickstart left in a run's folder; half-written files are left out.

    Args:
        output: evaluate.output of the run, which may lie elsewhere or have another name.
    """
    paths = sorted(folder.glob("evaluation*.json"), key=lambda path: _order(path.stem))
    if output and Path(output).is_file() and Path(output).resolve() not in [path.resolve() for path in paths]:
        paths.append(Path(output))
    found = [table for path in paths if (table := _table(_title(path.stem), read_json(path)))]
    quickstart = read_json(folder / "quickstart.json")
    if isinstance(quickstart, dict):
        for name in ("before", "after"):
            title = TITLES[f"evaluation_{name}"]
            table = _table(title, quickstart.get(name))
            if table and not any(one.title == title for one in found):
                found.append(table)
    return found


def in_one(
    tables: Sequence[tuple[str, Table]], metric: str
) -> tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]:
    """One metric of all tables: (run, title) of the columns, and (questions, cells) of the rows.

    Args:
        tables: each with the name of its run.
    """
    some = [(run, table) for run, table in tables if metric in table.metrics]
    names = dict.fromkeys(name for _, table in some for name in table.rows)
    rows = [
        (name, [cell(metric, table.rows.get(name, {}).get(metric)) for _, table in some]) for name in names
    ]
    return [(run, table.title) for run, table in some], rows


def cell(metric: str, score: Score | None) -> str:
    """``0.512 [0.470, 0.554]``; counts as whole numbers; ``-`` for what was not measured."""
    if score is None:
        return "-"
    mean = f"{score.mean:.0f}" if metric in COUNTS else f"{score.mean:.3f}"
    return mean if score.low is None else f"{mean} [{score.low:.3f}, {score.high:.3f}]"


def read_json(path: Path) -> Any:
    """None where the file is missing or cut off: another program may be writing it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _table(title: str, report: Any) -> Table | None:
    """Of temperature -> data source -> metric -> mean, alone or under "scores" beside "intervals"."""
    if not isinstance(report, dict):
        return None
    means = report.get("scores", report)
    intervals = report.get("intervals", {})
    method = report.get("method", "agent")
    rows = {
        f"temperature {temperature}, {source}": _scores(
            scores, intervals.get(temperature, {}).get(source, {})
        )
        for temperature, sources in means.items()
        for source, scores in sources.items()
    }
    named = title if method == "agent" else f"{title} ({method})"
    return Table(named, rows, report.get("confidence") if intervals else None) if rows else None


def _scores(means: Mapping[str, float], intervals: Mapping[str, Sequence[float]]) -> dict[str, Score]:
    return {name: Score(mean, *intervals.get(name, (None, None))) for name, mean in means.items()}


def _title(stem: str) -> str:
    return TITLES.get(stem, stem.replace("_", " "))


def _order(stem: str) -> tuple[int, str]:
    """Before and after the training first, then in the order of the alphabet."""
    known = ("evaluation_before", "evaluation_after")
    return (known.index(stem) if stem in known else len(known), stem)


MAX_SERIES = 8  # curves of one chart that can be told apart
IGNORED = marked(Mark.PER_RUN)  # what two runs of one experiment may have different
LONGEST_NAME = 22  # letters of a curve's name


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seeds only: one curve."""

    name: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> str:
        found = [run.setting("run.seed") for run in self.runs]
        return ", ".join("?" if seed is None else str(seed) for seed in found)


@dataclass(frozen=True)
class Setting:
    """A row of the comparison."""

    key: str
    values: tuple[str, ...]  # one a series; more than one value of its runs are joined by " | "
    is_different: bool


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists and empty sections count as values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def group_runs(runs: Sequence[Run]) -> list[Series]:
    """Runs of the same config together, in the order of the first of each; named by what differs.

    A run without a kept config stands alone.

    Raises:
        UserError: more configs than curves that can be told apart.
    """
    together: dict[Any, list[Run]] = {}
    for run in runs:
        together.setdefault(_experiment(run) if run.config else run.folder, []).append(run)
    groups = list(together.values())
    if len(groups) > MAX_SERIES:
        raise UserError(
            f"{len(groups)} different configs, but a chart can show {MAX_SERIES}; give fewer runs (runs that"
            " differ in run.seed only are one curve)"
        )
    return [Series(name, tuple(members)) for name, members in zip(_series_names(groups), groups, strict=True)]


def compare(series: Sequence[Series]) -> list[Setting]:
    """Every key of every config with its value in each series, in the order of the configs."""
    flat = [[_relative(run) for run in one.runs] for one in series]
    keys = dict.fromkeys(key for runs in flat for one in runs for key in one)
    rows = []
    for key in keys:
        values = [
            list(dict.fromkeys(_text(one[key]) if key in one else "-" for one in runs)) for runs in flat
        ]
        joined = tuple(" | ".join(shown) for shown in values)
        rows.append(Setting(key, joined, len({text for shown in values for text in shown}) > 1))
    return rows


def _experiment(run: Run) -> tuple[tuple[str, str], ...]:
    """What must be equal for two runs to be seeds of one experiment."""
    flat = {key: _text(value) for key, value in _relative(run).items() if not among(IGNORED, key)}
    for name, value in run.identity.items():
        # A generated world has a seed of its own, and other questions and words with it.
        if name == "policy.config" or not run.setting("world.dir"):
            flat[name] = value
    return tuple(sorted(flat.items()))


def _relative(run: Run) -> dict[str, Any]:
    """The flat config, paths in the run's folder written relative to it."""
    folder = run.setting("run.dir")
    flat = flatten(run.config)
    if not folder:
        return flat
    inside = f"{str(folder).rstrip('/')}/"

    def shorten(value: Any) -> Any:
        if isinstance(value, list):
            return [shorten(one) for one in value]
        if isinstance(value, str) and value.startswith(inside):
            return "${run.dir}/" + value.removeprefix(inside)
        return value

    return {key: shorten(value) for key, value in flat.items()}


def _series_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """By the value of the one key that differs, by keys and values of two; else by the folders."""
    if len(groups) == 1:
        (runs,) = groups
        if len(runs) == 1:
            return [str(Path(*runs[0].folder.parts[-2:]))]
        seeds = {(run.setting("run.seed"), run.setting("world.seed")) for run in runs}
        return [f"{len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}"]
    experiments = [dict(_experiment(runs[0])) for runs in groups]
    keys = dict.fromkeys(key for one in experiments for key in one)
    differ = [key for key in keys if len({one.get(key) for one in experiments}) > 1]
    if all(runs[0].config for runs in groups) and 1 <= len(differ) <= 2:
        wanted = [_short_names(one, differ) for one in experiments]
        if len(set(wanted)) == len(wanted) and max(map(len, wanted)) <= LONGEST_NAME:
            return wanted
    return [runs[0].name if len(runs) == 1 else f"{runs[0].name} +{len(runs) - 1}" for runs in groups]


def _short_names(experiment: Mapping[str, str], keys: Sequence[str]) -> str:
    values = [experiment.get(key, "-") for key in keys]
    if keys == ["advantage.name"]:
        return values[0]
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in zip(keys, values, strict=True))


def _text(value: Any) -> str:
    """As YAML writes it, on one line: null, true, 0.2, [a, b]."""
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
