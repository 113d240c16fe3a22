"""The credit of a run against the truth: ``calibadv audit RUN [RUN …] [key.path=value …]``.

If questions name their supporting passages, as questions of a generated world do, it is known which searches
were good. This reads the trajectories that a run kept, computes rewards and advantages once more, with the
run's own settings and with other settings, and measures both; see `contrib.truth` for the definitions.
The control is the same with the rewards permuted among the trajectories of a step: what chance gives.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.advantages.estimators import judges
from calibadv_jax.config import Config
from calibadv_jax.config.sections.credit import CALIBRATED
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, score_again
from calibadv_jax.contrib.truth import MEASURES, VERDICTS, Evidence, gather, join, measure, verdicts
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.report import FEW, intervals_of_sums
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.record.reader import KeptStep, find_step, read_step
from calibadv_jax.record.schema import kept_steps

SECTIONS = ("reward.", "advantage.")  # of the config: the rest changes no credit of a kept step
OVER_TRAINING = (  # columns of the second table
    "silver/group_share",
    "silver/precision",
    "search/precision",
    "blame/good_blamed",
    "blame/good_spared",
    "blame/useless_spared",
)
CONFIDENCE, RESAMPLES = 0.95, 2000  # of the intervals of the verdict
EXPLAINED = 2  # columns beside which there is room for what a measure is


@dataclass(frozen=True)
class Settings:
    """A column: the run's own settings, with some keys changed."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A run under one of the settings: step -> evidence."""

    settings: Settings
    true: dict[int, Evidence]
    control: dict[int, Evidence]  # with shuffled rewards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="RUN|key.path=value",
        help="folders of runs with log.rollouts, and settings of reward or advantage to try on them",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key.path=V,V,…",
        help="add a column for each of these values; may be given several times",
    )
    parser.add_argument(
        "--estimators",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,NAME,…",
        help="a table of whom each of these values of advantage.name praises and blames; calibadv+NAME:"
        " calibrated",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=10,
        metavar="STEPS",
        help="number of steps of a row in the table over training (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the control's permutations (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the measures of every step to this JSON file"
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables of each run, and of several runs their mean.

    Raises:
        UserError: a run keeps no trajectories or its questions name no supporting passages; a kept step
            cannot be read; a setting is wrong.
    """
    folders, overrides = split(arguments.inputs)
    if arguments.window < 1:
        raise UserError(f"--window must be at least 1, got {arguments.window}")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise UserError(f"{arguments.output.parent}: no such folder; make it, or change --output")
    columns = make_columns(overrides, arguments.sweep)
    rivals = make_rivals(overrides, arguments.estimators)
    console = Console()
    audited = {folder: audit(folder, columns + rivals, arguments.seed, console) for folder in folders}
    found = {folder: measured[: len(columns)] for folder, measured in audited.items()}
    console.say(f"in brackets: the control, with the rewards of each step shuffled (seed {arguments.seed})")
    if overrides and arguments.sweep:
        console.say(f"the columns of --sweep: on top of {' '.join(overrides)}")
    for folder, measured in found.items():
        console.say(f"\n{folder}: {counts(measured[0])}")
        console.say(totals_table(measured))
        shown = measured[1 if overrides else 0]
        console.say(f"\n{folder} over training, settings: {' '.join(overrides) or 'of the run'}")
        console.say(windows_table(shown, arguments.window))
        if rivals:
            console.say(f"\n{folder}: whom estimators praise and blame")
            console.say(verdicts_table(audited[folder][len(columns) :]))
    if len(found) > 1:
        console.say(f"\nmean of {len(found)} runs [lowest, highest] (mean of the controls)")
        console.say(mean_table(list(found.values())))
    console.say(
        f"\nverdict ({100 * CONFIDENCE:g} % intervals over groups; “cannot say”: intervals overlap, or there"
        f" are fewer than {FEW} groups)"
    )
    for folder, measured in found.items():
        for column in measured:
            console.say("\n".join([f"{folder}, settings {column.settings.name}:", *verdict([column])]))
    if len(found) > 1:
        for same in zip(*found.values(), strict=True):
            title = f"all {len(found)} runs together, settings {same[0].settings.name}:"
            console.say("\n".join([title, *verdict(same)]))
    if arguments.output is not None:
        about = {"seed": arguments.seed, "window": arguments.window}
        runs = [as_json(folder, measured, arguments.window) for folder, measured in audited.items()]
        write_json(arguments.output, about | {"runs": runs}, indent=1)


def split(inputs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Folders and settings; a name with "=" is a folder if there is one of that name.

    Raises:
        UserError: no folder is among them, or one does not exist, or one is named twice.
    """
    folders, overrides = [], []
    for one in inputs:
        path = Path(one)
        if "=" in one and not path.is_dir():
            overrides.append(one)
        elif path.is_dir() and path not in folders:
            folders.append(path)
        else:
            reason = "is named twice" if path in folders else "no such folder of a run"
            raise UserError(f"{one}: {reason}; give the run.dir of runs, each once")
    if not folders:
        raise UserError(f"no run among {' '.join(inputs)}; give the run.dir of at least one run")
    return folders, overrides


def make_columns(overrides: Sequence[str], sweeps: Sequence[str]) -> list[Settings]:
    """The run's own settings, these with all overrides, and on top of them a setting for each value swept.

    Raises:
        UserError: a key is of a section that changes no credit, or a sweep has no values.
    """
    columns = [Settings("run")]
    if overrides:
        columns.append(Settings(" ".join(map(_short, overrides)), tuple(overrides)))
    for sweep in sweeps:
        key, sign, values = sweep.partition("=")
        if not sign or not all(values.split(",")):
            raise UserError(f"--sweep {sweep}: write it as key.path=VALUE,VALUE,…")
        for value in values.split(","):
            one = f"{key}={value}"
            columns.append(Settings(_short(one), (*overrides, one)))
    for one in (one for column in columns for one in column.overrides):
        if not one.startswith(SECTIONS):
            raise UserError(
                f"{one}: changes no credit of a kept step; the audit takes keys of reward and advantage"
            )
    return columns


def make_rivals(overrides: Sequence[str], estimators: Sequence[str]) -> list[Settings]:
    """CalibAdv and each of these estimators, on top of all overrides; none where none is asked for."""
    rivals = []
    for name in dict.fromkeys([CALIBRATED, *estimators] if estimators else []):
        keys = [f"advantage.name={name}"]
        if (base := name.removeprefix(f"{CALIBRATED}+")) != name:
            keys = [f"advantage.name={CALIBRATED}", f"advantage.base={base}"]
        rivals.append(Settings(name, (*overrides, *keys)))
    return rivals


def _short(override: str) -> str:
    """advantage.silver_threshold=0.5 as silver_threshold=0.5; of reward.… all, since names occur in both."""
    return override.removeprefix("advantage.")


def audit(folder: Path, columns: Sequence[Settings], seed: int, console: Console) -> list[Measured]:
    """Reads every kept step of a run and gathers its evidence under each of the settings.

    Args:
        columns: the first column has no overrides.
        seed: of the control.

    Raises:
        UserError: see `run`.
    """
    paths = kept_steps(folder) or {1: find_step(folder, 1)}  # which says that there are none
    found = [Measured(one, {}, {}) for one in columns]
    configs: dict[tuple[str, Settings], Config] = {}
    equal = total = num_groups = 0
    console.note(f"{folder}: reading {len(paths)} kept steps, each under {len(columns)} settings")
    with console.bar(str(folder), len(paths), "steps") as show:
        for done, (step, path) in enumerate(paths.items(), 1):
            kept = read_step(path)
            num_groups += len(kept.groups)
            for column in found:
                key = kept.metadata["config"], column.settings
                if key not in configs:
                    configs[key] = kept_config(kept, path, column.settings.overrides)
                credits = credit_again(kept, configs[key])
                column.true[step] = gather(credits)
                column.control[step] = gather(credit_again(kept, configs[key], seed))
                if column is found[0]:
                    same, turns = equal_turns(kept.credits, credits)
                    equal, total = equal + same, total + turns
            show(done)
    _check_passages(folder, found[0], num_groups, console)
    if equal < total:
        console.warn(
            f"{folder}: {total - equal} of {total} turns get another advantage than was kept;"
            " calibadv replay shows more"
        )
    if not any(judges(config.advantage) for config in configs.values()):
        names = " and ".join(sorted({config.advantage.name for config in configs.values()}))
        console.warn(
            f"{folder}: {names} judges no search; advantage.name=calibadv shows what CalibAdv would do"
        )
    return found


def _check_passages(folder: Path, measured: Measured, num_groups: int, console: Console) -> None:
    """Refuses a run of which nothing is known; warns if a part is, or passages are of another corpus."""
    groups = join(measured.true.values()).groups
    if not len(groups):
        raise UserError(
            f"{folder}: none of its questions names supporting passages (supporting_ids); audit a run on a"
            " generated world, or on data that names them"
        )
    if len(groups) < num_groups:
        console.warn(
            f"{folder}: {num_groups - len(groups)} of {num_groups} groups name no supporting passages and are"
            " left out"
        )
    if not groups["seen_hits"].any():
        console.warn(
            f"{folder}: no search ever showed a supporting passage; are supporting_ids ids of the corpus?"
        )


def credit_again(kept: KeptStep, config: Config, control: int | None = None) -> list[GroupCredit]:
    """The credit of every group of a kept step under a config; the step itself stays as it is.

    Args:
        control: seed with which rewards are permuted over the step's trajectories, as reward.shuffle does.
    """
    rng = random_state(int(kept.metadata["seed"]), kept.step - 1, "reward")
    if control is not None:
        rng = random_state(control, kept.step - 1, "audit")
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, shuffle=True))
    return score_again(kept, config, rng)[1].credits


def windows(evidence: Mapping[int, Evidence], size: int) -> Iterator[tuple[int, int, Evidence]]:
    """(first step, last step, evidence) of steps 1 … size, size + 1 … 2 size, and so on, if some are kept.

    First and last are steps that are kept.
    """
    members: dict[int, list[int]] = {}
    for step in sorted(evidence):
        members.setdefault((step - 1) // size, []).append(step)
    for steps in members.values():
        yield steps[0], steps[-1], join([evidence[step] for step in steps])


def counts(measured: Measured) -> str:
    """How much was kept, in words."""
    total = measure(join(measured.true.values()))
    numbers = ", ".join(f"{total[name]:.0f} {name}" for name in ("groups", "trajectories", "searches"))
    return f"{len(measured.true)} kept steps, {numbers}"


def totals_table(measured: Sequence[Measured]) -> str:
    """One row a measure, one column a setting: ``value (control)``."""
    columns = []
    for one in measured:
        true, control = (measure(join(side.values())) for side in (one.true, one.control))
        columns.append([cell(name, true, control) for name in MEASURES])
    return _by_measure(columns, [one.settings.name for one in measured])


def cell(name: str, true: Mapping[str, float], control: Mapping[str, float]) -> str:
    """``value (control)``; "-" stands for what there is none of."""
    shown = [f"{one[name]:.3f}" if name in one else "-" for one in (true, control)]
    return "{} ({})".format(*shown)


def verdicts_table(rivals: Sequence[Measured]) -> str:
    """One row an estimator, one column a verdict: ``value (control)``; CalibAdv is the first one."""
    rows = []
    for one in rivals:
        true = verdicts(join(one.true.values()), join(rivals[0].true.values()))
        control = verdicts(join(one.control.values()), join(rivals[0].control.values()))
        rows.append([one.settings.name, *(cell(name, true, control) for name in VERDICTS)])
    return table(rows, ["estimator", *VERDICTS])


BLAME = ("good_blame", "good_spared", "useless_blame", "useless_spared")


def verdict(runs: Sequence[Measured]) -> list[str]:
    """Return what the measures come to, in sentences with the numbers on which they rest.

    The credit is right if the calibration takes a larger share of the blame from truly good searches than
    from useless ones, and better than chance if its lead is larger than in the control.

    Args:
        runs: the same settings in one or more runs, whose groups are pooled.
    """
    true, control = (
        np.concatenate([_blame_of(side) for side in sides])
        for sides in ([run.true for run in runs], [run.control for run in runs])
    )
    num_good, num_useless = (int((true[:, column] > 0).sum()) for column in (0, 2))
    if min(num_good, num_useless) < FEW:
        return [
            f"  cannot say: truly good searches are blamed in {num_good} groups and useless ones in"
            f" {num_useless}; at least {FEW} of each are needed"
        ]
    sums = np.concatenate([true, control], axis=1)
    bounds = intervals_of_sums(sums, _shares, CONFIDENCE, RESAMPLES)
    values = _shares(sums.sum(axis=0, keepdims=True))[0]
    on_good, good, useless, lead, chance = (
        f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, (low, high) in zip(values, bounds, strict=True)
    )
    if not true[:, [1, 3]].any():
        return [
            f"  no calibration: no search lost any blame; {on_good} of the blame lies on truly good searches"
        ]
    right = _decide(bounds[1], bounds[2], "right", "wrong", "whether it is right")
    adds = _decide(
        bounds[3], bounds[4], "better than chance", "worse than chance", "whether it is better than chance"
    )
    return [
        f"  {right}: truly good searches are spared {good} of their blame, useless ones {useless}",
        f"  {adds}: the lead is {lead}, with shuffled rewards (control) {chance}",
    ]


def _blame_of(evidence: Mapping[int, Evidence]) -> np.ndarray:
    """BLAME of every group, float64 [groups, 4]."""
    groups = join(evidence.values()).groups
    return np.stack([groups[name] for name in BLAME], axis=1)


def _shares(sums: np.ndarray) -> np.ndarray:
    """Share of the blame on good searches, shares spared of good and useless, leads: true and control.

    Args:
        sums: float64 [R, 8], BLAME of the true credit and of the control.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        good, useless, good_by_chance, useless_by_chance = (
            sums[:, at + 1] / sums[:, at] for at in (0, 2, 4, 6)
        )
        on_good = sums[:, 0] / (sums[:, 0] + sums[:, 2])
    return np.stack([on_good, good, useless, good - useless, good_by_chance - useless_by_chance], axis=1)


def _decide(first: np.ndarray, second: np.ndarray, above: str, below: str, asked: str) -> str:
    """In words how two intervals (low, high) lie to each other: "cannot say …" where they overlap."""
    if first[0] > second[1]:
        return above
    return below if first[1] < second[0] else f"cannot say {asked}"


def windows_table(measured: Measured, window: int) -> str:
    """One row a window of steps: ``value (control)``."""
    rows = []
    pairs = zip(windows(measured.true, window), windows(measured.control, window), strict=True)
    for (first, last, true), (_, _, control) in pairs:
        found = measure(true), measure(control)
        rows.append([f"{first}-{last}", *(cell(name, *found) for name in OVER_TRAINING)])
    return table(rows, ["steps", *(name.removeprefix("blame/") for name in OVER_TRAINING)])


def mean_table(runs: Sequence[Sequence[Measured]]) -> str:
    """As `totals_table`, over runs: ``mean [smallest, largest] (mean of the controls)``, all runs alike."""
    columns = []
    for same in zip(*runs, strict=True):
        true = [measure(join(one.true.values())) for one in same]
        control = [measure(join(one.control.values())) for one in same]
        columns.append([_spread(name, true, control) for name in MEASURES])
    return _by_measure(columns, [one.settings.name for one in runs[0]])


def _spread(name: str, true: Sequence[Mapping[str, float]], control: Sequence[Mapping[str, float]]) -> str:
    values, chance = ([one[name] for one in runs if name in one] for runs in (true, control))
    shown = f"{np.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "-"
    return f"{shown} ({f'{np.mean(chance):.3f}' if chance else '-'})"


def _by_measure(columns: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """A row for each of MEASURES, with what it is if there is room."""
    rows = [[name, *cells] for name, *cells in zip(MEASURES, *columns, strict=True)]
    if len(columns) <= EXPLAINED:
        return table([[*row, MEASURES[row[0]]] for row in rows], ["measure", *names, "what"])
    return table(rows, ["measure", *names])


def as_json(folder: Path, measured: Sequence[Measured], window: int) -> dict[str, Any]:
    """Everything of a run: by settings, true and control, in total, by window and by step."""

    def every(evidence: Mapping[int, Evidence]) -> dict[str, Any]:
        return {
            "total": measure(join(evidence.values())),
            "windows": [
                {"first": first, "last": last} | measure(one)
                for first, last, one in windows(evidence, window)
            ],
            "steps": [{"step": step} | measure(one) for step, one in evidence.items()],
        }

    settings = [
        {
            "name": one.settings.name,
            "overrides": list(one.settings.overrides),
            "true": every(one.true),
            "control": every(one.control),
            "verdict": [line.strip() for line in verdict([one])],
        }
        for one in measured
    ]
    return {"run": str(folder), "settings": settings}
