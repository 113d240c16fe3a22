"""Connections to the services that a rollout uses.

aiohttp, because hundreds of requests are open at once: httpx goes through all of a pool's connections for
each request (encode/httpx#3215), which took more of a core than the agent loop itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from calibadv_jax.errors import UserError

KEEPALIVE_SECONDS = 2.0  # below the servers' five: so none closes a connection that is just being reused


class Unreachable(Exception):
    """A service did not answer a request, or not in time."""


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
    """Time limit to connect, and between two parts of a reply."""
    return aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)


@dataclass(frozen=True)
class Reply:
    """What a service answered."""

    status: int
    body: bytes
    retry_after: float  # seconds that the service asks to wait for; 0: it does not say


async def post(http: aiohttp.ClientSession, url: str, **arguments: Any) -> Reply:
    """The reply to a request; a redirection is a reply like any other.

    Raises:
        Unreachable: no whole reply.
        UserError: this is no URL.
    """
    try:
        async with http.post(url, allow_redirects=False, **arguments) as response:
            wait = _seconds(response.headers.get("Retry-After", ""))
            return Reply(response.status, await response.read(), wait)
    except aiohttp.InvalidURL as error:
        raise UserError(f"{url}: not a URL; give one such as http://127.0.0.1:8000") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unreachable(f"{type(error).__name__} {error}".strip()) from error


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
