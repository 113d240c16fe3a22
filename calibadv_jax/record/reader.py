"""Reads the steps that a run kept: as the values that flowed, or as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import SEARCH_ALONE, Group
from calibadv_jax.record.rows import Logprobs, from_rows
from calibadv_jax.record.schema import VERSION, kept_steps


@dataclass(frozen=True)
class KeptStep:
    """One training step: what was sampled, what it earned, and what credit assignment made of it."""

    step: int  # the number of the policy that it made
    groups: list[Group]
    credits: list[GroupCredit]  # of the finished trajectories of each group, as AdvantageResult.credits
    learner_logprobs: Logprobs  # float32 [T] a trajectory before the first update; None where not computed
    metadata: dict[str, str]  # see `read_metadata`


def find_step(run: Path, step: int) -> Path:
    """The file of a kept step.

    Raises:
        UserError: the run kept no trajectories, or not those of this step.
    """
    steps = kept_steps(run)
    if step in steps:
        return steps[step]
    if not steps:
        raise UserError(f"{run}: no trajectories are kept there; a run with log.rollouts=parquet keeps them")
    nearest = min(steps, key=lambda one: abs(one - step))
    raise UserError(
        f"{run}: step {step} is not kept; the nearest kept one is {nearest} (see log.rollouts_keep)"
    )


def read_step(path: Path) -> KeptStep:
    """A kept step whole.

    Raises:
        UserError: the file is missing, damaged or of another version.
    """
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
    """Some columns of a kept step, or all; only these are read.

    Args:
        columns: names of `schema.SCHEMA`, or parts of them such as ``turns.list.element.advantage``.

    Raises:
        UserError: the file is missing, damaged or of another version.
    """
    _check(path)
    with _readable(path), pq.ParquetFile(path) as file:
        return file.read(columns=None if columns is None else list(columns))


def read_metadata(path: Path) -> dict[str, str]:
    """What the file says of itself, without its rows.

    schema_version; advantage and config: the config's section and the whole of it, as JSON; tokenizer: its
    folder, relative to the run's; seed: of what was drawn in the step; actions: names of those that were on,
    as JSON, if search was not alone.

    Raises:
        UserError: as `read_step`.
    """
    with _readable(path):
        return _text(pq.read_schema(path).metadata)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file of trajectories; a run with log.rollouts keeps them"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())}); remove the file"
        ) from error


def _check(path: Path) -> None:
    version = read_metadata(path).get("schema_version")
    if version != VERSION:
        raise UserError(
            f"{path}: its schema_version is {version}, this program reads {VERSION}; use the program that"
            " wrote it"
        )


def _text(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in (metadata or {}).items()}
