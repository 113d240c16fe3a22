"""Evaluation: ``python -m calibadv_jax.evaluate --config FILE [key.path=value …]``.

Answers the questions of data.eval with the policy of evaluate.policy (default: policy.path) and writes
EM, F1, cover-EM, format validity and searches, by data source, to evaluate.output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibadv_jax import cli
from calibadv_jax.config import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibadv_jax.rollout.retriever_client import RetrieverClient
    from calibadv_jax.trajectory import Group
    from calibadv_jax.wiring import Rollouts

Report = dict[str, dict[str, dict[str, float]]]  # temperature -> data source (or "all") -> metric -> mean

METRICS = ("f1", "em", "cover_em", "format", "searches")


def run(config: Config) -> None:
    """Evaluates, prints a table and writes the report."""
    import json
    from pathlib import Path

    from calibadv_jax.metrics.console import Console
    from calibadv_jax.wiring import open_retriever, open_workers

    console = Console(config.log.progress)
    path = config.evaluate.policy or config.policy.path
    with open_retriever(config) as retriever, open_workers(config, Path(path)) as workers:
        report = evaluate_folder(config, path, retriever, workers)
    output = Path(config.evaluate.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2))
    console.say(report_table(report))
    console.note(f"written to {output}")


def evaluate_folder(config: Config, path: str, retriever: RetrieverClient, workers: Sequence[str]) -> Report:
    """Evaluates the policy of a HuggingFace folder; `workers` are URLs where sampler.name=vllm."""
    import tempfile
    from pathlib import Path

    from calibadv_jax.snapshots.publish import SnapshotStore
    from calibadv_jax.wiring import Rollouts, build_model, initial_params, snapshot_dtype

    model = build_model(config, path)
    with (
        tempfile.TemporaryDirectory() as folder,
        Rollouts(config, model, retriever, workers) as rollouts,
    ):
        store = SnapshotStore(Path(folder), keep=1, dtype=snapshot_dtype(config))
        snapshot = store.publish(
            0,
            initial_params(config, model, path),
            step=0,
            hf_config=model.hf_config,
            tokenizer_hash=model.tokenizer_hash,
        )
        rollouts.load(snapshot)
        return evaluate(config, rollouts)


def evaluate(config: Config, rollouts: Rollouts) -> Report:
    """Answers the evaluation questions once for each temperature with the sampler's current policy."""
    from dataclasses import replace

    from calibadv_jax.data.questions import load_questions, select_evenly
    from calibadv_jax.rewards.score import score_groups
    from calibadv_jax.wiring import random_state

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
        honest = replace(config.reward, shuffle=False)  # the control experiment shuffles training only
        score_groups(groups, honest, config.prompt.prepend_think, rng)
        report[f"{temperature:g}"] = summarise(groups)
    return report


def summarise(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Means by data source, and over all questions under "all"."""
    import numpy as np

    by_source: dict[str, list[dict[str, float]]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            row = trajectory.metrics | {"searches": float(trajectory.num_searches)}
            for source in ("all", group.question.data_source):
                by_source.setdefault(source, []).append(row)
    return {
        source: {name: float(np.mean([row[name] for row in rows])) for name in METRICS}
        | {"trajectories": float(len(rows))}
        for source, rows in by_source.items()
    }


def report_table(report: Report) -> str:
    """One row for each temperature and data source."""
    from calibadv_jax.metrics.console import table

    rows = [
        [temperature, source, *(values[name] for name in METRICS), int(values["trajectories"])]
        for temperature, sources in report.items()
        for source, values in sources.items()
    ]
    return table(rows, ["temperature", "questions", *METRICS, "trajectories"])


if __name__ == "__main__":
    cli.main(run, "calibadv_jax.evaluate", "Scores a policy on held-out questions.")
