"""What a vLLM server is asked and answers: nothing that the learner could not train passes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import StopReason
from calibadv_jax.sampler.stopping import StopRule

HIGHEST = 1e-4  # of a log-probability: above 0 only by rounding
LOWEST = -9999.0  # what vLLM sends for minus infinity, which no sampled token can have


def completion_request(
    context: Sequence[int], done: Sequence[int], sampling: SamplingParams, stops: StopRule
) -> dict[str, Any]:
    """Asks for what follows the tokens that are `done` of a completion."""
    parameters = {
        "max_tokens": sampling.max_tokens - len(done),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": _continued_seed(sampling.seed, len(done)),
        # The rest of a stop string that was cut, too; it may also end a part where it means nothing.
        "stop": [*sampling.stop, *stops.remainders(done, sampling.stop)],
        "stop_token_ids": sorted(stops.end_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    return {"token_ids": [*context, *done], "sampling_params": parameters}


def read_completion(
    reply: Any, version_of: Callable[[str], int], max_tokens: int, vocab_size: int
) -> Completion:
    """The completion in a reply to a request for tokens.

    Args:
        version_of: policy version of a label of weights; its errors pass.
        max_tokens: that were asked for.
        vocab_size: token ids are below it.

    Raises:
        ValueError: it is no completion, or one whose tokens or log-probabilities cannot be true.
    """
    try:
        (choice,) = reply["choices"]
        tokens = list(choice["token_ids"] or [])
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        labels = [str(span["version"]) for span in choice["weight_versions"] or []]
        reason = _stop_reason(choice)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if len(logprobs) != len(tokens) or (tokens and not labels):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, labels {labels}")
    if len(tokens) > max_tokens:
        raise ValueError(f"{len(tokens)} tokens where {max_tokens} were asked for")
    if not tokens and reason != "abort":
        raise ValueError(f"finish_reason {choice['finish_reason']!r} without a token")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"token {token!r} in a vocabulary of {vocab_size}")
    for value in logprobs:
        if not LOWEST < value <= HIGHEST:  # NaN is not
            raise ValueError(f"log-probability {value}")
    return Completion(tokens, logprobs, reason, tuple(map(version_of, labels)))


def error_message(body: bytes) -> str:
    """What vLLM says, on one line, without its advice to read a stack trace."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body.decode(errors="replace")
    return printable(message).split(", please check the stack trace")[0][:600]


def _continued_seed(seed: int, done: int) -> int:
    """A completion that continues after a cut must not use the random numbers of its first part again."""
    if not done:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{done}".encode(), digest_size=4).digest(), "big")


def _stop_reason(choice: dict[str, Any]) -> StopReason:
    """vLLM says "stop" with a stop string, and without one (or with a token id) at end-of-text."""
    finished = choice["finish_reason"]
    if finished == "stop":
        return "stop" if isinstance(choice.get("stop_reason"), str) else "eos"
    if finished in ("length", "abort"):
        return "length" if finished == "length" else "abort"
    raise ValueError(f"finish_reason {finished!r}")
