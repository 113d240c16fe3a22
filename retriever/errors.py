"""Errors of the service, each one line; nothing is shared with the trainer."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Exit status after a failure of the environment: the same command may succeed later. It is EX_TEMPFAIL, which
# the trainer uses too.
ENVIRONMENT_STATUS = 75
# Errors of the system that pass when someone makes room on the disk.
TRANSIENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Characters shown of another library's message.
REASON_LENGTH = 160
# Variables of the environment that name proxies. Their values may hold passwords.
_PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY")
PROXY_VARIABLES = (*_PROXIES, *(name.lower() for name in _PROXIES))


class RetrieverError(Exception):
    """One line that names the file, option or value, and how to fix it."""


class Unavailable(RetrieverError):
    """Another service does not answer now; the same call may succeed later."""


class RequestFailed(Exception):
    """A request or a query that is not answered.

    Args:
        status: HTTP status of the reply.
        message: One line for the client.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@contextmanager
def explained_proxies() -> Iterator[None]:
    """Raise RetrieverError if the proxies of the environment prevent making an HTTP client."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if "proxy" not in str(error):
            raise
        names = ", ".join(name for name in PROXY_VARIABLES if os.environ.get(name))
        raise RetrieverError(
            f"{names}: the proxy cannot be used ({reason(error)}); pip install 'httpx[socks]' for socks5://,"
            " or unset it"
        ) from error


def status_of(work: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run a command, write its error to stderr, and return its exit status.

    Args:
        work: The command.
        interrupted: The line to write after Ctrl-C.

    Returns:
        0 after success, 2 after an error, 75 if the environment failed (another service does not answer, or
        the disk is full), 130 after Ctrl-C.
    """
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
    """Return whether the error or one of its causes is an absent service or a full disk."""
    while error is not None:
        if isinstance(error, Unavailable):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        error = error.__cause__
    return False


def require(module: str, advice: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Dotted name of the module.
        advice: How to install the package, or what to use instead.

    Returns:
        The module.

    Raises:
        RetrieverError: The package, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RetrieverError(f"{error.name or module} is not installed: {advice}") from error


def reason(error: Exception) -> str:
    """Return the first line of another library's message, or the error's type if it has none."""
    message = str(error).strip() or type(error).__name__
    first_line = message.splitlines()[0]
    return first_line[:REASON_LENGTH]
