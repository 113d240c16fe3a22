"""Which runs share a config, what tells the others apart, and all configs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.contrib.report.runs import Run
from calibadv_jax.core.errors import UserError

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
