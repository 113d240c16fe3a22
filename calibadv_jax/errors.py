"""The one error type a user is meant to read."""

REFUSAL = "refused by calibadv_jax: "  # begins what our engine inside a vLLM worker objects to


class UserError(Exception):
    """Bad input: one line that names the file, key or value, and the way out.

    Entry points print it as ``error: …`` without a traceback and exit with status 2.
    """
