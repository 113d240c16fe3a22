"""Figures that the metrics do not hold, from the kept trajectories of a run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from calibadv_jax.contrib.report.runs import Run
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.record.schema import SCHEMA

MAX_STEPS = 100  # read of a run, evenly spaced, the last one among them
PERCENTILES = (1, 50, 99)
OF_TURNS = ("kind", "logprobs", "learner_logprobs", "advantage_raw", "advantage")
COLUMNS = ["error", "data_source", "metrics", *(f"turns.list.element.{name}" for name in OF_TURNS)]


def rollout_values(run: Run) -> dict[str, dict[int, float | None]]:
    """Metric -> step -> value, under the names that figures.py gives them; empty where nothing was kept.

    f1/SOURCE: mean F1 of the data source.
    turn_advantage/…: mean over the search or answer turns, before and after the calibration.
    importance/pN: percentile of exp(learner's - sampler's log-probability) over sampled tokens, where the
        learner's were computed.
    """
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for step in chosen_steps(list(run.rollouts)):
        table = _read(run.rollouts[step])
        finished = table.filter(pc.is_null(table["error"]))
        turns = finished["turns"].combine_chunks().flatten()
        for name, value in (_f1(finished) | _advantages(turns) | _importance(turns)).items():
            found[name][step] = value
    return dict(found)


def chosen_steps(steps: list[int]) -> list[int]:
    """Every k-th step, counted from the last one, so that at most MAX_STEPS are read."""
    stride = max(1, -(-len(steps) // MAX_STEPS))
    return sorted(steps)[::-1][::stride][::-1]


def _read(path: Path) -> pa.Table:
    """COLUMNS; no rows where the file was cut off."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=COLUMNS)
    except pa.ArrowInvalid:
        return SCHEMA.empty_table()


def _f1(finished: pa.Table) -> dict[str, float]:
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, metrics in zip(
        finished["data_source"].to_pylist(), finished["metrics"].to_pylist(), strict=True
    ):
        if (score := dict(metrics).get("f1")) is not None:
            by_source[source].append(score)
    return {f"f1/{source}": float(np.mean(scores)) for source, scores in sorted(by_source.items())}


def _advantages(turns: pa.StructArray) -> dict[str, float]:
    """Other actions than search count as searches; turns that are neither action nor answer are left out."""
    values = {}
    kinds = turns.field("kind")
    is_action = pc.invert(pc.is_in(kinds, pa.array(NO_ACTIONS)))
    for kind, members in (("search", is_action), ("answer", pc.equal(kinds, "answer"))):
        some = turns.filter(members)
        for when, field in (("before", "advantage_raw"), ("after", "advantage")):
            mean = pc.mean(some.field(field)).as_py()
            if mean is not None:
                values[f"turn_advantage/{kind} {when}"] = mean
    return values


def _importance(turns: pa.StructArray) -> dict[str, float]:
    known = turns.filter(pc.is_valid(turns.field("learner_logprobs")))
    ours, theirs = (known.field(name).flatten().to_numpy() for name in ("learner_logprobs", "logprobs"))
    if not len(ours):
        return {}
    weights = np.exp(ours.astype(np.float64) - theirs)
    return {f"importance/p{n}": float(np.percentile(weights, n)) for n in PERCENTILES}
