"""Figures that the metrics do not hold, from the kept trajectories of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from calibadv_jax.report.runs import Run

MAX_STEPS = 100  # read of a run, evenly spaced, the last one among them
PERCENTILES = (1, 50, 99)
# What is read of a trajectory; the files hold more.
TURN = pa.struct(
    [
        ("kind", pa.string()),
        ("logprobs", pa.list_(pa.float32())),  # the sampler's
        ("learner_logprobs", pa.list_(pa.float32())),  # null where they were not computed
        ("advantage_raw", pa.float64()),
        ("advantage", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("error", pa.string()),
        ("data_source", pa.string()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("turns", pa.list_(TURN)),
    ]
)


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
    """The columns of SCHEMA. A file, or a last line of one, that a killed run left unfinished is no row."""
    if path.suffix == ".parquet":
        leaves = [f"turns.list.element.{field.name}" for field in TURN]
        try:
            with pq.ParquetFile(path) as file:
                return file.read(columns=[name for name in SCHEMA.names if name != "turns"] + leaves)
        except pa.ArrowInvalid:
            return SCHEMA.empty_table()
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]
    # The first line may be about the file. Turns may lack what is kept since; it is null then.
    rows = [row for row in map(json.loads, complete) if "data_source" in row]
    return pa.Table.from_pylist(
        [row | {"metrics": list(row["metrics"].items())} for row in rows], schema=SCHEMA
    )


def _f1(finished: pa.Table) -> dict[str, float]:
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, metrics in zip(
        finished["data_source"].to_pylist(), finished["metrics"].to_pylist(), strict=True
    ):
        if (score := dict(metrics).get("f1")) is not None:
            by_source[source].append(score)
    return {f"f1/{source}": float(np.mean(scores)) for source, scores in sorted(by_source.items())}


def _advantages(turns: pa.StructArray) -> dict[str, float]:
    """Turns that are neither a search nor an answer are left out."""
    values = {}
    for kind in ("search", "answer"):
        some = turns.filter(pc.equal(turns.field("kind"), kind))
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
