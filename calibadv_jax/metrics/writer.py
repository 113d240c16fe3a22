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

if TYPE_CHECKING:  # who reads metrics need not wait for tensorboardX, which imports torch
    from calibadv_jax.metrics.backends import MetricsBackend


class MetricsWriter:
    """Appends one JSON object a step to ``<directory>/metrics.jsonl``, and hands finite values to backends.

    A row is ``{"step": s, name: value, …}``; a value that is not finite is null, and its name stands under
    "nonfinite". Every row is flushed, so that a crash loses nothing. Rows of an earlier attempt from
    `start_step` on are dropped; None keeps all. The backends are closed with the writer.
    """

    def __init__(
        self, directory: Path, backends: Sequence[MetricsBackend] = (), start_step: int | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self._backends = backends
        self._file = self._repaired(start_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; TypeError if a value is not a scalar."""
        # Scalars of any type, arrays of one element included.
        values = {n: int(v) if isinstance(v, numbers.Integral) else float(v) for n, v in metrics.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, object] = {"step": step, **values, **dict.fromkeys(nonfinite)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        with wrap_disk_errors(self.path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        finite = {name: value for name, value in values.items() if name not in nonfinite}
        for backend in self._backends:
            backend.write(step, finite)

    def rewind(self, step: int) -> None:
        """Drop the rows at or past `step`, which will be written again."""
        self._file.close()
        self._file = self._repaired(step)
        for backend in self._backends:
            backend.rewind(step)

    def _repaired(self, start_step: int | None) -> TextIO:
        """Drop a last line that was cut off and the rows at or past `start_step`; open the file."""
        if self.path.exists():
            rows = [row for row in read_metrics(self.path) if start_step is None or row["step"] < start_step]
            write_text(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        return self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        with wrap_disk_errors(self.path):
            self._file.close()
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; a last line cut off by a crash is left out.

    Raises UserError if the file is missing, or another line is not a row of metrics.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such metrics file; it is written by a training run")
    rows = []
    # A complete row ends in a newline, so whatever follows the last one was cut off.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line.decode())
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: not a row of metrics; remove the line, or the file")
        rows.append(row)
    return rows
