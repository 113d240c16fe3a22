"""Files and folders that are written whole or not at all, even if the process ends or the disk is full."""

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

PARTIAL, PREVIOUS = ".partial", ".previous"  # suffixes of files being written, and exchanged


def check_literal(folder: Path) -> None:
    """Raise ValueError for a wildcard or backslash in a path, which Orbax would read as a pattern."""
    path = str(folder.absolute())
    if pattern := re.search(r"[*?\[\\]", path):
        fault = f"checkpoints cannot lie in a folder with {pattern[0]!r} in its path"
        raise ValueError(f"{path}: {fault}; rename it")


@contextmanager
def wrap_disk_errors(path: Path) -> Iterator[None]:
    """Turn the errors of any library for a disk that cannot be written into an OSError that names `path`.

    Errors that name a file outside of `path` and of its partial names stay as they are.
    """
    try:
        yield
    except Exception as error:  # each library has errors of its own
        number = None if isinstance(error, UserError) else storage_errno(error)
        files = [getattr(error, "filename", None), getattr(error, "filename2", None)]
        if number is None or (any(files) and not any(path.name in str(file) for file in files)):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield another name beside `path` to write to, which becomes `path` if the block succeeds.

    Its folder is made if missing. The data are on the disk before the name: after a power failure no file is
    empty. Two processes that write one path replace each other's complete file. After an error the older file
    is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(path, PARTIAL):
        leftover.unlink(missing_ok=True)
    partial = _own_name(path, PARTIAL)
    try:
        with wrap_disk_errors(path):
            yield partial
            _to_disk(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for a folder.

    If the process is killed while the folders are exchanged, the next writer restores the older one.
    """
    for previous in _leftovers(path, PREVIOUS):
        if not path.exists():
            previous.rename(path)
    for leftover in (*_leftovers(path, PARTIAL), *_leftovers(path, PREVIOUS)):
        shutil.rmtree(leftover, ignore_errors=True)
    partial, previous = _own_name(path, PARTIAL), _own_name(path, PREVIOUS)
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


def _own_name(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{end}")


def _leftovers(path: Path, end: str) -> list[Path]:
    """Return the hidden names beside `path` of killed processes of this machine."""
    names = re.compile(re.escape(f".{path.name}.{socket.gethostname()}.") + r"(\d+)" + re.escape(end))
    paths = path.parent.iterdir() if path.parent.is_dir() else ()
    matches = ((path, names.fullmatch(path.name)) for path in paths)
    return [path for path, match in matches if match and not _is_alive(int(match[1]))]


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():  # of an earlier process with this number: this one has only begun to write
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; see `atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a value as JSON; see `atomic_write`."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def content_hash(value: Any) -> str:
    """Return the SHA-256 of plain values, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines; see `atomic_write`."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_json(path: Path, way_out: str = "copy the file again") -> dict[str, Any]:
    """Return the JSON object in a file; raise UserError, which ends with `way_out`, if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {way_out}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; {way_out}")
    return value
