"""Metrics of a run: ``metrics.jsonl`` on disk, and the backends."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import wrap_disk_errors, write_text

if TYPE_CHECKING:  # a program that only reads metrics must not wait for tensorboardX, which imports torch
    from calibadv_jax.metrics.trackers import MetricsBackend


class MetricsWriter:
    """Appends one JSON object a step to ``<directory>/metrics.jsonl``, and hands finite values to backends.

    A row is ``{"step": s, name: value, …}``. A value that is not finite is null, and its name is listed under
    "nonfinite". Every row is flushed, so that a crash loses nothing. The backends are closed with the writer.

    Args:
        directory: Folder of the run.
        backends: See `trackers.open_backends`.
        start_step: First step that will be written. Rows of an earlier attempt from this step on are dropped;
            None keeps all.
    """

    def __init__(
        self, directory: Path, backends: Sequence[MetricsBackend] = (), start_step: int | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self._backends = backends
        self._file = self._repair_and_open(start_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row.

        Args:
            step: Number of the step.
            metrics: Values by name: scalars of any type, or arrays of one element.

        Raises:
            TypeError: A value is not a scalar.
        """
        row: dict[str, object] = {"step": step}
        finite_values: dict[str, float] = {}
        nonfinite_names: list[str] = []
        for name, metric in metrics.items():
            value = int(metric) if isinstance(metric, numbers.Integral) else float(metric)
            if math.isfinite(value):
                row[name] = value
                finite_values[name] = value
            else:
                row[name] = None
                nonfinite_names.append(name)
        if nonfinite_names:
            row["nonfinite"] = nonfinite_names
        with wrap_disk_errors(self.path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        for backend in self._backends:
            backend.write(step, finite_values)

    def write_table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand a table of trajectories to the backends, of which some show it; metrics.jsonl holds none.

        Args:
            step: Number of the step.
            columns: Names of the columns.
            rows: A value for each column: texts, numbers, booleans or None.
        """
        for backend in self._backends:
            backend.write_table(step, columns, rows)

    def rewind(self, step: int) -> None:
        """Drop the rows from `step` on, which will be written again."""
        self._file.close()
        self._file = self._repair_and_open(step)
        for backend in self._backends:
            backend.rewind(step)

    def _repair_and_open(self, start_step: int | None) -> TextIO:
        """Drop a last line that was cut off and the rows from `start_step` on; open the file."""
        if self.path.exists():
            lines = []
            for row in read_metrics(self.path):
                if start_step is None or row["step"] < start_step:
                    lines.append(json.dumps(row, allow_nan=False) + "\n")
            write_text(self.path, "".join(lines))
        return self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file and the backends."""
        with wrap_disk_errors(self.path):
            self._file.close()
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl. A last line that a crash cut off is left out.

    Args:
        path: The file.

    Raises:
        UserError: The file is missing, or another line is not a row of metrics.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such metrics file; it is written by a training run")
    rows = []
    # A complete row ends in a newline, so everything after the last newline was cut off.
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(complete_lines, 1):
        try:
            row = json.loads(line.decode())
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: not a row of metrics; remove the line, or the file")
        rows.append(row)
    return rows
