"""The files of a run's folder that are copied to an object store, and how to tell that they changed."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CHECKPOINTS = "checkpoints"  # folder of the checkpoints in a run's folder
# A file of a checkpoint: relative and without "..". The group is the checkpoint's step.
_CHECKPOINT_FILE = r"checkpoints/(0|[1-9]\d*)(?:/(?!\.\.?(?:/|\Z))[^/]+)+"
# Any other file: relative, without "..", no lock or other hidden file, not in a folder left out of the copy.
_OTHER_FILE = r"(?!(?:checkpoints|snapshots|sft_checkpoints)(?:/|\Z))(?!\.)[^/]+(?:/(?!\.)[^/]+)*"
RUN_FILE = re.compile(f"{_CHECKPOINT_FILE}|{_OTHER_FILE}", re.ASCII)


class FileState(NamedTuple):
    """What changes when a file changes."""

    size: int  # bytes
    mtime_ns: int  # time of the last change, in ns


def file_states(folder: Path) -> dict[str, FileState]:
    """Return the state of each of the run's files in a folder, by path relative to the folder.

    Folders and files may be removed meanwhile.
    """
    states = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            place = Path(parent, name)
            path = place.relative_to(folder).as_posix()
            with suppress(FileNotFoundError):
                if RUN_FILE.fullmatch(path) and place.is_file():
                    status = place.stat()
                    states[path] = FileState(status.st_size, status.st_mtime_ns)
    return states


def step_of(path: str) -> int | None:
    """Return the step of the checkpoint that a file belongs to, by its path in the run's folder.

    Returns:
        None for all other files.
    """
    file = RUN_FILE.fullmatch(path)
    if file is None or file[1] is None:
        return None
    return int(file[1])


def link_file(source: Path, link: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links.

    Args:
        source: the file. It may be removed meanwhile; then nothing is done.
        link: the second name, whose folder is made if it is missing.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        try:
            os.link(source.resolve(), link)
        except OSError:
            shutil.copy2(source, link)
