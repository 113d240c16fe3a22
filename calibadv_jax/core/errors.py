"""Errors whose messages are written for the user, and the exit statuses that they end a process with."""

from __future__ import annotations

import errno

INPUT_STATUS = 2  # a mistake in config, data or arguments: a restart fails again
ENVIRONMENT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
# Errors of the system that end without a change of the input.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM)
REFUSAL = "refused by calibadv_jax: "  # start of every refusal by our engine inside a vLLM worker


class UserError(Exception):
    """Bad input: one line that names the file, key or value, and how to fix it.

    Entry points print it as ``error: …`` without a traceback and exit with `exit_status`.
    """


class EnvironmentFailure(UserError):
    """The environment failed and not the input: a service is away, a lock is held, another process ended."""


def exit_status(error: BaseException) -> int:
    """Return the status with which an error for the user ends the process.

    The disk may be full below an error that only names the file: the causes count too.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EnvironmentFailure) or (isinstance(cause, OSError) and cause.errno in PASSING):
            return ENVIRONMENT_STATUS
        cause = cause.__cause__
    return INPUT_STATUS


class RequestFailed(EnvironmentFailure):
    """A service could not serve one request: within a rollout this ends its trajectory and not the run.

    Args:
        service: who failed, one word: "sampler" or "retriever".
    """

    def __init__(self, service: str, message: str):
        super().__init__(message)
        self.service = service


class ActionRefused(Exception):
    """An action does not take its body: the policy reads why, and the trajectory goes on."""


class QueryRefused(RequestFailed):
    """The retriever does not take this query, however often it is asked."""

    def __init__(self, message: str):
        super().__init__("retriever", message)
