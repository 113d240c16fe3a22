"""Requests to vLLM's server, and what its replies hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.trajectory import StopReason
from calibadv_jax.sampler.stop_rule import StopRule

HIGHEST_LOGPROB = 1e-4  # nats; a log-probability is above 0 only by rounding
LOWEST_LOGPROB = -9999.0  # nats; vLLM's minus infinity, which no sampled token can have
LONGEST_MESSAGE = 600  # characters of vLLM's message that are shown


def completion_request(
    context: Sequence[int], done: Sequence[int], sampling: SamplingParams, stops: StopRule
) -> dict[str, Any]:
    """Build the request for the tokens that follow `done`.

    Args:
        context: token ids of the context.
        done: token ids of the completion so far. If there are any, the completion was cut, and the rest of
            it gets another seed.
        sampling: how to sample the completion, `done` included.
        stops: where completions end.

    Returns:
        The JSON body of the request.
    """
    seed = sampling.seed
    if done:
        digest = hashlib.blake2b(f"{seed}/{len(done)}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big")
    # vLLM sees only the new tokens: it must also stop at the missing part of a stop string that was cut. It
    # may then stop where such a part means nothing; `StopRule.find` tells this, and the caller asks again.
    stop_strings = [*sampling.stop, *stops.remainders(done, sampling.stop)]
    parameters = {
        "max_tokens": sampling.max_tokens - len(done),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "stop": stop_strings,
        "stop_token_ids": sorted(stops.end_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    return {"token_ids": [*context, *done], "sampling_params": parameters}


def read_completion(
    reply: Any, version_of: Callable[[str], int], max_tokens: int, vocab_size: int
) -> Completion:
    """Return the completion in a reply, after checking all of it.

    Args:
        reply: the parsed JSON body, which may hold anything.
        version_of: parses the label of weights; its errors are passed on.
        max_tokens: number of tokens that were asked for.
        vocab_size: all token ids are below it.

    Returns:
        The completion; its stop reason is "abort" if it was cut, and it may then have no tokens.

    Raises:
        ValueError: the reply, a token or a log-probability is invalid.
    """
    try:
        (choice,) = reply["choices"]
        tokens = list(choice["token_ids"] or [])
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        labels = [str(span["version"]) for span in choice["weight_versions"] or []]
        finish_reason = str(choice["finish_reason"])
        matched_stop = choice.get("stop_reason")
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    stop_reason = _stop_reason(finish_reason, matched_stop)
    if stop_reason is None or (stop_reason != "abort" and not tokens):
        raise ValueError(f"finish_reason {finish_reason!r} with {len(tokens)} tokens")
    lacks_logprobs = len(logprobs) != len(tokens)
    lacks_labels = bool(tokens) and not labels
    if lacks_logprobs or lacks_labels or len(tokens) > max_tokens:
        raise ValueError(
            f"{len(tokens)} tokens where {max_tokens} were asked for, {len(logprobs)} log-probabilities,"
            f" labels {labels}"
        )
    for token, logprob in zip(tokens, logprobs, strict=True):
        is_token = type(token) is int and 0 <= token < vocab_size
        is_logprob = LOWEST_LOGPROB < logprob <= HIGHEST_LOGPROB  # False for NaN
        if not is_token or not is_logprob:
            raise ValueError(f"token {token!r} of {vocab_size} with log-probability {logprob}")
    versions = tuple(version_of(label) for label in labels)
    return Completion(tokens, logprobs, stop_reason, versions)


def _stop_reason(finish_reason: str, matched_stop: Any) -> StopReason | None:
    """Return why a completion ended, by vLLM's words for it; None if they are unknown."""
    if finish_reason == "length":
        return "length"
    if finish_reason == "abort":
        return "abort"
    if finish_reason == "stop":
        # vLLM names the stop string that it matched. At an end-of-text token it names none, or the token id.
        return "stop" if isinstance(matched_stop, str) else "eos"
    return None


def error_message(body: bytes) -> str:
    """Return the message of vLLM's error on one line, without its advice to read a stack trace.

    Args:
        body: the body of a reply with an error status; it need not be JSON.

    Returns:
        At most LONGEST_MESSAGE printable characters.
    """
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body.decode(errors="replace")
    message, _, _ = to_printable_line(message).partition(", please check the stack trace")
    return message[:LONGEST_MESSAGE]
