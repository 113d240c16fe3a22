"""Run folders as they lie on disk: finished, still being written, or killed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calibadv_jax.config.kept import newest_start, start_files
from calibadv_jax.contrib.report.evaluations import Table, read_evaluations
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.writer import read_metrics
from calibadv_jax.record.schema import kept_steps

Kind = Literal["training run", "cold start"]


@dataclass(frozen=True)
class Run:
    """What one run folder holds.

    Every start of a run leaves a config; that of the newest start whose files are whole counts.
    """

    folder: Path
    name: str  # the shortest end of the path that no other run of the report has
    kind: Kind
    rows: dict[int, dict[str, Any]]  # step -> metric -> value; None where it was not finite
    config: dict[str, Any]  # nested as in the YAML file; empty where the folder holds none
    identity: dict[str, str]  # hashes of question file, policy config and vocabulary
    num_starts: int
    evaluations: list[Table]
    rollouts: dict[int, Path]  # step -> file of its kept trajectories

    @property
    def steps(self) -> list[int]:
        return sorted(self.rows)

    def values(self, metric: str) -> dict[int, float | None]:
        """step -> value, of the steps that logged the metric; None where it was not finite."""
        return {step: self.rows[step][metric] for step in self.steps if metric in self.rows[step]}

    def setting(self, key: str) -> Any:
        """A config value by its dotted key; None where the config lacks it."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the folders, in the order given.

    Raises:
        UserError: one is no run folder, has no metrics yet, is named twice, or is another kind of run.
    """
    resolved = [folder.resolve() for folder in folders]
    twice = next((folder for folder in resolved if resolved.count(folder) > 1), None)
    if twice is not None:
        raise UserError(f"{twice}: named twice; name every run once")
    names = _names(resolved)
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    for run in runs:
        if run.kind != runs[0].kind:
            raise UserError(
                f"{run.folder} is a {run.kind} and {runs[0].folder} a {runs[0].kind}; make a report of each"
            )
    return runs


def _read(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    start = newest_start(folder)
    if not path.is_file() and start is None:
        raise UserError(f"{folder}: not a run folder, it has no metrics.jsonl; {_hint(folder)}")
    # A resumed run may write a step again; the later row is the one that the policy went on from.
    rows = {row["step"]: row for row in read_metrics(path)} if path.is_file() else {}
    if not rows:
        raise UserError(f"{folder}: no metrics yet; try again when the first step has ended")
    config = start.config if start else {}
    output = (config.get("evaluate") or {}).get("output")
    return Run(
        folder,
        name,
        "cold start" if any("sft/loss" in row for row in rows.values()) else "training run",
        rows,
        config,
        start.identity if start else {},
        len(start_files(folder)),
        read_evaluations(folder, output),
        {step: path for step, path in kept_steps(folder).items() if step in rows},  # not those rolled back
    )


def _hint(folder: Path) -> str:
    within = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    within = [path for path in within if path.name != "sft_metrics"]
    if within:
        return "it holds some: " + " ".join(str(path) for path in within[:8])
    return "give the run.dir of a training run"


def _names(folders: Sequence[Path]) -> list[str]:
    names = []
    for folder in folders:
        others = [other.parts for other in folders if other != folder]
        length = 1
        while any(parts[-length:] == folder.parts[-length:] for parts in others):
            length += 1
        names.append(os.path.join(*folder.parts[-length:]))
    return names
