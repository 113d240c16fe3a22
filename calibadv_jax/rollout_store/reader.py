"""Read the steps that a run kept: as groups with their credit, or as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.config import PromptConfig
from calibadv_jax.config.sections.rollout import TAGS
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import DEFAULT_ACTIONS, Document, Group, Question, Trajectory, Turn
from calibadv_jax.rollout_store import schema
from calibadv_jax.rollout_store.schema import Logprobs, RecordRow, kept_steps


@dataclass(frozen=True)
class KeptStep:
    """A step as it was trained.

    Attributes:
        step: Version of the policy that the step made.
        groups: Groups of the step.
        credits: Credit of the finished trajectories of each group, as `AdvantageResult.credits`.
        learner_logprobs: The learner's log-probabilities before the first update: float32 [T] for each
            finished trajectory of each group, None where they were not computed.
        metadata: See `read_metadata`.
    """

    step: int
    groups: list[Group]
    credits: list[GroupCredit]
    learner_logprobs: Logprobs
    metadata: dict[str, str]


def find_step(run: Path, step: int) -> Path:
    """Return the file of a kept step.

    Args:
        run: Folder of the run.
        step: Number of the step.

    Raises:
        UserError: The run did not keep the step.
    """
    steps = kept_steps(run)
    if step in steps:
        return steps[step]
    if not steps:
        raise UserError(f"{run}: no trajectories are kept there; a run with log.rollouts=parquet keeps them")
    nearest = min(steps, key=lambda number: abs(number - step))
    raise UserError(
        f"{run}: step {step} is not kept; the nearest kept one is {nearest} (see log.rollouts_keep)"
    )


def read_step(path: Path) -> KeptStep:
    """Read a kept step.

    Args:
        path: Its file: see `find_step`.

    Raises:
        UserError: The file is missing, damaged or of another schema version.
    """
    table = read_columns(path)
    rows = table.to_pylist(maps_as_pydicts="strict")
    metadata = _decode(table.schema.metadata)
    groups, credits, logprobs = from_rows(rows, shared_fields(metadata))
    step = rows[0]["step"] if rows else 0
    return KeptStep(step, groups, credits, logprobs, metadata)


@dataclass(frozen=True)
class SharedFields:
    """Attributes of `Trajectory` that all trajectories of a file share, and no column has.

    Attributes:
        opening: The environment's text before every turn but the first.
        actions: Names of the actions that were on.
        protocol: "tags" or "tool_calls".
    """

    opening: str = ""
    actions: tuple[str, ...] = DEFAULT_ACTIONS
    protocol: str = TAGS


def shared_fields(metadata: Mapping[str, str]) -> SharedFields:
    """Return what the trajectories of a file share.

    Args:
        metadata: The file's, see `read_metadata`.
    """
    prompt = json.loads(metadata["config"])["prompt"]
    opening = PromptConfig(prepend_think=prompt["prepend_think"]).opening
    actions = DEFAULT_ACTIONS
    if "actions" in metadata:
        actions = tuple(json.loads(metadata["actions"]))
    return SharedFields(metadata.get("opening", opening), actions, metadata.get("protocol", TAGS))


def read_columns(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a kept step.

    Args:
        path: Its file: see `find_step`.
        columns: Names of `schema.SCHEMA`, or parts of them such as ``turns.list.element.advantage``. None:
            all columns.

    Raises:
        UserError: The file is missing, damaged or of another schema version.
    """
    version = read_metadata(path).get("schema_version")
    if version != schema.VERSION:
        raise UserError(
            f"{path}: its schema_version is {version}, this program reads {schema.VERSION}; use the program"
            " that wrote it"
        )
    with _as_user_errors(path), pq.ParquetFile(path) as file:
        return file.read(columns=None if columns is None else list(columns))


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file, without its rows.

    Returns:
        A dictionary with the keys

        - schema_version
        - advantage and config: these sections as JSON
        - tokenizer: folder of the tokenizer, relative to the run's
        - seed: seed of the step's draws
        - actions: names of the actions as JSON; missing if search was the only one
        - protocol and opening: `Trajectory.protocol` and `Trajectory.opening`; missing with tags.

    Raises:
        UserError: The file is missing or damaged.
    """
    with _as_user_errors(path):
        return _decode(pq.read_schema(path).metadata)


@contextmanager
def _as_user_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading the file as UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file of trajectories; a run with log.rollouts keeps them"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); remove the file") from error


def _decode(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in (metadata or {}).items()}


def from_rows(
    rows: Sequence[RecordRow], shared: SharedFields = SharedFields()
) -> tuple[list[Group], list[GroupCredit], Logprobs]:
    """Return a step's groups, their credit and the learner's log-probabilities.

    Args:
        rows: Rows of the step in the order of the file, with maps as dictionaries.
        shared: What all trajectories share, see `shared_fields`.

    Returns:
        Groups, credits and log-probabilities as in `KeptStep`.
    """
    groups: list[Group] = []
    credits: list[GroupCredit] = []
    logprobs: Logprobs = []
    for _, group_rows in groupby(rows, lambda row: row["group"]):
        members = list(group_rows)
        question = _question(members[0])
        group = Group.from_attempts(question, [_trajectory(row, question, shared) for row in members])
        groups.append(group)
        finished_rows = [row for row in members if row["error"] is None]
        credits.append(_credit(group, finished_rows, silver=dict(members[0]["silver"])))
        finished = zip(finished_rows, group.trajectories, strict=True)
        logprobs.append([_logprobs(row, trajectory) for row, trajectory in finished])
    return groups, credits, logprobs


def _question(row: RecordRow) -> Question:
    return Question(
        row["question_id"],
        row["question"],
        tuple(row["golden_answers"]),
        row["data_source"],
        tuple(row["supporting_ids"]),
    )


def _trajectory(row: RecordRow, question: Question, shared: SharedFields) -> Trajectory:
    fields: dict[str, Any] = {name: row.get(name) for name in schema.TRAJECTORY_FIELDS}
    fields["prompt_ids"] = np.asarray(row["prompt_ids"], np.int32)
    fields["metrics"] = dict(row["metrics"])
    fields["is_demonstration"] = bool(fields["is_demonstration"])  # older files lack the column
    turns = [_turn(turn) for turn in row["turns"]]
    return Trajectory(
        question,
        turns=turns,
        opening=shared.opening,
        actions=shared.actions,
        protocol=shared.protocol,
        **fields,
    )


def _turn(row: RecordRow) -> Turn:
    # `get`, because older files and JSON lack some columns.
    fields: dict[str, Any] = {name: row.get(name) for name in schema.TURN_FIELDS}
    for name, dtype in schema.TURN_ARRAYS.items():
        values = row.get(name)
        # JSON has null in place of a number that is not finite; it becomes NaN.
        fields[name] = None if values is None else np.asarray(values, dtype)
    fields["is_context"] = bool(fields["is_context"])  # older files lack the column
    fields["documents"] = tuple(Document(**document) for document in row["documents"])
    fields["policy_versions"] = tuple(row["policy_versions"])
    fields["golden_logprobs"] = dict(row.get("golden_logprobs") or {})
    fields["calls"] = calls_of_turn(row)
    fields["flaw"] = row.get("flaw") or ""
    return Turn(**fields)


def calls_of_turn(row: RecordRow) -> tuple[ToolCall, ...]:
    """Return the tool calls of a turn, given its columns; older files lack that of the calls."""
    calls = []
    for call in row.get("calls") or ():
        calls.append(ToolCall(call["name"], json.loads(call["arguments"])))
    return tuple(calls)


def _credit(group: Group, finished_rows: Sequence[RecordRow], silver: dict[str, float]) -> GroupCredit:
    """Return the credit of a group, given the rows of its finished trajectories."""
    fields: dict[str, list[Any]] = {}
    for name, column in schema.CREDIT.items():
        values: list[Any] = []  # values of the turns, for each trajectory
        for row in finished_rows:
            turn_values = [turn[name] for turn in row["turns"]]
            values.append(turn_values if column.dtype is None else np.array(turn_values, column.dtype))
        fields[column.attribute] = values
    fields["found_silver"] = [[tuple(ids) for ids in turns] for turns in fields["found_silver"]]
    raw = np.array([row["advantage_raw"] for row in finished_rows], np.float64)
    return GroupCredit(group, raw, silver=silver, **fields)


def _logprobs(row: RecordRow, trajectory: Trajectory) -> np.ndarray | None:
    """Return float32 [T] of the response, 0 on observation tokens; None where none were kept."""
    kept = [turn["learner_logprobs"] for turn in row["turns"]]
    if not kept or None in kept:
        return None
    logprobs = np.zeros(len(trajectory.mask), np.float32)
    logprobs[trajectory.mask] = np.concatenate([np.asarray(values, np.float32) for values in kept])
    return logprobs
