"""Writes a run's trajectories with all that credit assignment knew: one file a step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.config import Config
from calibadv_jax.config.load import kept_values
from calibadv_jax.core.files import PARTIAL, replacing
from calibadv_jax.core.trajectory import SEARCH_ALONE, Group
from calibadv_jax.record.rows import Logprobs, Row, to_rows
from calibadv_jax.record.schema import FOLDER, LOGPROBS, SCHEMA, VERSION, kept_steps


class RolloutWriter:
    """Keeps the steps of a run as ``rollouts/step_N.parquet``, a bounded number of them.

    A file is there whole or not at all. Of the steps so far the newest `log.rollouts_keep` stay, and of the
    older ones every `log.rollouts_every`-th.

    Args:
        folder: of the run.
        start_step: first step that will be written; files of this step and of later ones, left by an earlier
            attempt, are removed.
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
        seed: int,
    ) -> dict[str, float]:
        """Writes one step, and removes those that need not stay any longer.

        Args:
            credits: `AdvantageResult.credits`.
            learner_logprobs: see `rows.to_rows`.
            seed: the trainer's, of what was drawn in the step.

        Returns:
            The size of the file; nothing where log.rollouts is none.
        """
        if self.log.rollouts == "none":
            return {}
        path = self.folder / FOLDER / f"step_{step}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = to_rows(step, groups, credits, learner_logprobs)
        with replacing(path) as partial:
            _write(partial, rows, self._metadata(groups, seed))
        self._remove_old(step)
        return {"perf/record_bytes": float(path.stat().st_size)}

    def rewind(self, step: int) -> None:
        """Removes the steps at or past `step`, which will be written again, and files that were cut off."""
        for number, path in kept_steps(self.folder).items():
            if number >= step:
                path.unlink(missing_ok=True)
        for path in (self.folder / FOLDER).glob(f".step_*{PARTIAL}"):
            path.unlink()

    def _metadata(self, groups: Sequence[Group], seed: int) -> dict[str, str]:
        actions = next((one.actions for group in groups for one in group.attempts), SEARCH_ALONE)
        named = {} if actions == SEARCH_ALONE else {"actions": json.dumps(actions)}
        return named | {
            "schema_version": VERSION,
            "advantage": json.dumps(dataclasses.asdict(self.config.advantage)),
            "tokenizer": "policy",  # folder of the tokenizer, relative to the run's
            "config": self._config,
            "seed": str(seed),
        }

    def _remove_old(self, step: int) -> None:
        keep, every = self.log.rollouts_keep, self.log.rollouts_every
        for number, path in kept_steps(self.folder).items():
            if keep and number <= step - keep and (not every or number % every):
                path.unlink(missing_ok=True)


def _write(path: Path, rows: Sequence[Row], metadata: dict[str, str]) -> None:
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(metadata))
    # Dictionaries of values that hardly repeat cost ten times the time and a third more room.
    pq.write_table(table, path, compression="zstd", use_dictionary=False, use_byte_stream_split=LOGPROBS)
