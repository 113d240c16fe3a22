"""The starts of a run as its folder keeps them: ``configs/N.yaml``, and ``N.json`` with its hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.config.kept import rebase_paths
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json, write_text

FOLDER = "configs"


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    path: Path
    config: dict[str, Any]  # nested as in the file, which may lack keys that are newer than it
    identity: dict[str, str]  # hashes of questions, policy's config and vocabulary; empty if they are lost
    damaged: tuple[Path, ...] = ()  # files of newer starts, which were cut off


def start_files(run: Path) -> list[Path]:
    """``configs/N.yaml`` of every start of a run, in their order."""
    numbered = [path for path in (run / FOLDER).glob("*.yaml") if path.stem.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem))


def newest_start(run: Path) -> Start | None:
    """The newest start whose files are whole, its paths as the run lies now; None if the folder has none.

    If the hashes of every start are lost, the newest start with a config counts.

    Raises:
        UserError: every config is damaged.
    """
    damaged: list[Path] = []
    without_hashes = None
    for path in reversed(start_files(run)):
        kept, identity = read_config(path), _read_identity(path.with_suffix(".json"))
        config = None if kept is None else rebase_paths(kept, run)
        if config is not None and identity is not None:
            return Start(path, config, identity, tuple(damaged))
        damaged.append(path if config is None else path.with_suffix(".json"))
        if config is not None and without_hashes is None:
            without_hashes = Start(path, config, {}, tuple(damaged))
    if damaged and without_hashes is None:
        raise UserError(
            f"{damaged[0]}: empty or cut off (was the disk full?), and no older start is whole; write the"
            f" run's config there (calibadv train --config FILE --dry-run > {damaged[0]}), or choose another"
            " run.dir"
        )
    return without_hashes


def run_hash(run: Path) -> str:
    """Return the hash of a run's first start: config, questions, model, vocabulary; empty before it."""
    files = [run / FOLDER / name for name in ("0.yaml", "0.json")]
    if not files[0].is_file():
        return ""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def add_start(run: Path, config: str, identity: Mapping[str, str]) -> None:
    """Keeps one more start; its config appears last.

    Raises:
        OSError: the folder cannot be written.
    """
    starts = start_files(run)
    path = run / FOLDER / f"{int(starts[-1].stem) + 1 if starts else 0}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_suffix(".json"), identity)
    write_text(path, config)


def read_config(path: Path) -> dict[str, Any] | None:
    """A config that was kept, nested; None if the file is damaged.

    What was cut off may still be YAML, but lacks the end of a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    is_whole = text.endswith("\n") and isinstance(values, dict)
    return (
        values if is_whole and all(isinstance(section, dict | list) for section in values.values()) else None
    )


def _read_identity(path: Path) -> dict[str, str] | None:
    """None if the file is damaged; empty if there is none, as earlier versions left it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
