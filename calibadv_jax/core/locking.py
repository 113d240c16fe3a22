"""Locks against two processes that write to the same place.

The operating system releases a lock when its process ends.
"""

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

# Name of the lock file in the folder of a run.
LOCK = ".lock"
# Characters of the owner's command that a lock file quotes.
LONGEST_COMMAND = 200
# Errors of file systems without locks: NFS without its lock service, Lustre mounted without flock.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

# Lock files that this process holds, and their file descriptors.
_held: dict[Path, int] = {}
# Guards `_held` between the threads of this process.
_guard = threading.Lock()


def locked_run(folder: Path, warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """Lock the folder of a run; see `locked`.

    Args:
        folder: Folder of the run; it is made if it is missing.
        warn: Called with a message if the file system has no locks.
    """
    return locked(folder / LOCK, f"run.dir={folder}", warn)


def locked_output(path: Path, key: str, warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """Lock a file or folder that is written atomically, by a lock file beside it; see `locked`.

    Args:
        path: File or folder to lock.
        key: Config key that names it, for messages.
        warn: Called with a message if the file system has no locks.
    """
    return locked(path.with_name(f".{path.name}{LOCK}"), f"{key}={path}", warn)


@contextmanager
def locked(path: Path, setting: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file while the block runs.

    The file names its owner, and is removed after the block. A process that has the lock gets it again. Its
    child processes and copies do not have it.

    Args:
        path: The lock file.
        setting: What is locked, as ``key=value``, for messages.
        warn: Called with a message if the file system has no locks; the block then runs without a lock.

    Raises:
        EnvironmentFailure: Another process has the lock; the message names it.
        UserError: The file cannot be made.
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
            # A copy of the process that took the lock holds nothing; see `_forget_locks`.
            if is_first and place in _held:
                # Remove the file before releasing it: a process that sees the file must find it locked.
                place.unlink(missing_ok=True)
                os.close(_held.pop(place))


def _take(path: Path, setting: str, warn: Callable[[str], None]) -> int:
    """Make, lock and sign a lock file, and return its file descriptor."""
    while True:
        file = _open(path, setting)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise EnvironmentFailure(
                f"{setting} is in use by {owner}; wait until it has ended, stop it, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise
            warn(
                f"{setting}: its file system has no locks ({one_line(error)}) against a second process; "
                "start no other run there"
            )
            return file
        if path.is_file() and os.fstat(file).st_ino == path.stat().st_ino:
            _sign(file)
            return file
        # The owner has removed the file after it was opened here: try again with a new file.
        os.close(file)


def _open(path: Path, setting: str) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is signed: a link in its place, in a folder from somebody else, is not followed.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        reason = f"{one_line(error)}: {error.filename}"
        raise UserError(f"{setting} cannot be written ({reason}); choose another folder") from error


def _sign(file: int) -> None:
    """Write the owner into a lock file."""
    program = Path(sys.argv[0]).name
    command = shlex.join([program, *sys.argv[1:]])[:LONGEST_COMMAND]
    command_line = " ".join(command.split())
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"process {os.getpid()} on {socket.gethostname()} since {since} ({command_line})"
    # A full disk prevents the signature, but not the lock.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace"), 0)


def _forget_locks() -> None:
    """Close the lock files in a forked copy of this process: the original keeps its locks."""
    global _guard
    # A thread that the copy does not have may have held the guard.
    _guard = threading.Lock()
    while _held:
        _, file = _held.popitem()
        os.close(file)


os.register_at_fork(after_in_child=_forget_locks)
