"""The configs that a run keeps: their paths follow the run's folder where it is moved or copied to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_of(path: Path) -> Path | None:
    """The folder of the run that kept this config: RUN/configs/N.yaml beside N.json; None for other files."""
    is_kept = path.parent.name == "configs" and path.stem.isdigit() and path.with_suffix(".json").is_file()
    return path.parent.parent if is_kept else None


def at_home(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a kept config with every path inside its run.dir as one inside `folder`.

    Args:
        values: nested, as in the YAML file.
        folder: where the run lies now.
    """
    run = values.get("run")
    before = run.get("dir") if isinstance(run, Mapping) else None
    if not isinstance(before, str) or not before:
        return dict(values)
    return {name: _moved(value, before.rstrip("/"), str(folder)) for name, value in values.items()}


def _moved(value: Any, before: str, now: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _moved(one, before, now) for name, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, before, now) for one in value]
    if isinstance(value, str) and (value.rstrip("/") == before or value.startswith(f"{before}/")):
        return now + value[len(before) :]
    return value
