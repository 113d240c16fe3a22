"""Connections to the services a rollout asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

KEEPALIVE_SECONDS = 2.0  # below the servers' five: they must not close a connection just as it is used again


def open_client(url: str, timeout: float, max_keepalive: int = 20) -> httpx.AsyncClient:
    """A client for one service at `url`, with any number of connections of which `max_keepalive` are kept.

    Proxies of the environment are not used: services are on loopback or in the same network.
    """
    import httpx

    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=max_keepalive, keepalive_expiry=KEEPALIVE_SECONDS
    )
    verify = url.startswith("https")  # loading certificates costs more than a local search
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=verify)
