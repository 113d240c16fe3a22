"""Atomic writes: a file or folder is written completely or not at all, even if the process ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibadv_jax.core.errors import UserError, storage_errno

# Suffix of a file or folder that is being written.
PARTIAL = ".partial"
# Suffix of an older folder while it is exchanged for a new one.
PREVIOUS = ".previous"
# Characters that Orbax reads as a pattern or an escape.
_PATTERN_CHARACTERS = re.compile(r"[*?\[\\]")


def check_literal(folder: Path) -> None:
    """Raise ValueError for a wildcard or backslash in a path, which Orbax would read as a pattern."""
    path = str(folder.absolute())
    match = _PATTERN_CHARACTERS.search(path)
    if match:
        raise ValueError(
            f"{path}: checkpoints cannot lie in a folder with {match[0]!r} in its path; rename it"
        )


@contextmanager
def wrap_disk_errors(path: Path) -> Iterator[None]:
    """Turn any library's error about a disk that cannot be written into an OSError that names `path`.

    Other errors are not changed, nor are errors that name another file than `path` or its partial file.

    Args:
        path: File or folder that the block writes.

    Raises:
        OSError: The disk cannot be written.
    """
    try:
        yield
    except Exception as error:  # each library has errors of its own
        if isinstance(error, UserError):
            raise
        number = storage_errno(error)
        if number is None:
            raise
        files = [getattr(error, "filename", None), getattr(error, "filename2", None)]
        names_path = any(path.name in str(file) for file in files)
        names_other_file = any(files) and not names_path
        if names_other_file:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a partial file, which replaces `path` if the block succeeds.

    The partial file is beside `path`. The data are on the disk before the file gets its name, so that no file
    is empty after a power failure. If two processes write the same path, the later one replaces the complete
    file of the other. After an error the older file is unchanged.

    Args:
        path: File to write; its folder is made if it is missing.

    Yields:
        The path that the block has to write.

    Raises:
        OSError: The disk cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(path, PARTIAL):
        leftover.unlink(missing_ok=True)
    partial = _own_name(path, PARTIAL)
    # A link of this name, in a folder from somebody else, would be followed.
    partial.unlink(missing_ok=True)
    try:
        with wrap_disk_errors(path):
            yield partial
            _to_disk(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a folder atomically: yield a partial folder, which replaces `path` if the block succeeds.

    As `atomic_write`. If the process is killed while the folders are exchanged, the next writer restores the
    older folder.

    Args:
        path: Folder to write.

    Yields:
        The empty folder that the block has to fill.

    Raises:
        OSError: The disk cannot be written.
    """
    for previous in _leftovers(path, PREVIOUS):
        if not path.exists():
            previous.rename(path)
    for leftover in (*_leftovers(path, PARTIAL), *_leftovers(path, PREVIOUS)):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = _own_name(path, PARTIAL)
    previous = _own_name(path, PREVIOUS)
    try:
        with wrap_disk_errors(path):
            partial.mkdir(parents=True)
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    _to_disk(file)
            if path.exists():
                path.rename(previous)
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _own_name(path: Path, suffix: str) -> Path:
    """Return the hidden name beside `path` that only this process uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{suffix}")


def _leftovers(path: Path, suffix: str) -> list[Path]:
    """Return the files or folders beside `path` that killed processes of this machine have left."""
    if not path.parent.is_dir():
        return []
    prefix = f".{path.name}.{socket.gethostname()}."
    pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
    leftovers = []
    for neighbour in path.parent.iterdir():
        match = pattern.fullmatch(neighbour.name)
        if match and not _is_alive(int(match[1])):
            leftovers.append(neighbour)
    return leftovers


def _is_alive(pid: int) -> bool:
    """Return whether the process that wrote a leftover is still running."""
    if pid == os.getpid():
        # An earlier process had the same number: this process has not written yet.
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process belongs to another user.
        return True
    return True


def _to_disk(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, atomically; see `atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a value as JSON, atomically; see `atomic_write`."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def content_hash(value: Any) -> str:
    """Return the SHA-256 of JSON values in hexadecimal; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write rows as JSON Lines, atomically; see `atomic_write`."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json(path: Path, way_out: str = "copy the file again") -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: File to read.
        way_out: What the user should do about a damaged file; the end of the message.

    Raises:
        UserError: The file does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {way_out}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; {way_out}")
    return value
