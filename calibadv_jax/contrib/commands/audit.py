"""The credit of a run against the truth: ``calibadv audit RUN [RUN …] [key.path=value …]``.

Rewards and advantages of kept trajectories are computed again, with the run's own and with other settings.
The control permutes the rewards of a step: the level of chance. Where questions name their supporting
passages, a search is truly good if it shows one that no earlier turn of its trajectory showed, else truly
useless. Searches are the search turns before a trajectory's last sampled turn, CalibAdv's answer turn. Blame
is negative advantage × sampled tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.lib.recfunctions import structured_to_unstructured
from scipy.stats import rankdata

from calibadv_jax.advantages.credit import GroupCredit, answer_mass, search_turns
from calibadv_jax.advantages.estimators import judges
from calibadv_jax.config import Config
from calibadv_jax.config.sections.credit import CALIBRATED
from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, score_again
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.evaluation.report import FEW, intervals_of_sums
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.record.reader import KeptStep, find_step, read_step
from calibadv_jax.record.schema import kept_steps

SECTIONS = ("reward.", "advantage.")  # of the config: the rest changes no credit of a kept step
CONFIDENCE, RESAMPLES = 0.95, 2000  # of the intervals of the verdict
EXPLAINED = 2  # columns beside which there is room for the meaning of a measure


_COUNTS = ("trajectories", "supporting", "silver", "silver_hits", "seen", "seen_hits")
_MASSES = ("positive_before", "negative_before", "positive_after", "negative_after")  # credit.answer_mass
BLAME = ("good_blame", "good_spared", "useless_blame", "useless_spared")
# Of a group: finished trajectories; supporting passages of its question; silver documents and the documents
# seen, with the supporting ones of each; answer mass before and after the calibration; blame on truly good
# and on useless searches before any calibration, with the part of it that the calibration took away.
GROUP = np.dtype([(name, np.int64) for name in _COUNTS] + [(name, np.float64) for name in (*_MASSES, *BLAME)])
SEARCH = np.dtype(
    [
        ("good", np.bool_),
        ("judged", np.bool_),  # the group has silver documents, and the trajectory keeps to the format
        ("correctness", np.float64),
        ("raw", np.float64),  # advantage before any calibration
        ("advantage", np.float64),
        ("tokens", np.int64),  # sampled ones
    ]
)
_NAMES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MEASURES: dict[str, str] = _NAMES["measures"]
VERDICTS: dict[str, str] = _NAMES["verdicts"]
OVER_TRAINING: list[str] = _NAMES["over_training"]


@dataclass(frozen=True)
class Evidence:
    """Groups whose question names supporting passages, and their searches."""

    groups: np.ndarray  # GROUP [number of groups]
    searches: np.ndarray  # SEARCH [number of searches]


@dataclass(frozen=True)
class Column:
    """The run's own settings with some keys changed, and the evidence of each kept step under them."""

    name: str
    overrides: tuple[str, ...] = ()
    true: dict[int, Evidence] = field(default_factory=dict)
    control: dict[int, Evidence] = field(default_factory=dict)  # with shuffled rewards

    @property
    def sides(self) -> tuple[Evidence, Evidence]:
        """The true and the control's evidence of all steps."""
        return join(self.true.values()), join(self.control.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs with log.rollouts, and settings of reward or advantage to try on them"
    parser.add_argument("inputs", nargs="+", metavar="RUN|key.path=value", help=text)
    text = "add a column for each of these values; may be given several times"
    parser.add_argument("--sweep", action="append", default=[], metavar="key.path=V,V,…", help=text)
    text = "table of whom these values of advantage.name praise and blame; calibadv+NAME: calibrated"
    parser.add_argument("--estimators", metavar="NAME,NAME,…", help=text)
    text = "number of steps of a row in the table over training (default: %(default)s)"
    parser.add_argument("--window", type=number(int, least=1), default=10, metavar="STEPS", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the control's permutations (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all measures as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the tables of each run, and of several runs their mean."""
    folders, overrides = split(arguments.inputs)
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise UserError(f"{arguments.output.parent}: no such folder; make it, or change --output")
    columns, rivals = make_columns(overrides, arguments.sweep), make_rivals(overrides, arguments.estimators)
    console = Console()
    say = console.say
    audited = {folder: audit(folder, columns + rivals, arguments.seed, console) for folder in folders}
    by_run = {folder: measured[: len(columns)] for folder, measured in audited.items()}
    say(f"in brackets: the control, with the rewards of each step shuffled (seed {arguments.seed})")
    if overrides and arguments.sweep:
        say(f"the columns of --sweep: on top of {' '.join(overrides)}")
    for folder, measured in by_run.items():
        total = measure(measured[0].sides[0])
        numbers = ", ".join(f"{total[name]:.0f} {name}" for name in ("groups", "trajectories", "searches"))
        say(f"\n{folder}: {len(measured[0].true)} kept steps, {numbers}")
        say(totals_table([measured]))
        say(f"\n{folder} over training, settings: {' '.join(overrides) or 'of the run'}")
        say(windows_table(measured[1 if overrides else 0], arguments.window))
        if rivals:
            say(f"\n{folder}: whom estimators praise and blame")
            say(verdicts_table(audited[folder][len(columns) :]))
    unsure = f"“cannot say”: intervals overlap, or there are fewer than {FEW} groups"
    judged = [(str(folder), [column]) for folder, measured in by_run.items() for column in measured]
    if len(by_run) > 1:
        say(f"\nmean of {len(by_run)} runs [lowest, highest] (mean of the controls)")
        say(totals_table(list(by_run.values())))
        title = f"all {len(by_run)} runs together"
        judged += [(title, list(runs)) for runs in zip(*by_run.values(), strict=True)]
    say(f"\nverdict ({100 * CONFIDENCE:g} % intervals over groups; {unsure})")
    for title, runs in judged:
        say("\n".join([f"{title}, settings {runs[0].name}:", *(f"  {line}" for line in verdict(runs))]))
    if arguments.output is not None:
        results = [
            {"run": str(folder), "settings": [as_json(column, arguments.window) for column in measured]}
            for folder, measured in audited.items()
        ]
        about = {"seed": arguments.seed, "window": arguments.window, "runs": results}
        write_json(arguments.output, about, indent=1)


def split(inputs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate folders and settings; a name with "=" is a folder if there is one of that name."""
    overrides = [text for text in inputs if "=" in text and not Path(text).is_dir()]
    folders = [Path(text) for text in inputs if text not in overrides]
    for folder in folders:
        if not folder.is_dir() or folders.count(folder) > 1:
            reason = "is named twice" if folder.is_dir() else "no such folder of a run"
            raise UserError(f"{folder}: {reason}; give the run.dir of runs, each once")
    if not folders:
        raise UserError(f"no run among {' '.join(inputs)}; give the run.dir of at least one run")
    return folders, overrides


def make_columns(overrides: Sequence[str], sweeps: Sequence[str]) -> list[Column]:
    """Return the run's own settings, these with all overrides, and on top of them each value swept."""
    changes = [overrides] if overrides else []
    for sweep in sweeps:
        key, sign, values = sweep.partition("=")
        if not sign or not all(values.split(",")):
            raise UserError(f"--sweep {sweep}: write it as key.path=VALUE,VALUE,…")
        changes += [[f"{key}={value}"] for value in values.split(",")]
    for override in (override for change in changes for override in change):
        if not override.startswith(SECTIONS):
            advice = "changes no credit of a kept step; give keys of reward and advantage"
            raise UserError(f"{override}: {advice}")
    columns = [Column("run")]
    for change in changes:
        name = " ".join(override.removeprefix("advantage.") for override in change)
        columns.append(Column(name, tuple(change if change is overrides else [*overrides, *change])))
    return columns


def make_rivals(overrides: Sequence[str], estimators: str | None) -> list[Column]:
    """Return CalibAdv and each of these estimators, on top of all overrides; nothing without estimators."""
    rivals = []
    for name in [] if estimators is None else dict.fromkeys([CALIBRATED, *estimators.split(",")]):
        keys = [f"advantage.name={name}"]
        if (base := name.removeprefix(f"{CALIBRATED}+")) != name:
            keys = [f"advantage.name={CALIBRATED}", f"advantage.base={base}"]
        rivals.append(Column(name, (*overrides, *keys)))
    return rivals


def audit(folder: Path, columns: Sequence[Column], seed: int, console: Console) -> list[Column]:
    """Gather the evidence of a run's kept steps under each of the settings, the first without overrides."""
    paths = kept_steps(folder) or {1: find_step(folder, 1)}  # raises where there are none
    measured = [Column(column.name, column.overrides) for column in columns]
    configs: dict[tuple[str, tuple[str, ...]], Config] = {}
    equal = total = num_groups = 0
    console.note(f"{folder}: reading {len(paths)} kept steps, each under {len(columns)} settings")
    with console.bar(str(folder), len(paths), "steps") as show:
        for done, (step, path) in enumerate(paths.items(), 1):
            kept = read_step(path)
            num_groups += len(kept.groups)
            for column in measured:
                key = kept.metadata["config"], column.overrides
                if key not in configs:
                    configs[key] = kept_config(kept, path, column.overrides)
                credits = credit_again(kept, configs[key])
                column.true[step] = gather(credits)
                column.control[step] = gather(credit_again(kept, configs[key], seed))
                if column is measured[0]:
                    same, turns = equal_turns(kept.credits, credits)
                    equal, total = equal + same, total + turns
            show(done)
    groups = measured[0].sides[0].groups
    if not len(groups):
        raise UserError(
            f"{folder}: none of its questions names supporting passages (supporting_ids); audit a run on a"
            " generated world, or on data that names them"
        )
    warnings = []
    if missing := num_groups - len(groups):
        warnings.append(f"{missing} of {num_groups} groups name no supporting passages and are left out")
    if not groups["seen_hits"].any():
        warnings.append("no search ever showed a supporting passage; are supporting_ids ids of the corpus?")
    if equal < total:
        differ = f"{total - equal} of {total} turns get another advantage than was kept"
        warnings.append(f"{differ}; calibadv replay shows more")
    if not any(judges(config.advantage) for config in configs.values()):
        names = " and ".join(sorted({config.advantage.name for config in configs.values()}))
        warnings.append(f"{names} judges no search; advantage.name=calibadv shows what CalibAdv would do")
    for warning in warnings:
        console.warn(f"{folder}: {warning}")
    return measured


def credit_again(kept: KeptStep, config: Config, control: int | None = None) -> list[GroupCredit]:
    """Return the credit of a kept step under a config; a seed `control` permutes the rewards."""
    rng = random_state(int(kept.metadata["seed"]), kept.step - 1, "reward")
    if control is not None:
        rng = random_state(control, kept.step - 1, "audit")
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, shuffle=True))
    return score_again(kept, config, rng)[1].credits


def totals_table(runs: Sequence[Sequence[Column]]) -> str:
    """Return one row a measure, one column a setting: ``value (control)``; of several runs see `cell`."""
    columns = []
    for column in zip(*runs, strict=True):
        true, control = zip(*(map(measure, run.sides) for run in column), strict=True)
        columns.append([cell(name, true, control) for name in MEASURES])
    headers = ["measure", *(column.name for column in runs[0])]
    if len(columns) <= EXPLAINED:
        headers.append("what")
        columns.append(list(MEASURES.values()))
    return table(list(zip(MEASURES, *columns, strict=True)), headers)


def cell(name: str, true: Sequence[Mapping[str, float]], control: Sequence[Mapping[str, float]]) -> str:
    """Return the cell of a measure; "-" where no run has a value."""
    values, chance = ([run[name] for run in runs if name in run] for runs in (true, control))
    shown = f"{np.mean(values):.3f}" if values else "-"
    if values and len(true) > 1:
        shown += f" [{min(values):.3f}, {max(values):.3f}]"
    return f"{shown} ({f'{np.mean(chance):.3f}' if chance else '-'})"


def verdicts_table(rivals: Sequence[Column]) -> str:
    """Return one row an estimator, one column a verdict: ``value (control)``; CalibAdv is the first one."""
    rows = []
    for rival in rivals:
        true, control = map(verdicts, rival.sides, rivals[0].sides)
        rows.append([rival.name, *(cell(name, [true], [control]) for name in VERDICTS)])
    return table(rows, ["estimator", *VERDICTS])


def windows(evidence: Mapping[int, Evidence], size: int) -> list[dict[str, float]]:
    """Return the measures of the kept steps among 1 … size, size + 1 … 2 size, and so on."""
    measures = []
    for _, members in groupby(sorted(evidence), lambda step: (step - 1) // size):
        steps = list(members)
        parts = measure(join(evidence[step] for step in steps))
        measures.append({"first": steps[0], "last": steps[-1]} | parts)
    return measures


def windows_table(column: Column, window: int) -> str:
    rows = []
    for true, control in zip(windows(column.true, window), windows(column.control, window), strict=True):
        cells = (cell(name, [true], [control]) for name in OVER_TRAINING)
        rows.append([f"{true['first']}-{true['last']}", *cells])
    return table(rows, ["steps", *(name.removeprefix("blame/") for name in OVER_TRAINING)])


def verdict(runs: Sequence[Column]) -> list[str]:
    """Return the conclusions of the measures as sentences with numbers; the groups of all runs are pooled.

    The credit is right if the calibration takes a larger share of the blame from truly good searches than
    from useless ones, and better than chance if its lead is larger than in the control.
    """
    true, control = (  # float64 [groups, 4]
        structured_to_unstructured(join(parts).groups[list(BLAME)])
        for parts in zip(*(run.sides for run in runs), strict=True)
    )
    num_good, num_useless = (int((true[:, column] > 0).sum()) for column in (0, 2))
    if min(num_good, num_useless) < FEW:
        good = f"truly good searches are blamed in {num_good} groups and useless ones in {num_useless}"
        return [f"cannot say: {good}; at least {FEW} of each are needed"]
    sums = np.concatenate([true, control], axis=1)
    bounds = intervals_of_sums(sums, _shares, CONFIDENCE, RESAMPLES)
    values = _shares(sums.sum(axis=0, keepdims=True))[0]
    on_good, good, useless, lead, chance = (
        f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, (low, high) in zip(values, bounds, strict=True)
    )
    if not true[:, [1, 3]].any():
        return [
            f"no calibration: no search lost any blame; {on_good} of the blame lies on truly good searches"
        ]
    right = _decide(bounds[1], bounds[2], "right", "wrong")
    adds = _decide(bounds[3], bounds[4], "better than chance", "worse than chance")
    return [
        f"{right}: truly good searches are spared {good} of their blame, useless ones {useless}",
        f"{adds}: the lead is {lead}, with shuffled rewards (control) {chance}",
    ]


def _shares(sums: np.ndarray) -> np.ndarray:
    """Return share of blame on good searches, shares spared of good and useless, true and control lead."""
    with np.errstate(invalid="ignore", divide="ignore"):
        spared = sums[:, 1::2] / sums[:, ::2]
        on_good = sums[:, 0] / (sums[:, 0] + sums[:, 2])
    leads = spared[:, ::2] - spared[:, 1::2]
    return np.column_stack([on_good, spared[:, :2], leads])


def _decide(first: np.ndarray, second: np.ndarray, above: str, below: str) -> str:
    """Describe how two intervals (low, high) lie to each other: "cannot say …" where they overlap."""
    if first[0] > second[1]:
        return above
    return below if first[1] < second[0] else f"cannot say whether it is {above}"


def as_json(column: Column, window: int) -> dict[str, Any]:
    """Return everything under one of the settings: true and control, in total, by window and by step."""
    result: dict[str, Any] = {"name": column.name, "overrides": list(column.overrides)}
    result["verdict"] = verdict([column])
    for name, evidence in (("true", column.true), ("control", column.control)):
        steps = [{"step": step} | measure(part) for step, part in evidence.items()]
        total = measure(join(evidence.values()))
        result |= {name: {"total": total, "windows": windows(evidence, window), "steps": steps}}
    return result


def truly_good(trajectory: Trajectory) -> list[bool]:
    """Return whether each turn shows a supporting passage that no earlier turn showed, length K."""
    missing = set(trajectory.question.supporting_ids)
    good = []
    for turn in trajectory.turns:
        supporting = missing & {document.id for document in turn.documents}
        missing -= supporting
        good.append(bool(supporting))
    return good


def gather(credits: Sequence[GroupCredit]) -> Evidence:
    """Collect the evidence of a step, in the order of its groups that have supporting passages."""
    measurable = [credit for credit in credits if credit.group.question.supporting_ids]
    searches = [np.array(_searches(credit), SEARCH) for credit in measurable]
    groups = [_group(credit, own) for credit, own in zip(measurable, searches, strict=True)]
    return Evidence(np.array(groups, GROUP), np.concatenate([np.zeros(0, SEARCH), *searches]))


def join(parts: Iterable[Evidence]) -> Evidence:
    """Join the evidence of several steps, at least one."""
    groups, searches = zip(*((part.groups, part.searches) for part in parts), strict=True)
    return Evidence(np.concatenate(groups), np.concatenate(searches))


def measure(evidence: Evidence) -> dict[str, float]:
    """Compute MEASURES, after the numbers of groups, trajectories, searches and blamed searches.

    Those of silver documents are means over the groups with some; auc is the chance that a truly good search
    has the larger correctness, ties counting half. Means, shares and ratios of nothing are omitted.
    """
    groups, searches = evidence.groups, evidence.searches
    silver, judged = groups[groups["silver"] > 0], searches[searches["judged"]]
    is_good, called = judged["good"], judged["correctness"] > 0
    num_good = int(is_good.sum())
    ranks = rankdata(judged["correctness"])[is_good]
    u = float(ranks.sum()) - num_good * (num_good + 1) / 2  # Mann-Whitney's, of the good searches
    blamed = searches[searches["raw"] < 0]
    good, softened = blamed["good"], blamed["advantage"] > blamed["raw"]
    before = -blamed["raw"] * blamed["tokens"]
    spared = before + blamed["advantage"] * blamed["tokens"]
    masses = {name: float(groups[name].sum()) for name in _MASSES}
    means = {
        "silver/group_share": groups["silver"] > 0,
        "silver/size": silver["silver"],
        "silver/precision": silver["silver_hits"] / silver["silver"],
        "silver/recall": silver["silver_hits"] / silver["supporting"],
        "silver/seen_precision": silver["seen_hits"] / silver["seen"],
        "silver/seen_recall": silver["seen_hits"] / silver["supporting"],
        "search/good_share": searches["good"],
        "search/judged_share": searches["judged"],
        "search/judged_good_share": is_good,
        "search/precision": is_good[called],
        "search/recall": called[is_good],
        "search/agreement": is_good == called,
        "blame/good_blamed": searches["raw"][searches["good"]] < 0,
        "blame/good_share": good,
        "blame/good_softened": softened[good],
        "blame/useless_softened": softened[~good],
    }
    ratios = {
        "search/auc": (u, num_good * (len(is_good) - num_good)),
        "blame/good_spared": (spared[good].sum(), before[good].sum()),
        "blame/useless_spared": (spared[~good].sum(), before[~good].sum()),
        "blame/spared_good_share": (spared[good].sum(), spared.sum()),
        "answer/ratio_before": (masses["negative_before"], masses["positive_before"]),
        "answer/ratio_after": (masses["negative_after"], masses["positive_after"]),
    }
    counts = {"groups": len(groups), "trajectories": int(groups["trajectories"].sum())}
    counts |= {"searches": len(searches), "blamed": len(blamed)}
    values = _values(means, ratios)
    return counts | {name: values[name] for name in MEASURES if name in values}


def _values(means: Mapping[str, np.ndarray], ratios: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return means and ratios, without those of nothing."""
    of_some = {name: float(np.mean(values)) for name, values in means.items() if len(values)}
    return of_some | {name: float(part) / float(whole) for name, (part, whole) in ratios.items() if whole > 0}


def verdicts(evidence: Evidence, calibadv: Evidence) -> dict[str, float]:
    """Compute VERDICTS on the trained advantages, given those of the same searches under CalibAdv."""
    searches = evidence.searches
    good, advantage = searches["good"], searches["advantage"]
    mass = advantage * searches["tokens"]
    negative, positive = np.maximum(-mass, 0), np.maximum(mass, 0)
    signs = np.sign(advantage) == np.sign(calibadv.searches["advantage"])
    means = {"good blamed": advantage[good] < 0, "useless praised": advantage[~good] > 0, "agreement": signs}
    ratios = {
        "blame on good": (negative[good].sum(), negative.sum()),
        "praise on useless": (positive[~good].sum(), positive.sum()),
    }
    values = _values(means, ratios)
    return {name: values[name] for name in VERDICTS if name in values}


def _group(credit: GroupCredit, searches: np.ndarray) -> tuple[float, ...]:
    members = credit.group.trajectories
    supporting = set(credit.group.question.supporting_ids)
    seen = {document.id for member in members for turn in member.turns for document in turn.documents}
    return (
        len(members),
        len(supporting),
        len(credit.silver),
        len(supporting & credit.silver.keys()),
        len(seen),
        len(supporting & seen),
        *answer_mass(credit.group, credit.raw.tolist()),
        *answer_mass(credit.group, credit.answer_advantages()),
        *_blame_sums(searches),
    )


def _blame_sums(searches: np.ndarray) -> Iterator[float]:
    """Yield blame and the spared part of it, of truly good and then of useless searches."""
    for good in (True, False):
        negative = searches[(searches["raw"] < 0) & (searches["good"] == good)]
        yield float(-(negative["raw"] * negative["tokens"]).sum())
        yield float(((negative["advantage"] - negative["raw"]) * negative["tokens"]).sum())


def _searches(credit: GroupCredit) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for position, trajectory in enumerate(credit.group.trajectories):
        good = truly_good(trajectory)
        judged = bool(credit.silver) and trajectory.format_valid
        for index in search_turns(trajectory):
            correctness = credit.correctness[position][index]
            advantages = credit.before[position][index], credit.turns[position][index]
            tokens = len(trajectory.turns[index].token_ids)
            rows.append((good[index], judged, correctness, *advantages, tokens))
    return rows
