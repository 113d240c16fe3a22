"""The configs that a run keeps: for every start ``configs/N.yaml``, and ``N.json`` with its hashes.

If the folder of a run is moved, the paths inside it follow.
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
COLD_START = "sft.yaml"  # File in the run's folder: the config of the cold start.
# Files and folders by which the folder of a run is known.
RUN_FILES = ("sft", "sft_metrics", "checkpoints", "metrics.jsonl", "rollouts", "policy", "snapshots")


@dataclass(frozen=True)
class KeptStart:
    """A start of a run.

    Attributes:
        path: The kept config.
        config: Nested values of the file, which may lack keys that are newer than the file.
        identity: Hashes of the questions, the policy's config and the vocabulary; empty if they are lost.
    """

    path: Path
    config: dict[str, Any]
    identity: dict[str, str]


def start_files(run: Path) -> list[Path]:
    """Return ``configs/N.yaml`` of every start of a run, in the order of the starts."""
    numbered = [path for path in (run / FOLDER).glob("*.yaml") if path.stem.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem))


def newest_start(run: Path) -> KeptStart | None:
    """Return the newest start of a run, with its paths inside the run's present folder.

    Args:
        run: Folder of the run.

    Returns:
        The start; None if the folder has none.

    Raises:
        UserError: A file of the start is damaged.
    """
    paths = start_files(run)
    if not paths:
        return None
    path = paths[-1]
    values = read_config(path, "remove it, and the start before it counts")
    hashes_path = path.with_suffix(".json")
    identity = {}
    if hashes_path.is_file():
        identity = read_json(hashes_path, "remove it, and its hashes count as lost")
    return KeptStart(path, rebase_paths(values, run), identity)


def run_hash(run: Path) -> str:
    """Return the hash of a run's first start: config, questions, model and vocabulary.

    Args:
        run: Folder of the run.

    Returns:
        SHA-256 in hexadecimal; empty if the run has not started.
    """
    config_path = run / FOLDER / "0.yaml"
    hashes_path = run / FOLDER / "0.json"
    if not config_path.is_file():
        return ""
    content = config_path.read_bytes()
    if hashes_path.is_file():
        content += hashes_path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def add_start(run: Path, config: str, identity: Mapping[str, str]) -> None:
    """Keep another start of a run. The config is written last, so that a start without hashes is never seen.

    Args:
        run: Folder of the run.
        config: The resolved config as YAML.
        identity: Hashes of the questions, the policy's config and the vocabulary.

    Raises:
        OSError: The folder cannot be written.
    """
    starts = start_files(run)
    number = int(starts[-1].stem) + 1 if starts else 0
    path = run / FOLDER / f"{number}.yaml"
    write_json(path.with_suffix(".json"), identity)
    write_text(path, config)


def read_config(path: Path, way_out: str) -> dict[str, Any]:
    """Return the nested values of a kept config, with the present names of its keys.

    Args:
        path: The kept config.
        way_out: What the user should do about a damaged file; the end of the message.

    Raises:
        UserError: The file is damaged.
    """
    values: Any = None
    try:
        text = path.read_text(encoding="utf-8")
        # A file that was cut off may still be YAML, but does not end with a newline.
        if text.endswith("\n"):
            values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict) or not _holds_only_sections(values):
        raise UserError(f"{path}: empty or cut off (was the disk full?); {way_out}")
    drop_removed(values)
    rename_old_keys(values)
    return values


def _holds_only_sections(values: Mapping[str, Any]) -> bool:
    return all(isinstance(section, dict | list) for section in values.values())


def run_that_kept(path: Path) -> Path | None:
    """Return the folder of the run that kept a config, by the config's path; None for other files."""
    has_kept_name = path.parent.name == FOLDER and path.stem.isdigit()
    if has_kept_name and path.with_suffix(".json").is_file():
        return path.parent.parent
    return None


def folder_of_kept(path: Path) -> Path | None:
    """Return the folder of the run that has kept a config, by its path; None for other files.

    Unlike `run_that_kept`, which decides how paths are read, it does not insist on hashes beside the file:
    whoever gives a run away may have left them out.
    """
    path = path.absolute()
    if path.parent.name == FOLDER and path.stem.isdigit():
        folder = path.parent.parent
        has_hashes = path.with_suffix(".json").is_file()
    elif path.name == COLD_START:
        folder = path.parent
        has_hashes = False
    else:
        return None
    is_run = has_hashes or any((folder / name).exists() for name in RUN_FILES)
    return folder if is_run else None


def rebase_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the nested values of a kept config with its paths inside the present folder of the run.

    Args:
        values: Nested values of the kept config; they are not changed.
        folder: Present folder of the run, which replaces run.dir at the beginning of every path.
    """

    def always(key: str, new_path: str) -> bool:
        return True

    return _move_paths(values, str(folder), always)


def follow_run(
    values: Mapping[str, Any], folder: str, outputs: Collection[str], with_inputs: bool
) -> dict[str, Any]:
    """Return the nested values of a file for another run.dir.

    The paths inside the file's own run.dir move to `folder`. An input stays in the folder of the file's run,
    where it is only read, unless `folder` holds it too, or the command makes it itself.

    Args:
        values: Nested values of the file; they are not changed.
        folder: The new run.dir.
        outputs: Dotted keys whose paths always move.
        with_inputs: Whether the command makes its inputs itself, so that they move too.
    """

    def moves(key: str, new_path: str) -> bool:
        return with_inputs or key in outputs or Path(new_path).exists()

    moved = _move_paths(values, folder, moves)
    run = values.get("run")
    moved_run = moved.get("run")
    if isinstance(run, Mapping) and isinstance(moved_run, dict):
        old_folder = run.get("dir")
        mirror = run.get("mirror")
        # A mirror that ends with the old run.dir follows too.
        if isinstance(old_folder, str) and isinstance(mirror, str) and mirror.endswith(f"/{old_folder}"):
            moved_run["mirror"] = mirror.removesuffix(old_folder) + folder
    return moved


def refuse_other_run(path: Path, key: str, run: Path) -> None:
    """Refuse an output inside the folder of another run.

    Args:
        path: Output of a command.
        key: Config key that names the output, for the message.
        run: Folder of the run that writes the output.

    Raises:
        UserError: The innermost run's folder around `path` is not `run`.
    """
    output = path.resolve()
    own_folder = run.resolve()
    for folder in (output, *output.parents):
        if folder == own_folder:
            return
        if _is_run(folder):
            raise UserError(
                f"{key}={path} lies in the folder of another run, {folder}; "
                f"choose a place in run.dir={run}, or outside of every run"
            )


def _is_run(folder: Path) -> bool:
    if (folder / COLD_START).is_file():
        return True
    return any(run_that_kept(path) is not None for path in folder.glob("configs/*.yaml"))


def _move_paths(values: Mapping[str, Any], folder: str, moves: Callable[[str, str], bool]) -> dict[str, Any]:
    """Return nested values with the paths inside run.dir moved to `folder`.

    `moves` takes a path's dotted key and its new path, and returns whether the path moves.
    """
    run = values.get("run")
    run_dir = run.get("dir") if isinstance(run, Mapping) else None
    if not isinstance(run_dir, str) or not run_dir.rstrip("/"):
        return dict(values)
    old_folder = run_dir.rstrip("/")

    def move(key: str, text: str) -> str:
        is_old_folder = text.rstrip("/") == old_folder
        if not is_old_folder and not text.startswith(f"{old_folder}/"):
            return text
        new_path = folder + text[len(old_folder) :]
        return new_path if moves(key, new_path) else text

    moved: dict[str, Any] = map_texts(values, move)
    return moved


def map_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return nested values with every text replaced.

    Args:
        value: Nested mappings and lists; they are not changed.
        change: Takes the dotted key and the text; returns the new text.
        key: Dotted key of `value`; empty for a whole config.
    """
    if isinstance(value, Mapping):
        changed = {}
        for name, inner in value.items():
            inner_key = f"{key}.{name}".lstrip(".")
            changed[name] = map_texts(inner, change, inner_key)
        return changed
    if isinstance(value, list):
        return [map_texts(element, change, f"{key}.{index}") for index, element in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value
