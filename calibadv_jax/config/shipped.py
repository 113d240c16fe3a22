"""Configs that come with the package, by name: ``--config quickstart``, ``--config paper/qwen2.5-3b``."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIX = ".yaml"
# A shipped file that is not a run's config: options of the retrieval service.
NO_RUN = "retriever"


def shipped_folder() -> Path:
    """Return the folder of the shipped configs: inside an installed package, else in the repository."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """Return the names of all shipped configs of runs, sorted."""
    folder = shipped_folder()
    names = []
    for path in folder.rglob(f"*{SUFFIX}"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name != NO_RUN:
            names.append(name)
    return sorted(names)


def find_config(path: Path) -> Path:
    """Return `path` if it is a file, else the shipped config of that name, else `path`."""
    if path.is_file() or path.as_posix() not in shipped_names():
        return path
    return shipped_folder() / f"{path.as_posix()}{SUFFIX}"


def headline(name: str) -> str:
    """Return the comment in the first line of a shipped config, which says what the config does."""
    text = (shipped_folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8")
    first_line, _, _ = text.partition("\n")
    return first_line.removeprefix("# ")
