"""The result of each series, which stands first on the page: scores before and after, searches, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from calibadv_jax.advantages.calibadv import variant_keys
from calibadv_jax.contrib.report.runs import EvaluationRow, Run, Series
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.evaluation.score_tables import ALL
from calibadv_jax.rollout_store.schema import run_name

NUM_ENDS = 10  # steps at the beginning and at the end of a run whose mean is its value before and after
MAX_TITLED = 3  # series that the title names
COLD_START = "Cold start"  # method of a run without RL
# Names of estimators as papers write them; others are written as in the config.
METHODS = {
    "calibadv": "CalibAdv",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "opo": "OPO",
    "gpg": "GPG",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with baseline",
    "gigpo": "GiGPO",
    "mt_grpo": "MT-GRPO",
    "stepsearch": "StepSearch",
    "igpo": "IGPO",
    "gae": "PPO",
}
SWITCHES = ("soft_penalty", "rebalance")  # the two parts of CalibAdv
# Metrics of the result: name -> label. The first one that a run has is the main score.
SCORES = {"f1": "F1", "em": "exact match", "cover_em": "cover EM", "text_f1": "F1 of the text"}
FACTS = {"em": "Exact match", "searches": "Searches a question", "format": "Valid format"}
# The same of the training trajectories.
TRAINING_SCORE = ("reward/mean", "Reward")
COLD_START_SCORE = ("sft/loss", "Loss")
TRAINING_FACTS = {
    "reward/em": "Exact match",
    "rollout/searches/mean": "Searches a trajectory",
    "reward/format_valid": "Valid format",
}


@dataclass(frozen=True)
class Measured:
    """A mean with its range, of which at least 0 and at most 1 can be drawn."""

    mean: float
    low: float | None = None  # None: there is no range
    high: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether mean and range lie between 0 and 1."""
        values = [value for value in (self.mean, self.low, self.high) if value is not None]
        return min(values) >= 0 and max(values) <= 1


@dataclass(frozen=True)
class Change:
    """A value before and after the training; None where it was not measured."""

    label: str
    before: Measured | None
    after: Measured | None


@dataclass(frozen=True)
class Result:
    """The result of the training of a series."""

    series: Series
    method: str
    measured_on: str  # which questions the scores are of
    range_text: str  # what the ranges are; empty where there are none
    score: Change | None  # None: the runs logged no score
    facts: tuple[Change, ...]
    steps: str  # such as "100 of 100"
    seconds: float | None  # of the steps, the mean over the runs; None: not logged
    seconds_in_all: float | None  # of the whole quickstart; None: the run is none


def results(series: Sequence[Series]) -> list[Result]:
    """Return the result of each series.

    Scores come from the evaluations in the runs' folders. Runs without any have the evaluations that they
    logged during the training, or else the scores of their training trajectories.
    """
    return [_result(group) for group in series]


def method_name(run: Run) -> str:
    """Return the name of a run's method, such as "CalibAdv", with the keys that make it a variant."""
    advantage = run.config.get("advantage")
    if not advantage or not run.values("reward/mean"):
        return COLD_START if run.values("sft/loss") else "Run"
    name = str(advantage.get("name"))
    method = METHODS.get(name, name)
    if name == "calibadv":
        variants = [f"{key}={advantage[key]}" for key in variant_keys(advantage)]
        variants += [f"{key}=false" for key in SWITCHES if advantage.get(key) is False]
        base = str(advantage.get("base", "grpo"))
        if base != "grpo":
            variants.insert(0, f"base {METHODS.get(base, base)}")
        if variants:
            method = f"{method} ({', '.join(variants)})"
    return method


def title(results: Sequence[Result]) -> str:
    """Return the title of the page: its methods, and what tells several series of one method apart."""
    methods = list(dict.fromkeys(result.method for result in results))
    names = [result.series.name for result in results]
    if len(results) == 1:
        run = results[0].series.runs[0]
        is_single = len(results[0].series.runs) == 1
        return f"{methods[0]}: {run_name(run.folder) if is_single else run.folder.resolve().parent.name}"
    if len(results) > MAX_TITLED:
        return f"{len(results)} configs: {', '.join(methods)}"
    if len(methods) == len(results):
        return " and ".join(methods) if len(methods) == 2 else ", ".join(methods)
    return f"{', '.join(methods)}: {', '.join(names)}"


def _result(series: Series) -> Result:
    run = series.runs[0]
    last = max(max(member.rows) for member in series.runs)
    planned = run.setting("learner.steps") if run.values("reward/mean") else None
    step_seconds = [_sum_finite(member.values("timing_s/step")) for member in series.runs]
    known_seconds = [seconds for seconds in step_seconds if seconds]
    partial_result = partial(
        Result,
        series=series,
        method=method_name(run),
        steps=f"{last} of {planned}" if planned else str(last),
        seconds=sum(known_seconds) / len(known_seconds) if known_seconds else None,
        seconds_in_all=_quickstart_seconds(series),
    )
    for measure in (_of_evaluations, _of_validations, _of_training):
        measured = measure(series)
        if measured is not None:
            return partial_result(**measured)
    return partial_result(measured_on="", range_text="", score=None, facts=())


def _of_evaluations(series: Series) -> dict[str, Any] | None:
    """Return the fields of a `Result` from the evaluations in the folders; None where there is none."""
    pairs = [_before_and_after(run.evaluations) for run in series.runs]
    pairs = [(before, after) for before, after in pairs if before or after]
    if not pairs:
        return None
    before_rows = [before for before, _ in pairs if before]
    after_rows = [after for _, after in pairs if after]
    shown = (after_rows or before_rows)[0]
    name = next((name for name in SCORES if name in shown.means), None)
    if name is None:
        return None

    def change(metric: str, label: str) -> Change:
        return Change(label, _measured(before_rows, metric), _measured(after_rows, metric))

    facts = [
        change(metric, label) for metric, label in FACTS.items() if metric in shown.means and metric != name
    ]
    score = change(name, SCORES[name])
    range_text = ""
    is_ranged = any(each and each.low is not None for each in (score.before, score.after))
    if is_ranged and len(pairs) > 1:
        range_text = f"lowest to highest of {len(pairs)} runs"
    elif is_ranged and shown.confidence:
        range_text = f"{100 * shown.confidence:g} % confidence interval"
    number = shown.means.get("questions")
    questions = f"{number:.0f} held-out questions" if number else "held-out questions"
    how = "greedy" if float(shown.temperature) == 0 else f"temperature {shown.temperature}"
    return {
        "measured_on": f"{questions}, {how}",
        "range_text": range_text,
        "score": score,
        "facts": tuple(facts),
    }


def _before_and_after(
    evaluations: Sequence[EvaluationRow],
) -> tuple[EvaluationRow | None, EvaluationRow | None]:
    """Return the rows of all questions, at the first temperature, before the training and after it.

    An evaluation is one before the training if its name says so; of the others, the last one counts.
    """
    rows = [row for row in evaluations if row.source == ALL and row.method == "agent"]
    if not rows:
        return None, None
    rows = [row for row in rows if row.temperature == rows[0].temperature]
    before = [row for row in rows if "before" in row.title]
    others = [row for row in rows if "before" not in row.title]
    row_before = before[-1] if before else None
    row_after = others[-1] if others else None
    return row_before, row_after


def _measured(rows: Sequence[EvaluationRow], metric: str) -> Measured | None:
    """Return the mean over the runs, with its interval if it is one run, else with the runs' range."""
    rows = [row for row in rows if metric in row.means]
    if not rows:
        return None
    if len(rows) == 1:
        interval = rows[0].intervals.get(metric)
        return Measured(rows[0].means[metric], *interval) if interval else Measured(rows[0].means[metric])
    return _over_runs([row.means[metric] for row in rows])


def _over_runs(values: Sequence[float]) -> Measured | None:
    """Return the mean of the runs' values with their range; None without a value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return Measured(mean, min(values), max(values)) if len(values) > 1 else Measured(mean)


def _of_validations(series: Series) -> dict[str, Any] | None:
    """Return the fields of a `Result` from the evaluations during the training; None where there is none."""
    for sampling, how in (("greedy", "greedy"), ("temperature_1", "temperature 1")):
        metric = f"eval/{ALL}/f1/{sampling}"
        if not any(run.values(metric) for run in series.runs):
            continue
        searches = f"eval/{ALL}/searches/{sampling}"
        return {
            "measured_on": f"held-out questions, {how}, first and last evaluation during the training",
            "range_text": _runs_text(series),
            "score": _ends(series, metric, "F1", num_ends=1),
            "facts": (_ends(series, searches, "Searches a question", num_ends=1),),
        }
    return None


def _of_training(series: Series) -> dict[str, Any] | None:
    """Return the fields of a `Result` from the training trajectories, or a cold start's loss."""
    metric, label = TRAINING_SCORE
    if not any(run.values(metric) for run in series.runs):
        metric, label = COLD_START_SCORE
    if not any(run.values(metric) for run in series.runs):
        return None
    facts = []
    for name, fact_label in TRAINING_FACTS.items():
        if any(run.values(name) for run in series.runs):
            facts.append(_ends(series, name, fact_label))
    kind = "training trajectories" if metric == TRAINING_SCORE[0] else "demonstrations"
    return {
        "measured_on": f"{kind}, first and last {NUM_ENDS} steps",
        "range_text": _runs_text(series),
        "score": _ends(series, metric, label),
        "facts": tuple(facts),
    }


def _runs_text(series: Series) -> str:
    return f"lowest to highest of {len(series.runs)} runs" if len(series.runs) > 1 else ""


def _ends(series: Series, metric: str, label: str, num_ends: int = NUM_ENDS) -> Change:
    """Return the means of a metric over the first and the last steps that logged a finite value."""
    before = []
    after = []
    for run in series.runs:
        values = [value for value in run.values(metric).values() if value is not None]
        if values:
            before.append(sum(values[:num_ends]) / len(values[:num_ends]))
            after.append(sum(values[-num_ends:]) / len(values[-num_ends:]))
    return Change(label, _over_runs(before), _over_runs(after))


def _sum_finite(values: Mapping[int, float | None]) -> float:
    return sum(value for value in values.values() if value is not None)


def _quickstart_seconds(series: Series) -> float | None:
    """Return the mean time of the runs' quickstarts; None where none is one."""
    totals = []
    for run in series.runs:
        path = run.folder / "quickstart.json"
        if path.is_file():
            total = read_json(path).get("seconds", {}).get("total")
            if not isinstance(total, int | float):
                raise UserError(f"{path}: no seconds.total, a number; remove the file")
            totals.append(float(total))
    return sum(totals) / len(totals) if totals else None
