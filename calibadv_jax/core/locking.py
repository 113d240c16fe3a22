"""Two processes must not write into one place: locks that the system gives back when a process ends."""

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
from contextlib import contextmanager, suppress
from pathlib import Path

from calibadv_jax.core.errors import EnvironmentFailure, UserError

LOCK = ".lock"  # in the folder of a run
# What file systems without locks answer: NFS without its lock service, Lustre mounted without flock.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
LONGEST_COMMAND = 200  # characters

_held: dict[Path, int] = {}  # files that this process has locked
_guard = threading.Lock()


@contextmanager
def locked_run(folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Holds the folder of a run, which is made when missing; see `locked`."""
    with locked(folder / LOCK, f"run.dir={folder}", warn):
        yield


@contextmanager
def locked_output(path: Path, key: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Holds a file or folder that is written whole, under a name beside it; see `locked`.

    Args:
        key: the config key that names `path`, for messages.
    """
    with locked(path.with_name(f".{path.name}{LOCK}"), f"{key}={path}", warn):
        yield


@contextmanager
def locked(path: Path, what: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path` while the block runs. It says who has it, and goes with the block.

    A process that has the lock gets it again. Its children do not have it: neither programs that it starts
    nor copies of itself keep it alive.

    Args:
        what: is locked, as ``key=value``, for messages.
        warn: is told if the file system has no locks; then the block runs all the same.

    Raises:
        EnvironmentFailure: another process has it (the message says which).
        UserError: the file cannot be made.
    """
    place = path.absolute()
    with _guard:
        is_first = place not in _held
        if is_first:
            folder_is_new = not place.parent.exists()
            _held[place] = _take(place, what, warn)
    try:
        yield
    finally:
        with _guard:
            if is_first and place in _held:  # not in a copy of the process that took it
                # Before it is given back: who finds the file must find it locked.
                place.unlink(missing_ok=True)
                if folder_is_new:
                    with suppress(OSError):  # something was written there
                        place.parent.rmdir()
                os.close(_held.pop(place))


def _take(path: Path, what: str, warn: Callable[[str], None]) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # its owner has just removed the folder that it made
        except OSError as error:
            raise UserError(
                f"{what} cannot be written ({error.strerror}: {error.filename}); choose another folder"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise EnvironmentFailure(
                f"{what} is in use by {owner}; wait until it has ended, stop it, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise
            warn(
                f"{what}: its file system has no locks ({error.strerror}), so nothing stops a second process"
                " from writing there; start no other run there"
            )
            return file
        if path.is_file() and os.fstat(file).st_ino == path.stat().st_ino:
            _sign(file)
            return file
        os.close(file)  # its owner has just removed it


def _sign(file: int) -> None:
    """Writes who has the lock. It counts without that: the disk may be full."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:LONGEST_COMMAND]
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"process {os.getpid()} on {socket.gethostname()} since {since} ({' '.join(command.split())})"
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace"), 0)


def _forget() -> None:
    """In a copy of this process: the lock is the original's alone."""
    global _guard
    _guard = threading.Lock()  # another thread may have held it
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget)
