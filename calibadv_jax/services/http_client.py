"""HTTP connections to the services of a run, and the one retry loop for all of them.

aiohttp is used because hundreds of requests are open at once: httpx goes through all of a pool's connections
for each request (encode/httpx#3215), which took more of a core than the agent loop itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.core.user_functions import describe_failure

UNAVAILABLE_STATUSES = (
    408,
    425,
    429,
    502,
    503,
    504,
)  # statuses that announce that a later attempt may succeed
NOT_IMPLEMENTED = 501  # the only status from 500 on after which another attempt is useless
# Seconds for which an idle connection is kept. Servers close theirs after five seconds: a shorter time here
# avoids that a server closes a connection that is just being used again.
KEEPALIVE_SECONDS = 2.0
LONGEST_REPLY = 2**26  # bytes, decompressed: 256 queries with 256 KiB of documents each

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubles up to LAST_PAUSE
LAST_PAUSE = 10.0  # seconds
SINGLE_ATTEMPT = 1e-3  # patience in seconds that stands for a single attempt
BAD_REPLIES = 3  # invalid replies after which a request has failed

Warn = Callable[[str], object]  # takes a line for the user
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class BadReply(Exception):
    """A service answered with an invalid reply: one that breaks its contract."""


class Unreachable(Exception):
    """A service did not answer in time.

    Args:
        reason: Why, for messages.
        retry_after: Seconds that the service asks to wait; 0: it does not say.
    """

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class HttpReply:
    """A complete HTTP reply; the names of `headers` ignore case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_unavailable(self) -> bool:
        """Whether the service cannot answer now: because it says so, or because it is broken."""
        return self.status in UNAVAILABLE_STATUSES or (self.status >= 500 and self.status != NOT_IMPLEMENTED)

    @property
    def retry_after(self) -> float:
        """Seconds that the service asks to wait, directly or by a date (RFC 9110); 0: it does not say."""
        value = self.headers.get("Retry-After", "").strip()
        if value.isdecimal():
            return float(value)
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, OverflowError):  # OverflowError: a number of a date has many digits
            return 0.0
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
        return max(0.0, seconds)

    @property
    def excerpt(self) -> str:
        """Status and beginning of the body, for messages."""
        return f"status {self.status}: {excerpt(self.body)}"

    def parse(self, kind: type[M]) -> M:
        """Parse the body as JSON; invalid UTF-8 and lone surrogates become U+FFFD.

        Raises:
            pydantic.ValidationError: The body does not fit the model.
        """
        try:
            return kind.model_validate_json(self.body)
        except ValidationError:
            repaired = well_formed_json(self.body)
            if repaired == self.body:
                raise
            return kind.model_validate_json(repaired)


def excerpt(body: bytes) -> str:
    """Return the beginning of a body as one line, for messages."""
    return repr(" ".join(body.decode(errors="replace").split())[:120])


def open_session(timeout: float, token_variable: str = "") -> aiohttp.ClientSession:
    """Open a session without a limit on connections and without proxies.

    Args:
        timeout: Seconds from the connection to the last byte of a reply.
        token_variable: Environment variable of the bearer token; none is sent if it is empty.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    token = os.environ.get(token_variable, "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token else None
    total_timeout = aiohttp.ClientTimeout(total=timeout)
    return aiohttp.ClientSession(connector=connector, timeout=total_timeout, headers=headers)


async def request(
    http: aiohttp.ClientSession, method: str, url: str, longest: int = LONGEST_REPLY, **arguments: Any
) -> HttpReply:
    """Return the reply to a request. Redirections are not followed: they are replies like any other.

    Args:
        http: See `open_session`.
        method: HTTP method.
        url: Address.
        longest: Longest body in bytes, decompressed.
        **arguments: Passed to the `request` of the session.

    Raises:
        BadReply: The body is longer than `longest`.
        Unreachable: No complete reply came in time.
        UserError: The address is not a URL.
    """
    try:
        async with http.request(method, url, allow_redirects=False, **arguments) as response:
            body = await read_all(response.content.iter_any(), longest)
            return HttpReply(response.status, body, response.headers)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise UserError(f"{url}: not a URL; give one such as http://127.0.0.1:8000") from error
    except TimeoutError as error:
        raise Unreachable("no whole reply in time") from error
    except aiohttp.ClientError as error:
        raise Unreachable(describe_failure(error)) from error


async def read_all(chunks: AsyncIterator[bytes], longest: int = LONGEST_REPLY) -> bytes:
    """Join the chunks of a reply; raise BadReply as soon as they are longer than `longest` bytes."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > longest:
            raise BadReply(f"the reply is longer than {longest / 2**20:g} MiB")
    return bytes(body)


async def wait_with_health_check(
    reply: Coroutine[Any, Any, T], check: Callable[[], Awaitable[object]], pause: float
) -> T:
    """Wait for a reply, and check meanwhile that the service still lives.

    Args:
        reply: The request.
        check: Called every `pause` seconds until the reply is complete. Its Unreachable cancels the request.
        pause: Seconds.

    Raises:
        Unreachable: From `check`, unless the reply was complete by then. Errors of `reply` pass.
    """
    task = asyncio.create_task(reply)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=pause)
            if done:
                return task.result()
            try:
                await check()
            except Unreachable:
                if not task.done():
                    raise
    finally:
        task.cancel()


async def retry(
    attempt: Callable[[], Awaitable[T]],
    patience: float,
    on_unavailable: Callable[[Unreachable], object] = lambda error: None,
) -> T:
    """Repeat an attempt while the service is unavailable or its reply is invalid; return the result.

    The pauses double, or are as long as the service asks for.

    Args:
        attempt: Raises Unreachable or BadReply if it should be repeated. Other errors pass.
        patience: Seconds without a reply after which the last error is raised. An invalid reply counts as a
            reply: after it the time starts again. At most `SINGLE_ATTEMPT`: there is a single attempt.
        on_unavailable: Called at the first Unreachable, and at the first one after an invalid reply.

    Raises:
        Unreachable: There was no reply for `patience` seconds.
        BadReply: BAD_REPLIES replies were invalid.
    """
    pause = FIRST_PAUSE
    deadline: float | None = None  # set while the service is unavailable
    num_bad_replies = 0
    while True:
        try:
            return await attempt()
        except Unreachable as error:
            if deadline is None:
                if patience > SINGLE_ATTEMPT:
                    on_unavailable(error)
                deadline = time.monotonic() + patience
            remaining = deadline - time.monotonic()
            if remaining <= 0 or patience <= SINGLE_ATTEMPT:
                raise
            # The random part spreads the requests that were waiting for the same service.
            longer_pause = max(pause + random.uniform(0, FIRST_PAUSE), error.retry_after)
            seconds = min(longer_pause, remaining)
        except BadReply:
            num_bad_replies += 1
            if num_bad_replies == BAD_REPLIES:
                raise
            deadline = None
            seconds = pause
        await asyncio.sleep(seconds)
        pause = min(2 * pause, LAST_PAUSE)


def describe_patience(patience: float) -> str:
    """Return the words "no answer for 5 s" for a message about a service without a reply."""
    return f"no answer for {patience:g} s" if patience > SINGLE_ATTEMPT else "no answer"


def wait_for_any(
    service: str,
    urls: Sequence[str],
    ask: Callable[[aiohttp.ClientSession, str], Awaitable[T]],
    *,
    timeout: float,
    patience: float,
    advice: str,
    say: Warn,
    token_variable: str = "",
) -> tuple[dict[str, T], dict[str, str]]:
    """Ask several services together until at least one answers.

    Args:
        service: What they are, for messages.
        urls: Their addresses.
        ask: Asks one of them. It raises Unreachable if the service should be waited for; other errors pass at
            once.
        timeout: Seconds of one attempt.
        patience: Seconds until the wait is given up.
        advice: How to start a service, for messages.
        say: Takes a line about the wait.
        token_variable: Environment variable of the bearer token.

    Returns:
        The answers of the services that answer, and why the others do not, both by URL.

    Raises:
        EnvironmentFailure: No service has answered.
    """
    names = ", ".join(urls)
    distinct_urls = list(dict.fromkeys(urls))

    def on_unavailable(error: Unreachable) -> None:
        say(f"waiting up to {patience:g} s for {service} {names} ({error}); otherwise {advice}")

    async def ask_all() -> tuple[dict[str, T], dict[str, str]]:
        async with open_session(timeout, token_variable) as http:
            requests = [ask(http, url) for url in distinct_urls]
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
        answers: dict[str, T] = {}
        missing: dict[str, Unreachable] = {}
        for url, outcome in zip(distinct_urls, outcomes, strict=True):
            if isinstance(outcome, Unreachable):
                missing[url] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[url] = outcome
        if not answers:
            raise missing[distinct_urls[0]]
        return answers, {url: str(error) for url, error in missing.items()}

    try:
        return run_coroutine(lambda: retry(ask_all, patience, on_unavailable))
    except Unreachable as error:
        raise EnvironmentFailure(f"{service} {names}: cannot be reached ({error}); {advice}") from error


def run_coroutine(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine and return its result, also where an event loop is running, as in a notebook.

    There it gets a thread and an event loop of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


class PerLoop(Generic[T]):
    """A value that belongs to an event loop, such as connections: made anew for each loop.

    Args:
        make: Makes the value.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._value: T | None = None

    def get(self) -> T:
        """Return the value of the running loop, and make it at the first call there."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._value is None:
            value = self._make()
            self._loop = loop
            self._value = value
            return value
        return self._value

    def take(self) -> T | None:
        """Return the value of the running loop, if any, for the caller to close, and forget it."""
        if self._loop is not asyncio.get_running_loop():
            return None
        value = self._value
        self._value = None
        return value
