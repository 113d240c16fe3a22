"""The configs that a run keeps: ``configs/N.yaml`` of every start, and ``N.json`` with its hashes.

Paths inside the folder of a run follow that folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.config.keys import drop_removed, rename_old_keys
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json, write_json, write_text

FOLDER = "configs"


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    path: Path
    config: dict[str, Any]  # nested as in the file, which may lack keys that are newer than it
    identity: dict[str, str]  # hashes of questions, policy's config and vocabulary; empty if they are lost


def start_files(run: Path) -> list[Path]:
    """Return ``configs/N.yaml`` of every start of a run, in their order."""
    numbered = [path for path in (run / FOLDER).glob("*.yaml") if path.stem.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem))


def newest_start(run: Path) -> Start | None:
    """Return the newest start, its paths rebased; None if the folder has none; UserError if it is damaged."""
    paths = start_files(run)
    if not paths:
        return None
    path, hashes = paths[-1], paths[-1].with_suffix(".json")
    values = read_config(path, "remove it, and the start before it counts")
    identity = read_json(hashes, "remove it, and its hashes count as lost") if hashes.is_file() else {}
    return Start(path, rebase_paths(values, run), identity)


def run_hash(run: Path) -> str:
    """Return the hash of a run's first start: config, questions, model, vocabulary; empty before it."""
    files = [run / FOLDER / name for name in ("0.yaml", "0.json")]
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(content).hexdigest() if files[0].is_file() else ""


def add_start(run: Path, config: str, identity: Mapping[str, str]) -> None:
    """Keep one more start; its config appears last. Raises OSError if the folder cannot be written."""
    starts = start_files(run)
    path = run / FOLDER / f"{int(starts[-1].stem) + 1 if starts else 0}.yaml"
    write_json(path.with_suffix(".json"), identity)
    write_text(path, config)


def read_config(path: Path, way_out: str) -> dict[str, Any]:
    """Return the nested values of a kept config; raise UserError, which ends with `way_out`, if damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text) if text.endswith("\n") else None  # cut off, it may still be YAML
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(each, dict | list) for each in values.values()):
        raise UserError(f"{path}: empty or cut off (was the disk full?); {way_out}")
    drop_removed(values)
    rename_old_keys(values)
    return values


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that kept a config, by its name; None for other files."""
    is_kept = path.parent.name == FOLDER and path.stem.isdigit() and path.with_suffix(".json").is_file()
    return path.parent.parent if is_kept else None


def rebase_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the nested values of a kept config with the paths inside its run.dir inside `folder`."""
    return _rebased(values, str(folder), lambda *_: True)


def follow_run(
    values: Mapping[str, Any], folder: str, outputs: Collection[str], with_inputs: bool
) -> dict[str, Any]:
    """Return a file's nested values with the paths inside its run.dir inside `folder`, the new run.dir.

    The keys of `outputs` always move. An input stays in the folder of the file's run, where it is only read,
    unless `folder` holds it too, or the command makes it itself (`with_inputs`).
    """
    moved = _rebased(values, folder, lambda key, path: with_inputs or key in outputs or Path(path).exists())
    run, moved_run = values.get("run"), moved.get("run")
    if isinstance(run, Mapping) and isinstance(moved_run, dict):
        before, mirror = run.get("dir"), run.get("mirror")
        if isinstance(before, str) and isinstance(mirror, str) and mirror.endswith(f"/{before}"):
            moved_run["mirror"] = mirror.removesuffix(before) + folder
    return moved


def refuse_other_run(path: Path, key: str, run: Path) -> None:
    """Refuse (UserError) an output, of a config key, inside a run's folder that is not `run`."""

    def is_run(folder: Path) -> bool:
        return (folder / "sft.yaml").is_file() or any(map(run_of, folder.glob("configs/*.yaml")))

    place, home = path.resolve(), run.resolve()
    owner = next((folder for folder in (place, *place.parents) if folder == home or is_run(folder)), home)
    if owner != home:
        advice = f"choose a place in run.dir={run}, or outside of every run"
        raise UserError(f"{key}={path} lies in the folder of another run, {owner}; {advice}")


def _rebased(values: Mapping[str, Any], folder: str, moves: Callable[[str, str], bool]) -> dict[str, Any]:
    """Move the paths inside run.dir into `folder`; `moves` takes a path's dotted key and its new place."""
    run = values.get("run")
    before = run.get("dir") if isinstance(run, Mapping) else None
    if not isinstance(before, str) or not before.rstrip("/"):
        return dict(values)
    before = before.rstrip("/")

    def move(key: str, text: str) -> str:
        if text.rstrip("/") != before and not text.startswith(f"{before}/"):
            return text
        place = folder + text[len(before) :]
        return place if moves(key, place) else text

    moved: dict[str, Any] = map_texts(values, move)
    return moved


def map_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return nested values with `change(dotted key, text)` in place of every text."""
    if isinstance(value, Mapping):
        return {name: map_texts(inner, change, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(element, change, f"{key}.{index}") for index, element in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value
