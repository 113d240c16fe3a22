"""The configs that a run keeps, and whose folder a path lies in: paths follow the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from calibadv_jax.core.errors import UserError


def run_of(path: Path) -> Path | None:
    """The folder of the run that kept this config: RUN/configs/N.yaml beside N.json; None for other files."""
    is_kept = path.parent.name == "configs" and path.stem.isdigit() and path.with_suffix(".json").is_file()
    return path.parent.parent if is_kept else None


def rebase_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a kept config with every path inside its run.dir as one inside `folder`.

    Args:
        values: nested, as in the YAML file.
        folder: where the run lies now.
    """
    return _rebased(values, str(folder), lambda *_: True)


def follow_run(
    values: Mapping[str, Any], folder: str, outputs: Collection[str], with_inputs: bool
) -> dict[str, Any]:
    """Return a file's values where its run.dir is overridden: paths inside it lie inside `folder` instead.

    An input stays in the folder of the file's run, where it is only read, unless `folder` holds it too.

    Args:
        values: nested, as in the YAML file.
        folder: the new run.dir.
        outputs: dotted keys of what commands write, which always moves.
        with_inputs: whether inputs always move: the command makes them itself.
    """
    moved = _rebased(values, folder, lambda key, path: with_inputs or key in outputs or Path(path).exists())
    run, moved_run = values.get("run"), moved.get("run")
    if isinstance(run, Mapping) and isinstance(moved_run, dict):
        before, mirror = run.get("dir"), run.get("mirror")
        if isinstance(before, str) and isinstance(mirror, str) and mirror.endswith(f"/{before}"):
            moved_run["mirror"] = mirror.removesuffix(before) + folder
    return moved


def refuse_other_run(path: Path, key: str, run: Path) -> None:
    """Check that an output does not lie in the folder of another run.

    Args:
        path: the output.
        key: the config key that names it, for messages.
        run: run.dir.

    Raises:
        UserError: the nearest folder of a run around `path` is not `run`.
    """
    place, own = path.resolve(), run.resolve()
    owner = next((folder for folder in (place, *place.parents) if folder == own or _is_run(folder)), own)
    if owner != own:
        raise UserError(
            f"{key}={path} lies in the folder of another run, {owner}; choose a place in run.dir={run}, or"
            " outside of every run"
        )


def _is_run(folder: Path) -> bool:
    return (folder / "sft.yaml").is_file() or any(run_of(path) for path in folder.glob("configs/*.yaml"))


def _rebased(values: Mapping[str, Any], folder: str, moves: Callable[[str, str], bool]) -> dict[str, Any]:
    """Nested values with the paths inside their run.dir inside `folder`.

    Args:
        moves: whether a path moves, by its dotted key and its new place.
    """
    run = values.get("run")
    before = run.get("dir") if isinstance(run, Mapping) else None
    if not isinstance(before, str) or not before.rstrip("/"):
        return dict(values)
    before = before.rstrip("/")

    def move(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: move(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [move(element, key) for element in value]
        if isinstance(value, str) and (value.rstrip("/") == before or value.startswith(f"{before}/")):
            place = folder + value[len(before) :]
            return place if moves(key, place) else value
        return value

    moved: dict[str, Any] = move(values, "")
    return moved
