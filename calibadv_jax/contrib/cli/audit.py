"""The credit of a run against the truth: ``calibadv audit RUN [RUN …] [key.path=value …]``.

Rewards and advantages of kept trajectories are computed again, with the run's own and with other settings.
The control permutes the rewards of a step: the level of chance. docs/audit.md defines all terms.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import rankdata

from calibadv_jax.advantages.credit import GroupCredit, search_turns
from calibadv_jax.config import Config
from calibadv_jax.config.sections.credit import CALIBRATED
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, score_again
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.seeds import random_state
from calibadv_jax.evaluation.report import FEW, intervals_of_sums
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout_store.reader import KeptStep, find_step, read_step
from calibadv_jax.rollout_store.schema import kept_steps

SECTIONS = ("reward.", "advantage.")  # of the config: the rest changes no credit of a kept step
CONFIDENCE, RESAMPLES = 0.95, 2000  # of the intervals of the verdict
WINDOW = 10  # steps of a row of the table over training
EXPLAINED = 2  # columns beside which there is room for the meaning of a measure

BLAME = ("good_blame", "good_spared", "useless_blame", "useless_spared")
# Of a group: finished trajectories; supporting passages of its question; silver documents and the documents
# seen, with the supporting ones of each; blame on truly good and on useless searches before any calibration,
# with the part of it that the calibration took away.
COUNTS = ("trajectories", "supporting", "silver", "silver_hits", "seen", "seen_hits")
GROUP = np.dtype([(name, "f8") for name in (*COUNTS, *BLAME)])
# Of a search: correctness is NaN where it is not judged; raw: the advantage before any calibration.
SEARCH = np.dtype(
    [("good", "?"), ("correctness", "f8"), ("raw", "f8"), ("advantage", "f8"), ("tokens", "i8")]
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


Sides = tuple[Evidence, Evidence]  # true, and of the control, with shuffled rewards


@dataclass(frozen=True)
class Column:
    """The run's own settings with some keys changed, and the evidence of each kept step under them."""

    name: str
    overrides: tuple[str, ...] = ()
    steps: dict[int, Sides] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs with log.rollouts, and settings of reward or advantage to try on them"
    parser.add_argument("inputs", nargs="+", metavar="RUN|key.path=value", help=text)
    text = "add a column for each of these values; may be given several times"
    parser.add_argument("--sweep", action="append", default=[], metavar="key.path=V,V,…", help=text)
    text = "table of whom these values of advantage.name praise and blame; calibadv+NAME: calibrated"
    parser.add_argument("--estimators", metavar="NAME,NAME,…", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the control's permutations (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all measures as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the tables of each run, and of several runs their mean."""
    overrides = [text for text in arguments.inputs if "=" in text]
    folders = [Path(text) for text in dict.fromkeys(arguments.inputs) if "=" not in text]
    if not folders:
        raise UserError(f"no run among {' '.join(overrides)}; give the run.dir of at least one run")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    columns, rivals = make_columns(overrides, arguments.sweep), make_rivals(overrides, arguments.estimators)
    console = Console()
    say = console.say
    audited = {folder: audit(folder, columns + rivals, arguments.seed, console) for folder in folders}
    say(f"in brackets: the control, with the rewards of each step shuffled (seed {arguments.seed})")
    for folder, measured in audited.items():
        total = measure(pool(measured[0])[0])
        numbers = ", ".join(f"{total[name]:.0f} {name}" for name in ("groups", "trajectories", "searches"))
        say(f"\n{folder}: {len(measured[0].steps)} kept steps, {numbers}")
        say(totals_table([measured[: len(columns)]]))
        say(f"\n{folder} over training, settings: {' '.join(overrides) or 'of the run'}")
        say(windows_table(measured[1 if overrides else 0]))
        if rivals:
            say(f"\n{folder}: whom estimators praise and blame")
            say(verdicts_table(measured[len(columns) :]))
    by_run = {str(folder): measured[: len(columns)] for folder, measured in audited.items()}
    judged = [(name, [column]) for name, measured in by_run.items() for column in measured]
    if len(by_run) > 1:
        say(f"\nmean of {len(by_run)} runs [lowest, highest] (mean of the controls)")
        say(totals_table(list(by_run.values())))
        title = f"all {len(by_run)} runs together"
        judged += [(title, list(runs)) for runs in zip(*by_run.values(), strict=True)]
    unsure = f"“cannot say”: intervals overlap, or there are fewer than {FEW} groups"
    say(f"\nverdict ({100 * CONFIDENCE:g} % intervals over groups; {unsure})")
    for title, runs in judged:
        say(f"{title}, settings {runs[0].name}:\n  {verdict(runs)}")
    if arguments.output is not None:
        results = [
            {"run": str(folder), "settings": list(map(as_json, measured))}
            for folder, measured in audited.items()
        ]
        write_json(arguments.output, {"seed": arguments.seed, "runs": results}, indent=1)


def make_columns(overrides: Sequence[str], sweeps: Sequence[str]) -> list[Column]:
    """Return the run's own settings, these with all overrides, and on top of them each value swept."""
    swept: list[str] = []
    for sweep in sweeps:
        key, sign, values = sweep.partition("=")
        if not sign or not all(values.split(",")):
            raise UserError(f"--sweep {sweep}: write it as key.path=VALUE,VALUE,…")
        swept += [f"{key}={value}" for value in values.split(",")]
    for override in (*overrides, *swept):
        if not override.startswith(SECTIONS):
            advice = "changes no credit of a kept step; give keys of reward and advantage"
            raise UserError(f"{override}: {advice}")
    columns = [Column("run")]
    if overrides:
        columns.append(Column(" ".join(overrides).replace("advantage.", ""), tuple(overrides)))
    return columns + [Column(change.removeprefix("advantage."), (*overrides, change)) for change in swept]


def make_rivals(overrides: Sequence[str], estimators: str | None) -> list[Column]:
    """Return CalibAdv and each of these estimators, on top of all overrides; nothing without estimators."""
    if estimators is None:
        return []
    rivals = []
    for name in dict.fromkeys([CALIBRATED, *estimators.split(",")]):
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
    with console.bar(str(folder), len(paths), "steps") as show:
        for done, (step, path) in enumerate(paths.items(), 1):
            kept = read_step(path)
            num_groups += len(kept.groups)
            for column in measured:
                key = kept.metadata["config"], column.overrides
                if key not in configs:
                    configs[key] = kept_config(kept, path, column.overrides)
                credits, control = credit_again(kept, configs[key]), credit_again(kept, configs[key], seed)
                column.steps[step] = gather(credits), gather(control)
                if column is measured[0]:
                    same, turns = equal_turns(kept.credits, credits)
                    equal, total = equal + same, total + turns
            show(done)
    num_audited = len(pool(measured[0])[0].groups)
    if not num_audited:
        problem = f"{folder}: none of its questions names supporting passages (supporting_ids)"
        raise UserError(f"{problem}; audit a run on a generated world, or on data that names them")
    if missing := num_groups - num_audited:
        left_out = f"{missing} of {num_groups} groups name no supporting passages and are left out"
        console.warn(f"{folder}: {left_out}")
    if equal < total:
        differ = f"{total - equal} of {total} turns get another advantage than was kept"
        console.warn(f"{folder}: {differ}; calibadv replay shows more")
    return measured


def credit_again(kept: KeptStep, config: Config, control: int | None = None) -> list[GroupCredit]:
    """Return the credit of a kept step under a config; a seed `control` permutes the rewards."""
    rng = random_state(int(kept.metadata["seed"]), kept.step - 1, "reward")
    if control is not None:
        rng = random_state(control, kept.step - 1, "audit")
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, shuffle=True))
    return score_again(kept, config, rng)[1].credits


def gather(credits: Sequence[GroupCredit]) -> Evidence:
    """Collect the evidence of a step, in the order of its groups that have supporting passages."""
    groups, searches = [], [np.zeros(0, SEARCH)]
    for credit in credits:
        if credit.group.question.supporting_ids:
            searches.append(np.array(_searches(credit), SEARCH))
            groups.append(_group(credit, searches[-1]))
    return Evidence(np.array(groups, GROUP), np.concatenate(searches))


def _group(credit: GroupCredit, searches: np.ndarray) -> tuple[float, ...]:
    members = credit.group.trajectories
    supporting = set(credit.group.question.supporting_ids)
    seen = {document.id for member in members for turn in member.turns for document in turn.documents}
    negative = searches[searches["raw"] < 0]
    good = negative["good"]
    blame = -negative["raw"] * negative["tokens"]
    spared = (negative["advantage"] - negative["raw"]) * negative["tokens"]
    return (
        len(members),
        len(supporting),
        len(credit.silver),
        len(supporting & credit.silver.keys()),
        len(seen),
        len(supporting & seen),
        blame[good].sum(),
        spared[good].sum(),
        blame[~good].sum(),
        spared[~good].sum(),
    )


def _searches(credit: GroupCredit) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for position, trajectory in enumerate(credit.group.trajectories):
        is_judged = bool(credit.silver) and trajectory.format_valid
        searches, missing = search_turns(trajectory), set(trajectory.question.supporting_ids)
        for index, turn in enumerate(trajectory.turns):
            hits = missing & {document.id for document in turn.documents}
            missing -= hits
            if index in searches:
                correctness = credit.correctness[position][index] if is_judged else np.nan
                advantages = credit.before[position][index], credit.turns[position][index]
                rows.append((bool(hits), correctness, *advantages, len(turn.token_ids)))
    return rows


def join(parts: Sequence[Evidence]) -> Evidence:
    return Evidence(
        np.concatenate([part.groups for part in parts]), np.concatenate([part.searches for part in parts])
    )


def pool(*columns: Column) -> Sides:
    """Return the true and the control's evidence of all steps of the columns."""
    true, control = zip(*(sides for column in columns for sides in column.steps.values()), strict=True)
    return join(true), join(control)


def measure(evidence: Evidence) -> dict[str, float]:
    """Compute MEASURES, after the numbers of groups, trajectories, searches and blamed searches.

    Those of silver documents are means over the groups with some; auc is the chance that a truly good search
    has the larger correctness, ties counting half. Means, shares and ratios of nothing are omitted.
    """
    groups, searches = evidence.groups, evidence.searches
    is_judged = ~np.isnan(searches["correctness"])
    silver, judged = groups[groups["silver"] > 0], searches[is_judged]
    is_good, called = judged["good"], judged["correctness"] > 0
    num_good = int(is_good.sum())
    ranks = rankdata(judged["correctness"])[is_good]
    u = float(ranks.sum()) - num_good * (num_good + 1) / 2  # Mann-Whitney's, of the good searches
    blamed = searches[searches["raw"] < 0]
    good_blame, good_spared, useless_blame, useless_spared = (groups[name].sum() for name in BLAME)
    counts = {"groups": len(groups), "trajectories": int(groups["trajectories"].sum())}
    counts |= {"searches": len(searches), "blamed": len(blamed)}
    return counts | _ratios(
        {
            "silver/group_share": _mean(groups["silver"] > 0),
            "silver/size": _mean(silver["silver"]),
            "silver/precision": _mean(silver["silver_hits"] / silver["silver"]),
            "silver/recall": _mean(silver["silver_hits"] / silver["supporting"]),
            "silver/seen_precision": _mean(silver["seen_hits"] / silver["seen"]),
            "silver/seen_recall": _mean(silver["seen_hits"] / silver["supporting"]),
            "search/good_share": _mean(searches["good"]),
            "search/judged_share": _mean(is_judged),
            "search/judged_good_share": _mean(is_good),
            "search/precision": _mean(is_good[called]),
            "search/recall": _mean(called[is_good]),
            "search/agreement": _mean(is_good == called),
            "search/auc": (u, num_good * (len(is_good) - num_good)),
            "blame/good_blamed": _mean(searches["raw"][searches["good"]] < 0),
            "blame/good_share": _mean(blamed["good"]),
            "blame/good_spared": (good_spared, good_blame),
            "blame/useless_spared": (useless_spared, useless_blame),
            "blame/spared_good_share": (good_spared, good_spared + useless_spared),
        }
    )


def verdicts(evidence: Evidence, calibadv: Evidence) -> dict[str, float]:
    """Compute VERDICTS on the trained advantages, given those of the same searches under CalibAdv."""
    searches = evidence.searches
    good, advantage = searches["good"], searches["advantage"]
    mass = advantage * searches["tokens"]
    negative, positive = np.maximum(-mass, 0), np.maximum(mass, 0)
    signs = np.sign(advantage) == np.sign(calibadv.searches["advantage"])
    return _ratios(
        {
            "good blamed": _mean(advantage[good] < 0),
            "useless praised": _mean(advantage[~good] > 0),
            "blame on good": (negative[good].sum(), negative.sum()),
            "praise on useless": (positive[~good].sum(), positive.sum()),
            "agreement": _mean(signs),
        }
    )


def _mean(values: np.ndarray) -> tuple[float, float]:
    return values.sum(), len(values)


def _ratios(ratios: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return part / whole of each name, without those of nothing."""
    return {name: float(part / whole) for name, (part, whole) in ratios.items() if whole > 0}


def totals_table(runs: Sequence[Sequence[Column]]) -> str:
    """Return one row a measure, one column a setting: ``value (control)``; of several runs see `cells`."""
    columns = []
    for column in zip(*runs, strict=True):
        true, control = zip(*(map(measure, pool(run)) for run in column), strict=True)
        columns.append(cells(MEASURES, true, control))
    headers = ["measure", *(column.name for column in runs[0])]
    if len(columns) <= EXPLAINED:
        headers.append("what")
        columns.append(list(MEASURES.values()))
    return table(list(zip(MEASURES, *columns, strict=True)), headers)


def windows_table(column: Column) -> str:
    """Return one row a window, of the steps 1 … WINDOW, WINDOW + 1 … 2 WINDOW, and so on."""
    rows = []
    for _, members in groupby(column.steps, lambda step: (step - 1) // WINDOW):
        steps = {step: column.steps[step] for step in members}
        true, control = map(measure, pool(Column("", steps=steps)))
        rows.append([f"{min(steps)}-{max(steps)}", *cells(OVER_TRAINING, [true], [control])])
    return table(rows, ["steps", *(name.removeprefix("blame/") for name in OVER_TRAINING)])


def verdicts_table(rivals: Sequence[Column]) -> str:
    """Return one row an estimator, one column a verdict: ``value (control)``; CalibAdv is the first one."""
    rows = []
    for rival in rivals:
        true, control = map(verdicts, pool(rival), pool(rivals[0]))
        rows.append([rival.name, *cells(VERDICTS, [true], [control])])
    return table(rows, ["estimator", *VERDICTS])


def cells(
    names: Iterable[str], true: Sequence[Mapping[str, float]], control: Sequence[Mapping[str, float]]
) -> list[str]:
    """Return ``mean [lowest, highest] (mean of the controls)`` of each measure; "-" where no run has it."""
    texts = []
    for name in names:
        values = [run[name] for run in true if name in run]
        chance = [run[name] for run in control if name in run]
        shown = f"{np.mean(values):.3f}" if values else "-"
        if values and len(true) > 1:
            shown += f" [{min(values):.3f}, {max(values):.3f}]"
        texts.append(f"{shown} ({np.mean(chance):.3f})" if chance else f"{shown} (-)")
    return texts


def verdict(runs: Sequence[Column]) -> str:
    """Say whether the lead is larger than the control's, with intervals over the groups of all runs.

    The lead is the share of their blame that the calibration takes from truly good searches, less the share
    that it takes from useless ones.
    """
    sums = np.column_stack([side.groups[name] for side in pool(*runs) for name in BLAME])  # float64 [N, 8]
    num_good, num_useless = (int((sums[:, column] > 0).sum()) for column in (0, 2))
    if min(num_good, num_useless) < FEW:
        blamed = f"truly good searches are blamed in {num_good} groups and useless ones in {num_useless}"
        return f"cannot say: {blamed}; at least {FEW} of each are needed"
    lead, chance = _leads(sums.sum(axis=0, keepdims=True))[0]
    (low, high), (chance_low, chance_high) = intervals_of_sums(sums, _leads, CONFIDENCE, RESAMPLES)
    conclusion = "cannot say whether it is better than chance"
    if low > chance_high:
        conclusion = "better than chance"
    elif high < chance_low:
        conclusion = "worse than chance"
    shuffled = f"with shuffled rewards (control) {chance:.3f} [{chance_low:.3f}, {chance_high:.3f}]"
    return f"{conclusion}: the lead is {lead:.3f} [{low:.3f}, {high:.3f}], {shuffled}"


def _leads(sums: np.ndarray) -> np.ndarray:
    """Return the true and the control's lead, float64 [R, 2], of sums of blame, float64 [R, 8]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        spared = sums[:, 1::2] / sums[:, ::2]
    return spared[:, ::2] - spared[:, 1::2]


def as_json(column: Column) -> dict[str, Any]:
    """Return everything under one of the settings: true and control, in total and by step."""
    result: dict[str, Any] = {"name": column.name, "overrides": list(column.overrides)}
    result["verdict"] = verdict([column])
    for index, side in enumerate(("true", "control")):
        steps = [{"step": step} | measure(sides[index]) for step, sides in column.steps.items()]
        result[side] = {"total": measure(pool(column)[index]), "steps": steps}
    return result
