"""HTTP connections to the services of a run, and the one retry loop for all of them.

aiohttp, because hundreds of requests are open at once: httpx goes through all of a pool's connections for
each request (encode/httpx#3215), which took more of a core than the agent loop itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.core.user_functions import failure

AWAY = (408, 425, 429, 502, 503, 504)  # statuses that announce that a later attempt may succeed
NO_SUCH_METHOD = 501
KEEPALIVE_SECONDS = 2.0  # below the servers' five: so none closes a connection that is just being reused
LONGEST_REPLY = 2**26  # bytes, decompressed: 256 queries with 256 KiB of documents each

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubles up to LAST_PAUSE
LAST_PAUSE = 10.0
ONCE = 1e-3  # patience in seconds for a single attempt
BAD_REPLIES = 3  # replies against the contract after which a request has failed

Warn = Callable[[str], object]  # takes a line for the user
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class BadReply(Exception):
    """A service answered, but against its contract."""


class Unreachable(Exception):
    """A service did not answer in time, and asks to wait `retry_after` seconds; 0: it does not say."""

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class HttpReply:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # by names of any case

    @property
    def is_away(self) -> bool:
        """Whether the service cannot answer now: it says so itself, or it is broken."""
        return self.status in AWAY or (self.status >= 500 and self.status != NO_SUCH_METHOD)

    @property
    def retry_after(self) -> float:
        """Seconds that the service asks to wait for; 0: it does not say, or gives a date."""
        value = self.headers.get("Retry-After", "").strip()
        return float(value) if value.isdecimal() else 0.0

    @property
    def excerpt(self) -> str:
        return f"status {self.status}: {excerpt(self.body)}"

    def parse(self, kind: type[M]) -> M:
        """Parse the body, or raise ValidationError; invalid UTF-8 and lone surrogates become U+FFFD."""
        try:
            return kind.model_validate_json(self.body)
        except ValidationError:
            repaired = well_formed_json(self.body)
            if repaired == self.body:
                raise
            return kind.model_validate_json(repaired)


def excerpt(body: bytes) -> str:
    return repr(" ".join(body.decode(errors="replace").split())[:120])


def open_session(timeout: float, token_variable: str = "") -> aiohttp.ClientSession:
    """Open a session without limits or proxies; the variable `token_variable` holds its bearer token."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    token = os.environ.get(token_variable, "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token else None
    whole = aiohttp.ClientTimeout(total=timeout)  # from the connection to the last byte of the reply
    return aiohttp.ClientSession(connector=connector, timeout=whole, headers=headers)


async def request(
    http: aiohttp.ClientSession, method: str, url: str, longest: int = LONGEST_REPLY, **arguments: Any
) -> HttpReply:
    """Return the reply to a request; a redirection is a reply like any other.

    Raises BadReply if it has more than `longest` bytes (decompressed), Unreachable if it is not whole, and
    UserError if this is no URL.
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
        raise Unreachable(failure(error)) from error


async def read_all(parts: AsyncIterator[bytes], longest: int = LONGEST_REPLY) -> bytes:
    """Join the parts of a reply; raise BadReply when they are longer than `longest` bytes."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > longest:
            raise BadReply(f"the reply is longer than {longest / 2**20:g} MiB")
    return bytes(body)


async def watched(reply: Coroutine[Any, Any, T], check: Callable[[], Awaitable[object]], pause: float) -> T:
    """Return a reply; meanwhile call `check` every `pause` seconds, and raise its Unreachable."""
    task = asyncio.create_task(reply)
    try:
        while not (await asyncio.wait({task}, timeout=pause))[0]:
            try:
                await check()
            except Unreachable:
                if not task.done():
                    raise
        return task.result()
    finally:
        task.cancel()


async def retry(
    attempt: Callable[[], Awaitable[T]],
    patience: float,
    on_away: Callable[[Unreachable], object] = lambda error: None,
) -> T:
    """Return what `attempt` returns; repeat it while the service is away, or answers against its contract.

    The pauses double, or are as long as the service asks for. Raises Unreachable after `patience` seconds
    without a reply, and the last of BAD_REPLIES errors BadReply. Other errors pass. `on_away` is called when
    the service is first away, and so again after an invalid reply.
    """
    pause, deadline, bad_replies = FIRST_PAUSE, 0.0, 0
    while True:
        try:
            return await attempt()
        except Unreachable as error:
            if not deadline and patience > ONCE:
                on_away(error)
            deadline = deadline or time.monotonic() + patience
            remaining = deadline - time.monotonic()
            if remaining <= 0 or patience <= ONCE:
                raise
            seconds = min(max(pause + random.uniform(0, FIRST_PAUSE), error.retry_after), remaining)
        except BadReply:
            bad_replies, deadline, seconds = bad_replies + 1, 0.0, pause
            if bad_replies == BAD_REPLIES:
                raise
        await asyncio.sleep(seconds)
        pause = min(2 * pause, LAST_PAUSE)


def no_answer(patience: float) -> str:
    return f"no answer for {patience:g} s" if patience > ONCE else "no answer"


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
    """Return the answers of the services that answer, at least one, and why the others do not, by URL.

    Asks all of them together, for `patience` seconds, `timeout` for one attempt. `ask` raises Unreachable
    where a service is to be waited for; other errors pass at once. `say` gets a line about the wait. Raises
    EnvironmentFailure, with `advice` on how to start the `service`, if none has answered.
    """
    names = ", ".join(urls)

    def on_away(error: Unreachable) -> None:
        say(f"waiting up to {patience:g} s for {service} {names} ({error}); otherwise {advice}")

    async def ask_all() -> tuple[dict[str, T], dict[str, str]]:
        async with open_session(timeout, token_variable) as http:
            distinct = list(dict.fromkeys(urls))
            outcomes = await asyncio.gather(*(ask(http, url) for url in distinct), return_exceptions=True)
        answers: dict[str, T] = {}
        missing: dict[str, Unreachable] = {}
        for url, outcome in zip(distinct, outcomes, strict=True):
            if isinstance(outcome, Unreachable):
                missing[url] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[url] = outcome
        if not answers:
            raise next(iter(missing.values()))
        return answers, {url: str(error) for url, error in missing.items()}

    try:
        return run_to_its_end(lambda: retry(ask_all, patience, on_away))
    except Unreachable as error:
        raise EnvironmentFailure(f"{service} {names}: cannot be reached ({error}); {advice}") from error


def run_to_its_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine, in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


class PerLoop(Generic[T]):
    """A value of the running event loop, such as connections: each loop `make`s a new one."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._value: T | None = None

    def get(self) -> T:
        """Return the value of the running loop, made at the first call there."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._value is None:
            self._loop, self._value = loop, self._make()
        return self._value

    def take(self) -> T | None:
        """Return the value of the running loop, to be closed, and forget it; None: it has none."""
        if self._loop is not asyncio.get_running_loop():
            return None
        value, self._value = self._value, None
        return value
