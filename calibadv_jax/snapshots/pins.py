"""Files of a run that a copy of its folder holds, kept by hard links until they are uploaded."""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PINS = ".mirror"  # in the run's folder
CHECKPOINTS = "checkpoints"
# A path in a run's folder: relative, without "..", no lock or other hidden file.
FILE = re.compile(
    r"checkpoints/(0|[1-9]\d*)(/(?!\.\.?(/|\Z))[^/]+)+"
    r"|(?!(checkpoints|snapshots|sft_checkpoints)(/|\Z))(?!\.)[^/]+(/(?!\.)[^/]+)*",
    re.ASCII,
)


@dataclass
class Pin:
    """A checkpoint and the files beside it, as they were when it was complete."""

    folder: Path  # of the run
    step: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # `state_of` each

    def add(self, known: Mapping[str, tuple[int, int]]) -> None:
        """Pin the run's files, without links for those in the `known` state."""
        for path in sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")):
            if not FILE.fullmatch(path) or step_of(path) not in (None, self.step):
                continue
            with suppress(FileNotFoundError):  # removed meanwhile
                state = state_of(self.folder / path)
                if state and known.get(path) != state:
                    _link(self.folder / path, self.link(path))
                if state:
                    self.files[path] = state

    def link(self, path: str) -> Path:
        return self.folder / PINS / self.name / path

    def remove(self) -> None:
        shutil.rmtree(self.folder / PINS / self.name, ignore_errors=True)


def step_of(path: str) -> int | None:
    """Return the step of a checkpoint's file; None for other files."""
    top, _, rest = path.partition("/")
    return int(rest.partition("/")[0]) if top == CHECKPOINTS else None


def state_of(path: Path) -> tuple[int, int] | None:
    """Return size and time of change in ns of a file, which change with it; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _link(source: Path, link: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), link)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, link)
