"""The finished runs of evidence.sh, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.report.runs import IGNORED, Run, flatten, read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.evaluation.score_tables import ALL, AVERAGE
from experiments.arms import METHODS, Arm, parse_name, plan
from experiments.measures import (
    FORMAT,
    REWARD,
    Values,
    collapse_step,
    finite,
    mean_at_the_end,
    quantities,
)

TEMPERATURE = "1"
# What may differ between the runs of a table: seeds, places, and how fast they are computed.
FREE = (
    *IGNORED,
    "world",
    "sft",
    "data.train",
    "policy.path",
    "policy.tokenizer",
    "policy.attention_chunk",
    "retriever.corpus",
    "retriever.index",
    "sampler",
    "learner.pack_length",
    "learner.microbatch_rows",
)


@dataclass(frozen=True)
class Result:
    """A finished run."""

    arm: Arm
    run: Run
    final_f1: float  # of the last step's policy on all held-out questions

    @property
    def seed(self) -> int:
        return int(self.run.setting("run.seed"))

    @cached_property
    def reward(self) -> Values:
        return finite(self.run.values(REWARD))

    @cached_property
    def collapse(self) -> int | None:
        """Return the step of the collapse; None for a run that did not collapse."""
        return collapse_step(self.reward, finite(self.run.values(FORMAT)))

    @property
    def best_f1(self) -> float:
        """Return the largest of the evaluations during training and the last one."""
        names = [f"eval/{source}/f1/temperature_{TEMPERATURE}" for source in (AVERAGE, ALL)]
        logged = next((values for name in names if (values := finite(self.run.values(name)))), {})
        return max([self.final_f1, *logged.values()])

    def at_the_end(self, metric: str) -> float | None:
        """Return the mean over the last ten steps that have the metric."""
        return mean_at_the_end(self.run.values(metric))

    @cached_property
    def quantities(self) -> dict[str, Values]:
        return quantities(self.run)


Results = Mapping[Arm, Sequence[Result]]  # by seed


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the report of an evaluation; empty where there is none, or where its file is cut off."""
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except UserError:  # the evaluation is not finished, and its job runs again
        return {}


def evaluated_step(report: Mapping[str, Any]) -> int:
    """Return the step of the policy that an evaluation.json has scored at TEMPERATURE, or -1."""
    if TEMPERATURE not in report.get("scores", ()):
        return -1
    step = report["policy"]["step"]
    return -1 if step is None else int(step)


def held_out_f1(report: Mapping[str, Any]) -> float:
    """Return the mean over the kinds of questions, each of which counts the same."""
    sources = report["scores"][TEMPERATURE]
    return float(sources.get(AVERAGE, sources[ALL])["f1"])


def read_results(output: Path, names: Sequence[str] | None = None) -> Results:
    """Return the finished runs by arm, in the order of the plan.

    Args:
        names: of the arms that are wanted; None: all but those of the short version.

    Raises:
        UserError: there is none, or one has other settings than its arm, or than the others.
    """
    results: list[Result] = []
    for arm in sorted(_arms(output, names), key=_place):
        reports = {
            path.parent: read_evaluation(path)
            for path in (output / "runs" / arm.name).glob("seed-*/evaluation.json")
        }
        folders = [folder for folder, report in reports.items() if evaluated_step(report) > 0]
        results += sorted(
            (
                Result(arm, run, held_out_f1(reports[run.folder]))
                for run in read_runs(folders)
                if evaluated_step(reports[run.folder]) == run.setting("learner.steps") == max(run.rows)
            ),
            key=lambda result: result.seed,
        )
    if not results:
        raise UserError(
            f"{output}: no finished run in {output}/runs; bash experiments/evidence.sh makes them"
        )
    check_settings(results)
    return {
        arm: [result for result in results if result.arm == arm]
        for arm in dict.fromkeys(result.arm for result in results)
    }


def _arms(output: Path, names: Sequence[str] | None) -> list[Arm]:
    parsed = [parse_name(folder.name) for folder in (output / "runs").glob("*")]
    arms = [arm for arm in parsed if arm is not None]
    return [arm for arm in arms if (not arm.is_short if names is None else arm.name in names)]


def _place(arm: Arm) -> tuple[int, int]:
    order = [job.arm for job in plan("all", [0], arm.lr)]
    return (order.index(arm) if arm in order else len(order)), list(METHODS).index(arm.method)


def check_settings(results: Sequence[Result]) -> None:
    """Check that the runs of an arm differ in seeds only, and the arms in the keys of their names.

    A key that only one of two runs knows was added between them, and is not compared.

    Raises:
        UserError: with the first run that differs, and the keys.
    """
    first = _settings(results[0])
    for result in results:
        own, settings = result.arm.overrides(), _settings(result)
        keys = {setting.partition("=")[0] for setting in own}
        wrong = [setting for setting in own if not _holds(setting, settings)]
        wrong += [key for key in first.keys() & settings.keys() - keys if first[key] != settings[key]]
        if wrong:
            raise UserError(
                f"{result.run.folder}: other settings than its name says, or than {results[0].run.folder} has"
                f" ({', '.join(sorted(wrong))}); move it elsewhere"
            )


def _settings(result: Result) -> dict[str, Any]:
    free = tuple(f"{name}." for name in FREE)
    return {key: value for key, value in flatten(result.run.config).items() if not f"{key}.".startswith(free)}


def _holds(override: str, settings: Mapping[str, Any]) -> bool:
    key, _, text = override.partition("=")
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text == str(value).lower()
    return float(text) == value


def cold_starts(output: Path) -> dict[int, float]:
    """Return seed -> held-out F1 of its cold start."""
    scores = {}
    for path in output.glob("cold/seed-*/evaluation.json"):
        report = read_evaluation(path)
        if TEMPERATURE in report.get("scores", ()):
            scores[int(path.parent.name.removeprefix("seed-"))] = held_out_f1(report)
    return dict(sorted(scores.items()))
