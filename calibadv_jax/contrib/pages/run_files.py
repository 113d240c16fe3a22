"""The kept rollouts of a run's folder, as the trajectory page reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from calibadv_jax.core.errors import UserError
from calibadv_jax.record.reader import read_columns, read_metadata
from calibadv_jax.record.schema import kept_steps

Row = dict[str, Any]  # a trajectory, by the columns of record.schema

_TABLES_HELD = 2  # steps that stay in memory


class RunFiles:
    """Kept rollouts of one run, which may still be writing them.

    Args:
        folder: `run.dir`.
        first, last: steps outside are left out.

    Raises:
        UserError: no such folder, or it keeps no such steps.
    """

    def __init__(self, folder: Path, first: int = 0, last: int | None = None):
        self.folder, self.first, self.last = folder, first, last
        self._table = lru_cache(maxsize=_TABLES_HELD)(_table)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder of a run (run.dir)")
        if not kept_steps(folder):
            raise UserError(
                f"{folder}: no rollouts/step_N.parquet there; give the folder of a run with log.rollouts"
            )
        if not self.paths():
            steps = list(kept_steps(folder))
            raise UserError(
                f"--steps: {folder} keeps steps {steps[0]} to {steps[-1]}, and none of the steps asked for"
            )

    def paths(self) -> dict[int, Path]:
        """Step -> its file, ascending; files that appear later are found by later calls."""
        return {
            step: path
            for step, path in kept_steps(self.folder).items()
            if self.first <= step and (self.last is None or step <= self.last)
        }

    def rows(self, path: Path, columns: Sequence[str]) -> list[Row]:
        """Trajectories of a step with some of their columns; "turns.list.element.kind" names a nested one.

        Raises:
            UserError: the file is damaged, or of another version.
        """
        return read_columns(path, columns).to_pylist()

    def lengths(self, path: Path) -> list[int]:
        """Sampled tokens of each trajectory of a step, in the order of `rows`.

        Raises:
            UserError: as `rows`.
        """
        turns = read_columns(path, ["turns.list.element.token_ids.list.element"])["turns"].combine_chunks()
        counts = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids"))
        sums = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))])  # int64
        ends = np.cumsum(pc.list_value_length(turns).to_numpy(zero_copy_only=False))
        lengths: list[int] = np.diff(sums[np.concatenate([[0], ends])]).tolist()
        return lengths

    def planned_steps(self) -> int:
        """Steps that the run is configured to train, as the newest kept step says."""
        return int(json.loads(self.metadata()["config"])["learner"]["steps"])

    def group(self, step: int, group: int) -> list[Row]:
        """The trajectories of a group with all their columns; empty where there is no such group.

        Raises:
            UserError: as `rows`.
        """
        path = self.paths().get(step)
        if path is None:
            return []
        state = path.stat()
        table = self._table(path, state.st_mtime_ns, state.st_size)
        return table.filter(pc.field("group") == group).to_pylist()

    def metadata(self) -> dict[str, str]:
        """See `record.reader.read_metadata`; of the newest step."""
        return read_metadata(list(self.paths().values())[-1])


def _table(path: Path, *_: int) -> pa.Table:
    """All columns; the other arguments tell one version of a file from the next."""
    return read_columns(path)
