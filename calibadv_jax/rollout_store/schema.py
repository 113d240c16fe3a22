"""The columns of rollouts/step_N.parquet: a row for each trajectory of a step, failed ones included.

Rows are in the order of the step's groups and their trajectories. Turn numbers in `repeated` count from 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

# A row of the file by the columns of SCHEMA, or a turn in it by the columns of TURN.
RecordRow = dict[str, Any]
# Log-probabilities of the response of each trajectory of each group, float32 [T].
Logprobs = list[list[np.ndarray | None]]

VERSION = "1"  # files of other versions are refused
FOLDER = "rollouts"  # name of the folder of all steps, in the folder of the run
_NAME = re.compile(r"step_(\d+)\.parquet")

_INT = pa.int32()
_INTS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_TEXTS = pa.list_(pa.string())

DOCUMENT = pa.struct(
    [("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("score", pa.float64())]
)
CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])  # arguments as a JSON object
TURN = pa.struct(
    [
        ("kind", pa.string()),  # answer, invalid, unfinished, or the name of an action such as search
        ("text", pa.string()),
        ("think", pa.string()),
        ("query", pa.string()),
        ("answer", pa.string()),
        ("stop_reason", pa.string()),
        ("is_refused", pa.bool_()),
        ("policy_versions", _INTS),
        ("token_ids", _INTS),
        ("logprobs", _FLOATS),  # log-probabilities of the sampler
        # Log-probabilities of the learner before the step's first update; null where they were not computed.
        ("learner_logprobs", _FLOATS),
        ("observation_ids", _INTS),
        ("observation_text", pa.string()),
        ("documents", pa.list_(DOCUMENT)),
        ("advantage_raw", pa.float64()),  # before any calibration; null where its trajectory failed
        ("advantage", pa.float64()),  # weight of its sampled tokens in the loss
        ("correctness", pa.float64()),
        ("softened", pa.bool_()),
        ("repeated", pa.string()),  # why the turn is a repetition; null if it is none, or was not judged
        ("found_silver", _TEXTS),
        ("golden_logprobs", pa.map_(pa.string(), pa.float64())),  # missing in older files of this version
        ("values", _FLOATS),  # values of the critic before each sampled token; null or missing without one
        ("teacher_logprobs", _FLOATS),  # log-probabilities of the teacher; null or missing without one
        # Of the protocol "tool_calls"; missing in older files of this version.
        ("calls", pa.list_(CALL)),
        ("flaw", pa.string()),  # why the turn is not valid; empty if it is
        ("is_context", pa.bool_()),  # not trained here; missing in older files
    ]
)
SCHEMA = pa.schema(
    [
        ("step", _INT),  # version of the policy that the step made
        ("group", _INT),  # position of the group in the step
        ("index", _INT),  # position of the trajectory in the group
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("data_source", pa.string()),
        ("golden_answers", _TEXTS),
        ("supporting_ids", _TEXTS),
        ("error", pa.string()),
        ("answer", pa.string()),
        ("answer_score", pa.float64()),
        ("format_valid", pa.bool_()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("policy_versions", _INTS),
        ("seconds", pa.float64()),
        ("advantage_raw", pa.float64()),  # null where the trajectory failed
        ("silver", pa.map_(pa.string(), pa.float64())),  # silver set of the group, on each of its rows
        ("prompt_ids", _INTS),
        ("first_opening", pa.string()),  # null or missing where the first turn begins as the others do
        ("is_demonstration", pa.bool_()),  # missing in older files
        ("continues", _INT),  # index of the trajectory whose first turns it continues; null: of none
        ("turns", pa.list_(TURN)),
    ]
)


class CreditColumn(NamedTuple):
    """How a column of TURN corresponds to an attribute of `GroupCredit`."""

    attribute: str  # holds a list or an array for each finished trajectory, with a value for each turn
    dtype: type[np.generic] | None  # dtype of the arrays; None for lists
    default: Any  # value in the turns of a failed trajectory


# Attributes of a trajectory that are columns and are read back.
TRAJECTORY_FIELDS = (
    "index",
    "error",
    "answer_score",
    "format_valid",
    "metrics",
    "seconds",
    "prompt_ids",
    "first_opening",
    "is_demonstration",
    "continues",
)
# Attributes of a turn that are arrays, with their dtypes.
TURN_ARRAYS = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "observation_ids": np.int32,
    "values": np.float32,
    "teacher_logprobs": np.float32,
}
# Columns of a turn with its credit.
CREDIT = {
    "advantage_raw": CreditColumn("before", np.float64, None),
    "advantage": CreditColumn("turns", np.float64, 0.0),
    "correctness": CreditColumn("correctness", np.float64, 0.0),
    "softened": CreditColumn("softened", np.bool_, False),
    "repeated": CreditColumn("repeated", None, None),
    "found_silver": CreditColumn("found_silver", None, ()),
}
# All other columns of a turn are attributes of it too.
TURN_FIELDS = tuple(
    field.name for field in TURN if field.name not in {*TURN_ARRAYS, *CREDIT, "learner_logprobs"}
)
# Parquet's names of the columns that take nearly all of the space.
BYTE_SPLIT_COLUMNS = [
    "turns.list.element.logprobs.list.element",
    "turns.list.element.learner_logprobs.list.element",
    "turns.list.element.values.list.element",
    "turns.list.element.teacher_logprobs.list.element",
]


def run_name(run: Path) -> str:
    """Return the last two folders of a run's path, by which its pages name it."""
    return "/".join(run.resolve().parts[-2:]).strip("/")


def kept_steps(run: Path) -> dict[int, Path]:
    """Return the files of a run's kept steps, by step, in ascending order."""
    steps: list[tuple[int, Path]] = []
    for path in (run / FOLDER).glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match:
            steps.append((int(match[1]), path))
    return dict(sorted(steps))
