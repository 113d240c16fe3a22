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
from calibadv_jax.core.files import PARTIAL, atomic_write
from calibadv_jax.core.trajectory import SEARCH_ALONE, Group, Trajectory, Turn
from calibadv_jax.rollout_store import schema
from calibadv_jax.rollout_store.schema import Logprobs, RecordRow, kept_steps


class RolloutWriter:
    """Keep the newest `log.rollouts_keep` steps of a run, and every `log.rollouts_every`-th older one.

    Files of `start_step` and of later steps are removed.
    """

    def __init__(self, folder: Path, config: Config, start_step: int) -> None:
        self.folder, self.config, self.log = folder, config, config.log
        self._config = json.dumps(kept_values(config))
        self.rewind(start_step)

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        credits: Sequence[GroupCredit],
        learner_logprobs: Logprobs,
        seed: int,  # of the step's draws
    ) -> dict[str, float]:
        """Write one step, and remove older ones; return the file's size as a metric, if there is a file."""
        if self.log.rollouts == "none":
            return {}
        path = self.folder / schema.FOLDER / f"step_{step}.parquet"
        rows = to_rows(step, groups, credits, learner_logprobs)
        table = pa.Table.from_pylist(rows, schema=schema.SCHEMA.with_metadata(self._metadata(groups, seed)))
        with atomic_write(path) as partial:
            # Dictionaries of values that hardly repeat cost ten times the time and a third more room.
            pq.write_table(
                table,
                partial,
                compression="zstd",
                use_dictionary=False,
                use_byte_stream_split=schema.LOGPROBS,
            )
        keep, every = self.log.rollouts_keep, self.log.rollouts_every
        for number, old in kept_steps(self.folder).items():
            if keep and number <= step - keep and (not every or number % every):
                old.unlink(missing_ok=True)
        return {"perf/record_bytes": float(path.stat().st_size)}

    def rewind(self, step: int) -> None:
        """Remove the steps from `step` on, which will be written again, and partial files."""
        for number, path in kept_steps(self.folder).items():
            if number >= step:
                path.unlink(missing_ok=True)
        for path in (self.folder / schema.FOLDER).glob(f".step_*{PARTIAL}"):
            path.unlink()

    def _metadata(self, groups: Sequence[Group], seed: int) -> dict[str, str]:
        attempts = (attempt for group in groups for attempt in group.attempts)
        actions = next((attempt.actions for attempt in attempts), SEARCH_ALONE)
        named = {} if actions == SEARCH_ALONE else {"actions": json.dumps(actions)}
        return named | {
            "schema_version": schema.VERSION,
            "advantage": json.dumps(dataclasses.asdict(self.config.advantage)),
            "tokenizer": "policy",  # folder of the tokenizer, relative to the run's
            "config": self._config,
            "seed": str(seed),
        }


def to_rows(
    step: int, groups: Sequence[Group], credits: Sequence[GroupCredit], learner_logprobs: Logprobs
) -> list[RecordRow]:
    """Return the rows of a step; arrays stay arrays. The log-probabilities are of finished trajectories."""
    rows = []
    for number, (group, credit, logprobs) in enumerate(zip(groups, credits, learner_logprobs, strict=True)):
        shared = {"step": step, "group": number, "silver": credit.silver}
        of_group = [_row(trajectory) | shared for trajectory in group.failed]
        for position, (trajectory, values) in enumerate(zip(group.trajectories, logprobs, strict=True)):
            row = _row(trajectory) | shared | {"advantage_raw": float(credit.raw[position])}
            _add_credit(row["turns"], credit, position)
            if values is not None:
                _add_logprobs(row["turns"], values)
            of_group.append(row)
        rows += sorted(of_group, key=lambda row: row["index"])
    return rows


def _row(trajectory: Trajectory) -> RecordRow:
    question = trajectory.question
    names = (*schema.TRAJECTORY_FIELDS, "answer", "policy_versions")
    return {name: getattr(trajectory, name) for name in names} | {
        "question_id": question.id,
        "question": question.text,
        "data_source": question.data_source,
        "golden_answers": question.golden_answers,
        "supporting_ids": question.supporting_ids,
        "turns": [_turn_row(turn) for turn in trajectory.turns],
        "advantage_raw": None,
    }


def _turn_row(turn: Turn) -> RecordRow:
    row = {name: getattr(turn, name) for name in (*schema.TURN_FIELDS, *schema.TURN_ARRAYS)}
    row |= {column: default for column, (_, _, default) in schema.CREDIT.items()}
    return row | {"learner_logprobs": None, "documents": [vars(document) for document in turn.documents]}


def _add_credit(turns: list[RecordRow], credit: GroupCredit, position: int) -> None:
    for column, (attribute, _, _) in schema.CREDIT.items():
        if of_group := getattr(credit, attribute):  # [] where the algorithm does not judge turns
            for turn, value in zip(turns, of_group[position], strict=True):
                turn[column] = value


def _add_logprobs(turns: list[RecordRow], logprobs: np.ndarray) -> None:
    start = 0
    for turn in turns:
        turn["learner_logprobs"] = logprobs[start : start + len(turn["token_ids"])]
        start += len(turn["token_ids"]) + len(turn["observation_ids"])
