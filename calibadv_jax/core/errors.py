"""The one error type whose message is written for the user."""

REFUSAL = "refused by calibadv_jax: "  # start of every refusal by our engine inside a vLLM worker


class UserError(Exception):
    """Bad input: one line that names the file, key or value, and how to fix it.

    Entry points print it as ``error: …`` without a traceback and exit with status 2.
    """


class RequestFailed(UserError):
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
