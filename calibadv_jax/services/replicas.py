"""Several services that answer alike: each gets its share, and those that fail are left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from calibadv_jax.services.http_client import Reply, Unreachable, post

AWAY = (408, 425, 429, 502, 503, 504)  # it says itself that a later attempt may succeed
FIRST_PAUSE = 0.5  # seconds before a service that failed is asked for its health; doubles up to LAST_PAUSE
LAST_PAUSE = 10.0
HEALTH_SECONDS = 5.0  # that the answer may take


@dataclass
class _Replica:
    url: str
    pause: float  # before its health is asked for
    is_busy: bool = False  # with a request of ours
    is_well: bool = True
    turn: int = 0  # of its last request
    check: asyncio.Task[None] | None = None


class Replicas:
    """Services of one corpus and index, each with one request under way at a time. For one event loop.

    Args:
        http: makes the requests.
        urls: base URLs.
    """

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str]):
        self._http = http
        self._all = [_Replica(url, FIRST_PAUSE) for url in urls]
        self._turns = 0
        self._changed = asyncio.Event()

    async def post(self, route: str, body: Any) -> tuple[str, Reply]:
        """The reply of the first service that has one, and its URL.

        A service that cannot be reached, or says that it cannot answer now, gets no further requests until
        its ``GET /health`` answers; the next one is asked instead.

        Raises:
            Unreachable: none can be reached, and this was the last one's reason.
        """
        while True:
            async with self.turn() as replica:
                try:
                    reply = await post(self._http, replica.url + route, json=body)
                except Unreachable:
                    if not self._leave_out(replica):
                        raise
                    continue
                if reply.status in AWAY and self._leave_out(replica, reply.retry_after):
                    continue
                if reply.status not in AWAY:
                    replica.is_well, replica.pause = True, FIRST_PAUSE
                return replica.url, reply

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[_Replica]:
        """Waits for a service without a request of ours; where none is well, for any."""
        replica = await self._take()
        try:
            yield replica
        finally:
            replica.is_busy = False
            self._changed.set()

    async def close(self) -> None:
        """Ends the checks of those that were left out."""
        checks = [replica.check for replica in self._all if replica.check is not None]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    async def _take(self) -> _Replica:
        while True:
            candidates = [replica for replica in self._all if replica.is_well] or self._all
            free = [replica for replica in candidates if not replica.is_busy]
            if free:
                replica = min(free, key=lambda one: one.turn)
                self._turns += 1
                replica.is_busy, replica.turn = True, self._turns
                return replica
            self._changed.clear()
            await self._changed.wait()

    def _leave_out(self, replica: _Replica, wait: float = 0.0) -> bool:
        """Whether another one is well, which is asked instead."""
        if len(self._all) == 1:
            return False
        replica.is_well = False
        if replica.check is None or replica.check.done():
            replica.check = asyncio.create_task(self._wait_for(replica, wait))
        return any(other.is_well for other in self._all)

    async def _wait_for(self, replica: _Replica, wait: float) -> None:
        """Until its health is good; a service without that route need only answer."""
        while not replica.is_well:
            await asyncio.sleep(min(max(replica.pause, wait), LAST_PAUSE))
            replica.pause = min(2 * replica.pause, LAST_PAUSE)
            try:
                limit = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
                async with self._http.get(f"{replica.url}/health", timeout=limit) as response:
                    replica.is_well = response.status not in AWAY
            except (aiohttp.ClientError, TimeoutError):
                continue
        self._changed.set()
