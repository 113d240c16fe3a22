"""Evaluation: ``calibadv evaluate --config FILE [key.path=value …]``.

Answers the questions of data.eval and writes EM, F1, cover-EM, format validity and searches, by data source,
to evaluate.output. The policy is evaluate.policy; where that is empty, the newest checkpoint of run.dir;
where there is none, policy.path.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibadv_jax import cli
from calibadv_jax.config import Config
from calibadv_jax.data.questions import load_questions, select_evenly
from calibadv_jax.errors import UserError
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.model import PolicySource, build_model, find_folder, find_policy
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.seeds import random_state
from calibadv_jax.snapshots.checkpoint import has_checkpoint
from calibadv_jax.trajectory import Group, Trajectory
from calibadv_jax.wiring import open_rollouts

Report = dict[str, dict[str, dict[str, float]]]  # temperature -> data source (or "all") -> metric -> mean

METRICS = ("f1", "em", "cover_em", "format", "searches")


def run(config: Config) -> None:
    """Evaluates, prints a table and writes the report."""
    console = Console(config.log.progress)
    source = choose_policy(config)
    console.say(f"policy: {source}")
    report = evaluate_policy(config, source)
    output = Path(config.evaluate.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2))
    console.say(report_table(report))
    console.note(f"written to {output}")


def choose_policy(config: Config) -> PolicySource:
    """The policy that the config means.

    Raises:
        UserError: none is named, and the run has no checkpoint.
    """
    checkpoints = Path(config.run.dir) / "checkpoints"
    trained = str(checkpoints) if has_checkpoint(checkpoints) else ""
    chosen = config.evaluate.policy or trained or config.policy.path
    if not chosen:
        raise UserError(f"no policy: {checkpoints} has no checkpoint; set evaluate.policy or policy.path")
    return find_policy(find_folder(config, chosen, with_weights=True)[0])


def evaluate_policy(config: Config, source: PolicySource) -> Report:
    """Evaluates a policy on disk with the configured sampler and retriever."""
    model = build_model(config, str(source.model_folder))
    with (
        tempfile.TemporaryDirectory() as snapshots,
        open_rollouts(config, model, source.model_folder, Path(snapshots)) as rollouts,
    ):
        rollouts.load(0, source.params(model.policy, model.mesh))
        return evaluate(config, rollouts)


def evaluate(config: Config, rollouts: Rollouts) -> Report:
    """Answers the evaluation questions once for each temperature with the sampler's current policy."""
    questions = load_questions(config.data.eval)
    if config.data.eval_limit:
        questions = select_evenly(questions, config.data.eval_limit, seed=0)
    report: Report = {}
    for temperature in config.evaluate.temperatures:
        groups = rollouts.collect(
            questions,
            f"eval{temperature}",
            config.run.seed,
            temperature=temperature,
            group_size=config.evaluate.samples if temperature > 0 else 1,
        )
        rng = random_state(config.run.seed, 0, "evaluate")
        unshuffled = replace(config.reward, shuffle=False)  # the control experiment shuffles training only
        score_groups(groups, unshuffled, config.prompt.prepend_think, rng)
        report[f"{temperature:g}"] = summarise(groups)
    return report


def summarise(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Means by data source, and over all questions under "all".

    Trajectories that could not be finished are counted, and left out of the means; a source without any
    finished one has no means.
    """
    by_source: dict[str, list[Trajectory]] = {}
    for group in groups:
        for source in ("all", group.question.data_source):
            by_source.setdefault(source, []).extend(group.trajectories)
    return {source: _means(trajectories) for source, trajectories in by_source.items()}


def _means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rows = [one.metrics | {"searches": float(one.num_searches)} for one in trajectories if one.error is None]
    means = {name: float(np.mean([row[name] for row in rows])) for name in METRICS} if rows else {}
    counts = {"trajectories": float(len(rows)), "failed": float(len(trajectories) - len(rows))}
    return means | counts


def report_table(report: Report) -> str:
    """One row for each temperature and data source."""
    counts = ("trajectories", "failed")
    rows = [
        [
            temperature,
            source,
            *(values.get(name, "-") for name in METRICS),
            *(int(values[name]) for name in counts),
        ]
        for temperature, sources in report.items()
        for source, values in sources.items()
    ]
    return table(rows, ["temperature", "questions", *METRICS, *counts])


if __name__ == "__main__":
    cli.main("evaluate", run)
