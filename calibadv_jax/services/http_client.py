"""Connections to the services a rollout asks.

aiohttp, because hundreds of requests are open at once: httpx goes through all of a pool's connections for
each request (encode/httpx#3215), which took more of a core than the agent loop itself.
"""

from __future__ import annotations

from typing import Any

import aiohttp

KEEPALIVE_SECONDS = 2.0  # below the servers' five: they must not close a connection just as it is used again


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
    """At most so long to connect, and between two parts of a reply."""
    return aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)


async def post(http: aiohttp.ClientSession, url: str, **arguments: Any) -> tuple[int, bytes]:
    """Status and body of a reply; a redirection is a reply like any other.

    Raises:
        Unreachable: no whole reply.
    """
    try:
        async with http.post(url, allow_redirects=False, **arguments) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unreachable(f"{type(error).__name__} {error}".strip()) from error
