"""Connections to the services that a rollout uses.

aiohttp, because hundreds of requests are open at once: httpx goes through all of a pool's connections for
each request (encode/httpx#3215), which took more of a core than the agent loop itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import well_formed_json

AWAY = (408, 425, 429, 502, 503, 504)  # it says itself that a later attempt may succeed
NO_SUCH_METHOD = 501
KEEPALIVE_SECONDS = 2.0  # below the servers' five: so none closes a connection that is just being reused

LONGEST_REPLY = 2**26  # bytes, decompressed: 256 queries with 256 KiB of documents each

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class BadReply(Exception):
    """A service answered, but not what its contract says."""


class Unreachable(Exception):
    """A service did not answer a request, or not in time.

    Args:
        retry_after: seconds that it asks to wait for; 0: it does not say.
    """

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


def open_session(timeout: float, token: str = "") -> aiohttp.ClientSession:
    """A session of the running event loop, with any number of connections.

    Proxies of the environment are not used: services are on loopback or in the same network.

    Args:
        token: sent with every request, as ``Authorization: Bearer``; empty: none.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    headers = {"Authorization": f"Bearer {token}"} if token else None
    return aiohttp.ClientSession(connector=connector, timeout=limit(timeout), headers=headers)


def limit(seconds: float) -> aiohttp.ClientTimeout:
    """Time limit of a request, from its connection to the last byte of its reply."""
    return aiohttp.ClientTimeout(total=seconds)


@dataclass(frozen=True)
class Reply:
    """What a service answered."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # by names of any case

    @property
    def is_away(self) -> bool:
        """Whether the service cannot answer now: it says so itself, or it is broken."""
        return self.status in AWAY or (self.status >= 500 and self.status != NO_SUCH_METHOD)

    @property
    def retry_after(self) -> float:
        """Seconds that the service asks to wait for; 0: it does not say."""
        return _seconds(self.headers.get("Retry-After", ""))

    def parse(self, kind: type[M]) -> M:
        """The body as an object; lone surrogates and what is not UTF-8 become U+FFFD.

        Raises:
            ValidationError: it is not JSON, or no such object.
        """
        try:
            return kind.model_validate_json(self.body)
        except ValidationError:
            whole = well_formed_json(self.body)
            if whole == self.body:
                raise
            return kind.model_validate_json(whole)


async def post(http: aiohttp.ClientSession, url: str, **arguments: Any) -> Reply:
    """The reply to a request; see `request`."""
    return await request(http, "POST", url, **arguments)


async def request(
    http: aiohttp.ClientSession, method: str, url: str, longest: int = LONGEST_REPLY, **arguments: Any
) -> Reply:
    """The reply to a request; a redirection is a reply like any other.

    Args:
        longest: bytes of the reply, decompressed.

    Raises:
        BadReply: it is longer.
        Unreachable: no whole reply.
        UserError: this is no URL.
    """
    try:
        async with http.request(method, url, allow_redirects=False, **arguments) as response:
            body = await read_all(response.content.iter_any(), longest)
            return Reply(response.status, body, response.headers)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise UserError(f"{url}: not a URL; give one such as http://127.0.0.1:8000") from error
    except TimeoutError as error:
        raise Unreachable("no whole reply in time") from error
    except aiohttp.ClientError as error:
        raise Unreachable(f"{type(error).__name__} {error}".strip()) from error


async def read_all(parts: AsyncIterator[bytes], longest: int = LONGEST_REPLY) -> bytes:
    """The parts of a reply in one, each of which is decompressed when it is read.

    Raises:
        BadReply: they are longer than so many bytes.
    """
    read, length = [], 0
    async for part in parts:
        length += len(part)
        if length > longest:
            raise BadReply(f"the reply is longer than {longest / 2**20:g} MiB")
        read.append(part)
    return b"".join(read)


async def watched(reply: Coroutine[Any, Any, T], look: Callable[[], Awaitable[object]], pause: float) -> T:
    """The reply that is waited for; meanwhile `look` is called every `pause` seconds.

    Raises:
        Unreachable: `look` raised it before there was a reply.
    """
    task = asyncio.get_running_loop().create_task(reply)
    try:
        while not (await asyncio.wait({task}, timeout=pause))[0]:
            try:
                await look()
            except Unreachable:
                if not task.done():
                    raise
        return task.result()
    finally:
        task.cancel()


def _seconds(retry_after: str) -> float:
    """Of the header's two forms: a number of seconds, or a date; 0 where it is neither."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
