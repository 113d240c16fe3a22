"""Errors with a message for the user, and their exit statuses."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Exit status after a mistake in config, data or arguments: the same command fails again.
INPUT_STATUS = 2
# Exit status EX_TEMPFAIL of sysexits.h: the same command may succeed later.
ENVIRONMENT_STATUS = 75
# Errors of a full disk, or of a quota that is used up.
FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Errors of the operating system that may pass without a change of the input.
TRANSIENT_ERRNOS = (*FULL_DISK_ERRNOS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM)
# Errors of a disk that cannot be written.
STORAGE_ERRNOS = (*TRANSIENT_ERRNOS, errno.EROFS, errno.EACCES, errno.EPERM)
# Start of every refusal by our engine inside a vLLM worker.
REFUSAL = "refused by calibadv_jax: "
# JAX's messages after a process of the run has ended; the exception may be a ValueError.
_LOST_PROCESS = re.compile(
    r"[A-Z_]+: .*(?i:gloo|nccl|(closed|reset) by peer|heartbeat|coordination service)", re.DOTALL
)
_QUOTED_PATH = re.compile(r"""["'](/[^"']+)["']""")


class UserError(Exception):
    """The input is bad. The message is one line that names the file, key or value, and how to fix it.

    `cli.run_and_exit` prints it without a traceback.
    """


class EnvironmentFailure(UserError):
    """The environment failed, not the input: a service is unreachable, a lock is held, a process ended."""


class SeveralErrors(UserError):
    """Several faults of the input, which were found together.

    Attributes:
        errors: The error of each fault.
    """

    def __init__(self, errors: Sequence[UserError]):
        self.errors = tuple(errors)
        listed = "; ".join(f"({number}) {error}" for number, error in enumerate(self.errors, 1))
        super().__init__(f"{len(self.errors)} faults: {listed}")


class Faults:
    """Collects the faults of an input, so that they are named together.

    Attributes:
        errors: The errors so far, each once.
    """

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the error with which the block ends, if it is a UserError, and go on behind the block."""
        try:
            yield
        except UserError as error:
            messages = {str(earlier_error) for earlier_error in self.errors}
            self.errors += [fault for fault in each_fault(error) if str(fault) not in messages]

    def raise_all(self) -> None:
        """Raise the errors as one; nothing without any.

        Raises:
            UserError: The error itself if there is only one.
            EnvironmentFailure: All faults are of the environment.
        """
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        together = SeveralErrors(self.errors)
        if all(isinstance(error, EnvironmentFailure) for error in self.errors):
            raise EnvironmentFailure(str(together))
        raise together


def each_fault(error: UserError) -> tuple[UserError, ...]:
    """Return the errors that were raised together, or the error alone."""
    return error.errors if isinstance(error, SeveralErrors) else (error,)


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that ends with an error.

    Returns:
        ENVIRONMENT_STATUS if the error or a cause of it may pass, such as a full disk; else INPUT_STATUS.
    """
    is_environment_failure = any(isinstance(cause, EnvironmentFailure) for cause in _causes(error))
    if is_environment_failure or storage_errno(error) in TRANSIENT_ERRNOS:
        return ENVIRONMENT_STATUS
    return INPUT_STATUS


def storage_errno(error: BaseException) -> int | None:
    """Return the errno of an error about a disk that cannot be written; None for other errors.

    Orbax, safetensors and tokenizers raise errors of their own, which only quote the operating system's
    message.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno if cause.errno in STORAGE_ERRNOS else None
        message = str(cause)
        for number in STORAGE_ERRNOS:
            if os.strerror(number) in message:
                return number
    return None


def storage_path(error: BaseException) -> str | None:
    """Return the path in an error about a disk that cannot be written; None if it names none."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.filename is not None:
            return str(cause.filename)
        quoted_path = _QUOTED_PATH.search(str(cause))
        if quoted_path:
            return quoted_path[1]
    return None


def is_lost_process(error: BaseException) -> bool:
    """Return whether JAX lost the connection to another process of the run."""
    return any(_LOST_PROCESS.match(str(cause)) for cause in _causes(error))


def one_line(error: BaseException) -> str:
    """Return an error as one line, to quote in a message: ``… cannot be read ({text})``.

    Returns:
        At most 300 characters: of an OSError the operating system's message, without number and path; of an
        error without a message the name of its type.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join(text.split())[:300] or type(error).__name__


def cause_text(error: BaseException) -> str:
    """Return the cause of a library's error as one line; of a failed disk the operating system's message."""
    number = storage_errno(error)
    if number is not None:
        return os.strerror(number)
    return one_line(error.__cause__ or error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of its cause, and so on."""
    yield error
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


class RequestFailed(EnvironmentFailure):
    """A service failed one request: within a rollout this ends the trajectory, but not the run.

    Args:
        service: Name of the service in one word, such as "sampler" or "retriever".
        message: What failed, in one line.
    """

    def __init__(self, service: str, message: str):
        super().__init__(message)
        self.service = service


class ActionRefused(Exception):
    """An action refuses its body: the policy reads the message, and the trajectory goes on.

    `Action.call` of a user's own action may raise it.
    """


class QueryRefused(RequestFailed):
    """The retriever refuses this query, and would refuse it again."""

    def __init__(self, message: str):
        super().__init__("retriever", message)
