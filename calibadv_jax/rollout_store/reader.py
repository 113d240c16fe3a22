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
from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.trajectory import SEARCH_ALONE, Document, Group, Question, Trajectory, Turn
from calibadv_jax.rollout_store import schema
from calibadv_jax.rollout_store.schema import Logprobs, RecordRow, kept_steps


@dataclass(frozen=True)
class KeptStep:
    step: int  # version of the policy that the step made
    groups: list[Group]
    credits: list[GroupCredit]  # of the finished trajectories of each group, as AdvantageResult.credits
    learner_logprobs: Logprobs  # float32 [T] a trajectory before the first update; None where not computed
    metadata: dict[str, str]  # see `read_metadata`


def find_step(run: Path, step: int) -> Path:
    """Return the file of a kept step; UserError if the run did not keep it."""
    steps = kept_steps(run)
    if step in steps:
        return steps[step]
    if not steps:
        raise UserError(f"{run}: no trajectories are kept there; a run with log.rollouts=parquet keeps them")
    nearest = f"the nearest kept one is {min(steps, key=lambda number: abs(number - step))}"
    raise UserError(f"{run}: step {step} is not kept; {nearest} (see log.rollouts_keep)")


def read_step(path: Path) -> KeptStep:
    """Read a kept step; UserError if the file is missing, damaged or of another version."""
    table = read_columns(path)
    rows, metadata = table.to_pylist(maps_as_pydicts="strict"), _text(table.schema.metadata)
    groups, credits, logprobs = from_rows(rows, *opening_and_actions(metadata))
    return KeptStep(rows[0]["step"] if rows else 0, groups, credits, logprobs, metadata)


def opening_and_actions(metadata: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return `Trajectory.opening` and `Trajectory.actions` of a file's trajectories, given its metadata."""
    prompt = json.loads(metadata["config"])["prompt"]
    opening = PromptConfig(prepend_think=prompt["prepend_think"]).opening
    return opening, tuple(json.loads(metadata.get("actions", json.dumps(SEARCH_ALONE))))


def read_columns(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a kept step; default: all. Raises UserError as `read_step`.

    `columns` are names of `schema.SCHEMA`, or parts of them such as ``turns.list.element.advantage``.
    """
    version = read_metadata(path).get("schema_version")
    if version != schema.VERSION:
        fault = f"its schema_version is {version}, this program reads {schema.VERSION}"
        raise UserError(f"{path}: {fault}; use the program that wrote it")
    with _readable(path), pq.ParquetFile(path) as file:
        return file.read(columns=None if columns is None else list(columns))


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file, without its rows. Raises UserError as `read_step`.

    Keys: schema_version; advantage and config as JSON; tokenizer: its folder, relative to the run's; seed: of
    the step's draws; actions as JSON, if search was not the only one.
    """
    with _readable(path):
        return _text(pq.read_schema(path).metadata)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        fault = "no such file of trajectories; a run with log.rollouts keeps them"
        raise UserError(f"{path}: {fault}") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); remove the file") from error


def _text(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in (metadata or {}).items()}


def from_rows(
    rows: Sequence[RecordRow], opening: str, actions: tuple[str, ...] = SEARCH_ALONE
) -> tuple[list[Group], list[GroupCredit], Logprobs]:
    """Return a step's groups, their credit and the learner's log-probabilities.

    The `rows` have maps as dictionaries; `opening` and `actions` are those of every `Trajectory`.
    """
    groups, credits, logprobs = [], [], []
    for _, chosen in groupby(rows, lambda row: row["group"]):
        members = list(chosen)
        question = _question(members[0])
        group = Group.of(question, [_trajectory(row, question, opening, actions) for row in members])
        finished = [row for row in members if row["error"] is None]
        groups.append(group)
        credits.append(_credit(group, finished, dict(members[0]["silver"])))
        logprobs.append([_logprobs(*pair) for pair in zip(finished, group.trajectories, strict=True)])
    return groups, credits, logprobs


def _question(row: RecordRow) -> Question:
    answers, supporting = tuple(row["golden_answers"]), tuple(row["supporting_ids"])
    return Question(row["question_id"], row["question"], answers, row["data_source"], supporting)


def _trajectory(row: RecordRow, question: Question, opening: str, actions: tuple[str, ...]) -> Trajectory:
    fields: dict[str, Any] = {name: row.get(name) for name in schema.TRAJECTORY_FIELDS}
    fields |= {"prompt_ids": np.asarray(row["prompt_ids"], np.int32), "metrics": dict(row["metrics"])}
    turns = [_turn(turn) for turn in row["turns"]]
    return Trajectory(question, turns=turns, opening=opening, actions=actions, **fields)


def _turn(row: RecordRow) -> Turn:
    fields: dict[str, Any] = {name: row.get(name) for name in schema.TURN_FIELDS}
    for name, dtype in schema.TURN_ARRAYS.items():
        values = row.get(name)
        # JSON has null where a number is not finite: NaN
        fields[name] = None if values is None else np.asarray(values, dtype)
    fields["documents"] = tuple(Document(**document) for document in row["documents"])
    fields["policy_versions"] = tuple(row["policy_versions"])
    fields["golden_logprobs"] = dict(row.get("golden_logprobs") or {})
    return Turn(**fields)


def _credit(group: Group, finished: Sequence[RecordRow], silver: dict[str, float]) -> GroupCredit:
    fields: dict[str, list[Any]] = {}
    for column, (attribute, dtype, _) in schema.CREDIT.items():
        values = [[turn[column] for turn in row["turns"]] for row in finished]
        fields[attribute] = [np.array(turns, dtype) for turns in values] if dtype else values
    fields["found_silver"] = [[tuple(ids) for ids in turns] for turns in fields["found_silver"]]
    raw = np.array([row["advantage_raw"] for row in finished], np.float64)
    return GroupCredit(group, raw, silver=silver, **fields)


def _logprobs(row: RecordRow, trajectory: Trajectory) -> np.ndarray | None:
    """Return float32 [T] of the response, 0 on observation tokens; None where none were kept."""
    kept = [turn["learner_logprobs"] for turn in row["turns"]]
    if not kept or None in kept:
        return None
    logprobs = np.zeros(len(trajectory.mask), np.float32)
    logprobs[trajectory.mask] = np.concatenate([np.asarray(values, np.float32) for values in kept])
    return logprobs
