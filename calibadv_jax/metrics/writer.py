"""Metrics of a run: ``metrics.jsonl`` on disk, and whatever other places it is told."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_text, written

if TYPE_CHECKING:  # who reads metrics need not wait for tensorboardX, which imports torch
    from calibadv_jax.metrics.backends import Backend

RESERVED = frozenset({"step", "nonfinite"})


class MetricsWriter:
    """Appends one JSON object a step to ``<directory>/metrics.jsonl``, and hands the scalars to the backends.

    A row is ``{"step": s, name: value, …}``. JSON has no NaN and no infinity: such values are written as
    null and their names listed under "nonfinite". Rows are flushed one by one, so that a run can be
    watched and a crash loses nothing.

    Args:
        directory: made when missing.
        backends: get every row's finite values too; they are closed with the writer.
        start_step: first step this run will write. Rows of this step and of later ones, left by an earlier
            attempt, are dropped: the file is then that of an uninterrupted run. None keeps all rows.

    Raises:
        UserError: an existing metrics.jsonl holds a line that is not a row of metrics.
    """

    def __init__(
        self, directory: Path, backends: Sequence[Backend] = (), start_step: int | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        _repair(self.path, start_step)
        self._backends = backends
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row.

        Raises:
            ValueError: a metric is named "step" or "nonfinite".
            TypeError: a value is not a scalar.
        """
        if taken := RESERVED & metrics.keys():
            raise ValueError(f"metric names {sorted(taken)} are reserved")
        values = {name: _plain(value) for name, value in metrics.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, object] = {"step": step, **values, **dict.fromkeys(nonfinite)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        with written(self.path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for backend in self._backends:
            backend.write(step, finite)

    def rewind(self, step: int) -> None:
        """Drops the rows at or past `step`, which will be written again."""
        self._file.close()
        _repair(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        for backend in self._backends:
            backend.rewind(step)

    def close(self) -> None:
        with written(self.path):
            self._file.close()
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, in the order of the file; a last line cut off by a crash is left out.

    Raises:
        UserError: the file is missing, or another line is not a row of metrics.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such metrics file; it is written by a training run")
    # A complete row ends in a newline, so whatever follows the last one was cut off.
    complete = path.read_bytes().split(b"\n")[:-1]
    return [_parse(line, path, number) for number, line in enumerate(complete, start=1)]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise UserError(f"{path}:{number}: not a row of metrics; remove the line, or the file")
    return row


def _repair(path: Path, start_step: int | None) -> None:
    """Drops a last line that was cut off and the rows at or past `start_step`, in one atomic replacement."""
    if not path.exists():
        return
    rows = read_metrics(path)
    kept = [row for row in rows if start_step is None or row["step"] < start_step]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept)
    write_text(path, text)


def _plain(value: float) -> float:
    """A Python int or float of any scalar, arrays of one element included."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)
