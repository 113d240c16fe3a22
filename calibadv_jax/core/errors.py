"""Errors with a message for the user, and their exit statuses."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

INPUT_STATUS = 2  # a mistake in config, data or arguments: a restart fails again
ENVIRONMENT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
# Errors of the system that may pass without a change of the input.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM)
UNWRITABLE = (*PASSING, errno.EROFS, errno.EACCES, errno.EPERM)
# JAX's errors about a program of several processes of which one is gone; the type may be ValueError.
_LOST_PROCESS = re.compile(
    r"[A-Z_]+: .*(?i:gloo|nccl|(closed|reset) by peer|heartbeat|coordination service)", re.DOTALL
)
REFUSAL = "refused by calibadv_jax: "  # start of every refusal by our engine inside a vLLM worker


class UserError(Exception):
    """Bad input: one line that names the file, key or value, and how to fix it; see `cli.main`."""


class EnvironmentFailure(UserError):
    """The environment failed, not the input: a service is away, a lock is held, another process ended."""


def exit_status(error: BaseException) -> int:
    """Return the exit status of an error or of its causes, such as a full disk."""
    is_passing = any(isinstance(cause, EnvironmentFailure) for cause in _causes(error))
    return ENVIRONMENT_STATUS if is_passing or storage_errno(error) in PASSING else INPUT_STATUS


def storage_errno(error: BaseException) -> int | None:
    """Return the errno of a disk that cannot be written; None for other errors.

    Orbax, safetensors and tokenizers raise their own errors, which only quote the system's words.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno if cause.errno in UNWRITABLE else None
        if quoted := [number for number in UNWRITABLE if os.strerror(number) in str(cause)]:
            return quoted[0]
    return None


def storage_path(error: BaseException) -> str | None:
    """Return the path that an error of `storage_errno` names, if any."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.filename is not None:
            return str(cause.filename)
        if quoted := re.search(r"""["'](/[^"']+)["']""", str(cause)):
            return quoted[1]
    return None


def is_lost_process(error: BaseException) -> bool:
    """Return whether JAX lost the connection to another process of the run."""
    return any(_LOST_PROCESS.match(str(cause)) for cause in _causes(error))


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 300 characters, for messages: ``… cannot be read ({text})``.

    The system's errors give the system's words without number and path; errors without a message their type.
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(text.split())[:300] or type(error).__name__


def cause_text(error: BaseException) -> str:
    """Return the cause of a library's error as one line: the system's words if the disk failed."""
    number = storage_errno(error)
    return one_line(error.__cause__ or error) if number is None else os.strerror(number)


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


class RequestFailed(EnvironmentFailure):
    """A service failed one request: within a rollout this ends its trajectory and not the run."""

    def __init__(self, service: str, message: str):
        super().__init__(message)
        self.service = service  # one word, such as "sampler" or "retriever"


class ActionRefused(Exception):
    """An action refuses its body: the policy reads why, and the trajectory goes on."""


class QueryRefused(RequestFailed):
    """The retriever refuses this query, and would refuse it again."""

    def __init__(self, message: str):
        super().__init__("retriever", message)
