"""Values of kept trajectories that the trainer does not log: F1 by data source, advantages, importance."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from calibadv_jax.contrib.report.runs import Run
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.rollout_store.schema import SCHEMA

Values = dict[str, dict[int, float | None]]  # metric -> step -> value

MAX_STEPS = 100  # kept steps of a run that are read
PERCENTILES = (1, 50, 99)  # percentiles of the importance weights
# Columns of the kept steps that are read.
COLUMNS = [
    "error",
    "data_source",
    "metrics",
    "turns.list.element.kind",
    "turns.list.element.logprobs",
    "turns.list.element.learner_logprobs",
    "turns.list.element.advantage_raw",
    "turns.list.element.advantage",
]


def rollout_values(run: Run) -> Values:
    """Return values from kept trajectories, under the names of figures.py; empty where nothing was kept."""
    values: Values = defaultdict(dict)
    for step in chosen_steps(list(run.rollouts)):
        try:
            with pq.ParquetFile(run.rollouts[step]) as file:
                table = file.read(columns=COLUMNS)
        except (pa.ArrowInvalid, OSError):  # cut off, damaged, or removed by a run in progress
            table = SCHEMA.empty_table()
        finished = table.filter(pc.is_null(table["error"]))
        turns = finished["turns"].combine_chunks().flatten()
        step_values = _f1_by_source(finished)
        step_values |= _mean_advantages(turns)
        step_values |= _importance_percentiles(turns)
        for name, value in step_values.items():
            values[name][step] = value
    return dict(values)


def chosen_steps(steps: list[int]) -> list[int]:
    """Return every k-th step, counted from the last one, so that at most MAX_STEPS are read."""
    stride = max(1, -(-len(steps) // MAX_STEPS))
    newest_first = sorted(steps, reverse=True)
    return sorted(newest_first[::stride])


def _f1_by_source(finished: pa.Table) -> dict[str, float]:
    """Return ``f1/SOURCE``: mean F1 of the data source."""
    scores_by_source: dict[str, list[float]] = defaultdict(list)
    for row in finished.select(["data_source", "metrics"]).to_pylist():
        scores = [score for name, score in row["metrics"] if name == "f1"]
        scores_by_source[row["data_source"]] += scores
    means = {}
    for source, scores in sorted(scores_by_source.items()):
        if scores:
            means[f"f1/{source}"] = float(np.mean(scores))
    return means


def _mean_advantages(turns: pa.StructArray) -> dict[str, float]:
    """Return ``turn_advantage/…``: means over the answer turns, and over search turns (any action is one)."""
    kinds = turns.field("kind")
    is_action = pc.invert(pc.is_in(kinds, pa.array(NO_ACTIONS)))
    searches = turns.filter(is_action)
    answers = turns.filter(pc.equal(kinds, "answer"))
    means = {
        "turn_advantage/search before": pc.mean(searches.field("advantage_raw")).as_py(),
        "turn_advantage/search after": pc.mean(searches.field("advantage")).as_py(),
        "turn_advantage/answer before": pc.mean(answers.field("advantage_raw")).as_py(),
        "turn_advantage/answer after": pc.mean(answers.field("advantage")).as_py(),
    }
    return {name: mean for name, mean in means.items() if mean is not None}


def _importance_percentiles(turns: pa.StructArray) -> dict[str, float]:
    """Return ``importance/pN``: percentiles of exp(learner's - sampler's log-probability), where computed."""
    scored = turns.filter(pc.is_valid(turns.field("learner_logprobs")))
    learner_logprobs = scored.field("learner_logprobs").flatten().to_numpy()
    sampler_logprobs = scored.field("logprobs").flatten().to_numpy()
    weights = np.exp(learner_logprobs.astype(np.float64) - sampler_logprobs)
    if len(weights) == 0:
        return {}
    return {f"importance/p{percent}": float(np.percentile(weights, percent)) for percent in PERCENTILES}
