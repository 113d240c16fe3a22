"""Locks against two processes that write into one place; the system releases them when a process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from calibadv_jax.core.errors import EnvironmentFailure, UserError, one_line

LOCK = ".lock"  # in the folder of a run
LONGEST_COMMAND = 200  # characters
# Errors of file systems without locks: NFS without its lock service, Lustre mounted without flock.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

_held: dict[Path, int] = {}  # files that this process has locked
_guard = threading.Lock()


def locked_run(folder: Path, warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """Lock the folder of a run, which is made when missing; see `locked`."""
    return locked(folder / LOCK, f"run.dir={folder}", warn)


def locked_output(path: Path, key: str, warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """Lock a file or folder that is written whole, `path` of the config key, by a name beside it."""
    return locked(path.with_name(f".{path.name}{LOCK}"), f"{key}={path}", warn)


@contextmanager
def locked(path: Path, setting: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; the file names its owner and goes with the block.

    A process that has the lock gets it again. Its children and copies do not have it. Messages name the place
    by `setting`, ``key=value``. If the file system has no locks, `warn` is called and the block runs. Raises
    EnvironmentFailure, which names the other owner, or UserError if the file cannot be made.
    """
    place = path.absolute()
    with _guard:
        is_first = place not in _held
        if is_first:
            _held[place] = _take(place, setting, warn)
    try:
        yield
    finally:
        with _guard:
            if is_first and place in _held:  # not in a copy of the process that took it
                # Before the release: a process that finds the file must find it locked.
                place.unlink(missing_ok=True)
                os.close(_held.pop(place))


def _take(path: Path, setting: str, warn: Callable[[str], None]) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            reason = f"{one_line(error)}: {error.filename}"
            raise UserError(f"{setting} cannot be written ({reason}); choose another folder") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(file)
            advice = "wait until it has ended, stop it, or choose another folder"
            raise EnvironmentFailure(f"{setting} is in use by {owner}; {advice}") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise
            fault = f"its file system has no locks ({one_line(error)}) against a second process"
            warn(f"{setting}: {fault}; start no other run there")
            return file
        if path.is_file() and os.fstat(file).st_ino == path.stat().st_ino:
            _sign(file)
            return file
        os.close(file)  # its owner has just removed it


def _sign(file: int) -> None:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:LONGEST_COMMAND]
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"process {os.getpid()} on {socket.gethostname()} since {since} ({' '.join(command.split())})"
    with suppress(OSError):  # the lock holds on a full disk too
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace"), 0)


def _forget() -> None:
    """Release nothing in a copy of this process: the lock belongs to the original."""
    global _guard
    _guard = threading.Lock()  # another thread may have held it
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget)
