"""Write a run's trajectories with their credit: one file a step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.config import Config
from calibadv_jax.config.load import kept_values
from calibadv_jax.config.sections.rollout import TAGS
from calibadv_jax.core.files import PARTIAL, atomic_write
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import DEFAULT_ACTIONS, Group, Question, Trajectory, Turn
from calibadv_jax.rollout_store import schema
from calibadv_jax.rollout_store.schema import Logprobs, RecordRow, kept_steps


class RolloutWriter:
    """Keep the newest `log.rollouts_keep` steps of a run, and every `log.rollouts_every`-th older one.

    Args:
        folder: Folder of the run.
        config: Config of the run; it is stored in each file.
        start_step: First step that will be written. Files of this step and of later ones are removed.
    """

    def __init__(self, folder: Path, config: Config, start_step: int) -> None:
        self.folder = folder
        self.config = config
        self.log = config.log
        self._config_json = json.dumps(kept_values(config))
        self.rewind(start_step)

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        credits: Sequence[GroupCredit],
        learner_logprobs: Logprobs,
        seed: int,
    ) -> dict[str, float]:
        """Write one step, and remove older ones.

        Args:
            step: Version of the policy that the step made.
            groups: Scored groups of the step.
            credits: Credit of the finished trajectories of each group.
            learner_logprobs: The learner's log-probabilities of the finished trajectories of each group.
            seed: Seed of the step's draws.

        Returns:
            The size of the file in bytes as a metric; no metric if log.rollouts is none.
        """
        if self.log.rollouts == "none":
            return {}
        path = self.folder / schema.FOLDER / f"step_{step}.parquet"
        rows = to_rows(step, groups, credits, learner_logprobs)
        table = pa.Table.from_pylist(rows, schema=schema.SCHEMA.with_metadata(self._metadata(groups, seed)))
        with atomic_write(path) as partial:
            # Without dictionaries: few values repeat, so they cost ten times the time and a third more space.
            pq.write_table(
                table,
                partial,
                compression="zstd",
                use_dictionary=False,
                use_byte_stream_split=schema.BYTE_SPLIT_COLUMNS,
            )
        for kept_step, kept_path in kept_steps(self.folder).items():
            if self._has_expired(kept_step, step):
                kept_path.unlink(missing_ok=True)
        return {"perf/record_bytes": float(path.stat().st_size)}

    def rewind(self, step: int) -> None:
        """Remove the steps from `step` on, which will be written again, and partial files."""
        for kept_step, path in kept_steps(self.folder).items():
            if kept_step >= step:
                path.unlink(missing_ok=True)
        for path in (self.folder / schema.FOLDER).glob(f".step_*{PARTIAL}"):
            path.unlink()

    def _has_expired(self, kept_step: int, newest_step: int) -> bool:
        keep = self.log.rollouts_keep
        every = self.log.rollouts_every
        is_old = bool(keep) and kept_step <= newest_step - keep
        is_milestone = bool(every) and kept_step % every == 0
        return is_old and not is_milestone

    def _metadata(self, groups: Sequence[Group], seed: int) -> dict[str, str]:
        """Return the metadata of a file: see `reader.read_metadata`."""
        metadata = {}
        trajectory = _any_trajectory(groups)
        if trajectory.actions != DEFAULT_ACTIONS:
            metadata["actions"] = json.dumps(trajectory.actions)
        if trajectory.protocol != TAGS:
            metadata["protocol"] = trajectory.protocol
            metadata["opening"] = trajectory.opening
        metadata["schema_version"] = schema.VERSION
        metadata["advantage"] = json.dumps(dataclasses.asdict(self.config.advantage))
        metadata["tokenizer"] = "policy"  # folder of the tokenizer, relative to the run's
        metadata["config"] = self._config_json
        metadata["seed"] = str(seed)
        return metadata


def _any_trajectory(groups: Sequence[Group]) -> Trajectory:
    """Return a trajectory: actions, opening and protocol are the same in all trajectories of a run."""
    for group in groups:
        for trajectory in group.attempts:
            return trajectory
    return Trajectory(Question("", "", (), ""), np.zeros(0, np.int32))


def to_rows(
    step: int, groups: Sequence[Group], credits: Sequence[GroupCredit], learner_logprobs: Logprobs
) -> list[RecordRow]:
    """Return the rows of a step, with the columns of `schema.SCHEMA`; arrays stay arrays.

    Args:
        step: Version of the policy that the step made.
        groups: Scored groups of the step.
        credits: Credit of the finished trajectories of each group.
        learner_logprobs: The learner's log-probabilities of the finished trajectories of each group.
    """
    rows: list[RecordRow] = []
    credited_groups = zip(groups, credits, learner_logprobs, strict=True)
    for number, (group, credit, group_logprobs) in enumerate(credited_groups):
        group_rows = [_row(trajectory) for trajectory in group.failed]
        finished = zip(group.trajectories, group_logprobs, strict=True)
        for position, (trajectory, logprobs) in enumerate(finished):
            row = _row(trajectory)
            row["advantage_raw"] = float(credit.raw[position])
            _add_credit(row["turns"], credit, position)
            if logprobs is not None:
                _add_logprobs(row["turns"], logprobs)
            group_rows.append(row)
        for row in group_rows:
            row["step"] = step
            row["group"] = number
            row["silver"] = credit.silver
        rows += sorted(group_rows, key=lambda row: row["index"])
    return rows


def _row(trajectory: Trajectory) -> RecordRow:
    """Return the columns of a trajectory that do not depend on its group."""
    row: RecordRow = {name: getattr(trajectory, name) for name in schema.TRAJECTORY_FIELDS}
    row["answer"] = trajectory.answer
    row["policy_versions"] = trajectory.policy_versions
    question = trajectory.question
    row["question_id"] = question.id
    row["question"] = question.text
    row["data_source"] = question.data_source
    row["golden_answers"] = question.golden_answers
    row["supporting_ids"] = question.supporting_ids
    row["turns"] = [_turn_row(turn) for turn in trajectory.turns]
    row["advantage_raw"] = None
    return row


def _turn_row(turn: Turn) -> RecordRow:
    """Return the columns of a turn, with the credit of a failed trajectory."""
    row: RecordRow = {}
    for name in (*schema.TURN_FIELDS, *schema.TURN_ARRAYS):
        row[name] = getattr(turn, name)
    for name, column in schema.CREDIT.items():
        row[name] = column.default
    row["learner_logprobs"] = None
    row["documents"] = [vars(document) for document in turn.documents]
    row["calls"] = [_call_row(call) for call in turn.calls]
    return row


def _call_row(call: ToolCall) -> RecordRow:
    """Return the columns of a tool call."""
    return {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}


def _add_credit(turns: list[RecordRow], credit: GroupCredit, position: int) -> None:
    """Set the credit of a finished trajectory's turns; `position` is its place among the finished ones."""
    for name, column in schema.CREDIT.items():
        values = getattr(credit, column.attribute)
        if values:  # empty where the algorithm does not judge turns
            for turn, value in zip(turns, values[position], strict=True):
                turn[name] = value


def _add_logprobs(turns: list[RecordRow], logprobs: np.ndarray) -> None:
    """Set the learner's log-probabilities of the turns, given those of the whole response, float32 [T]."""
    start = 0
    for turn in turns:
        turn["learner_logprobs"] = logprobs[start : start + len(turn["token_ids"])]
        start += len(turn["token_ids"]) + len(turn["observation_ids"])
