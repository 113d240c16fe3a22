"""Errors of the service, each one line; nothing is shared with the trainer."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT_STATUS = 75  # the same command may succeed later (EX_TEMPFAIL), as for the trainer
TRANSIENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
REASON_LENGTH = 160  # characters shown of another library's message


class RetrieverError(Exception):
    """One line that names the file, option or value, and how to fix it."""


class Unavailable(RetrieverError):
    """Another service does not answer now; the same call may succeed later."""


class RequestFailed(Exception):
    """A request or a query that is not answered; `status` is the HTTP status of the reply."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def status_of(work: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run a command: status 0; 2 after an error; 75 where the environment failed; 130 after Ctrl-C."""
    try:
        work()
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return ENVIRONMENT_STATUS if _is_transient(error) else 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        return 130
    return 0


def _is_transient(error: BaseException | None) -> bool:
    """Return whether another service is away or a disk is full, in the error or in its causes."""
    while error is not None:
        if isinstance(error, Unavailable) or (isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS):
            return True
        error = error.__cause__
    return False


def require(module: str, advice: str) -> Any:
    """Import an optional package's module; raises RetrieverError with advice if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RetrieverError(f"{error.name or module} is not installed: {advice}") from error


def reason(error: Exception) -> str:
    """The first line of another library's message, or the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:REASON_LENGTH]
