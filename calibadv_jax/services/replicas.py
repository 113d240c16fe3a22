"""Several retrieval services of one index: requests are divided between them; failed ones are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from calibadv_jax.core.errors import UserError
from calibadv_jax.services.http_client import LAST_PAUSE, HttpReply, Unreachable, Warn, request
from calibadv_jax.services.retriever_health import IDENTITY, IDENTITY_HEADER, ask_health, index_difference
from calibadv_jax.services.retriever_replies import Unavailable

CHECK_PAUSE = 0.5  # seconds before the health of a failed service is asked for; doubles up to LAST_PAUSE
T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One of several services with equal answers.

    Attributes:
        url: Its address.
        pause: Seconds before its health is asked for.
        is_verified: Whether it has shown its index since it last failed.
        index_difference: How its index differs from the agreed one; empty if it does not.
        recovery: Task that waits for its health; None: it gets requests.
    """

    url: str
    pause: float = CHECK_PAUSE
    is_verified: bool = False
    index_difference: str = ""
    recovery: asyncio.Task[None] | None = None


class Replicas:
    """Services of one index, for one event loop. Each has at most one request under way.

    A service that is unavailable, or serves another index, gets no requests until its ``GET /health`` is
    good. Meanwhile the next service is asked.

    Args:
        http: Connections of the event loop.
        urls: Addresses of the services.
        agreed: Health of the agreed index; None: nothing is compared.
        warn: Takes a line about a service that is left out.
    """

    def __init__(
        self, http: aiohttp.ClientSession, urls: Sequence[str], agreed: Mapping[str, Any] | None, warn: Warn
    ):
        self._http = http
        self._agreed = agreed
        self._warn = warn
        self._replicas = [Replica(url) for url in urls]
        # The service that was asked longest ago comes first.
        self._free: asyncio.Queue[Replica] = asyncio.Queue()
        for replica in self._replicas:
            self._free.put_nowait(replica)

    async def close(self) -> None:
        """Cancel the waits for services that are left out."""
        recoveries = [replica.recovery for replica in self._replicas if replica.recovery is not None]
        for recovery in recoveries:
            recovery.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)

    async def post(
        self,
        route: str,
        make_body: Callable[[], Mapping[str, Any]],
        read_reply: Callable[[str, HttpReply], T],
    ) -> T:
        """Send a request to a free service; if that is unavailable or has another index, to the next one.

        Args:
            route: Path of the request.
            make_body: Returns the body. Called when a service is free, again for each service.
            read_reply: Returns the result, given the URL of the service and its reply.

        Raises:
            Unreachable: No service is left.
            UserError: All services serve another index.
        """
        while True:
            replica = await self._free.get()
            try:
                reply = await request(self._http, "POST", replica.url + route, json=make_body())
                if not reply.is_unavailable:
                    await self._check_index(replica, reply)
                return read_reply(replica.url, reply)
            except Unreachable as error:
                if not self._leave_out(replica, error):
                    raise
            finally:
                if replica.recovery is None:
                    self._free.put_nowait(replica)

    def _leave_out(self, replica: Replica, reason: Unreachable) -> bool:
        """Send the service no requests until its health is good.

        Returns False, and goes on sending requests, if it is the last service that gets any. Raises UserError
        if all services serve another index.
        """
        replica.is_verified = False
        if all(candidate.index_difference for candidate in self._replicas):
            raise UserError(
                f"retriever {replica.url} serves another index than at the start of this run"
                f" ({replica.index_difference}); serve the index that the run began with, or begin another"
                " run"
            )
        others = [candidate for candidate in self._replicas if candidate is not replica]
        if all(other.recovery for other in others):
            return False
        if not replica.index_difference and not isinstance(reason, Unavailable):
            self._warn(f"retriever {replica.url} is left out until it answers: {reason}")
        replica.recovery = asyncio.create_task(self._recover(replica, reason.retry_after))
        return True

    async def _recover(self, replica: Replica, min_pause: float) -> None:
        """Wait until the service has the agreed index; without a health route it needs only to answer."""
        is_healthy = False
        while not is_healthy:
            await asyncio.sleep(min(max(replica.pause, min_pause), LAST_PAUSE))
            replica.pause = min(2 * replica.pause, LAST_PAUSE)
            try:
                state = await ask_health(self._http, replica.url)
            except Unreachable:
                replica.index_difference = ""  # it may come back with the agreed index
                continue
            self._note_index(replica, index_difference(self._agreed, state))
            is_healthy = not replica.index_difference
        replica.recovery = None
        self._free.put_nowait(replica)

    async def _check_index(self, replica: Replica, reply: HttpReply) -> None:
        """Raise Unreachable unless the reply is of the agreed index."""
        agreed_identity = (self._agreed or {}).get(IDENTITY)
        reply_identity = reply.headers.get(IDENTITY_HEADER)
        if agreed_identity is not None and reply_identity is not None:
            mismatch = ""
            if reply_identity != agreed_identity:
                mismatch = f"{IDENTITY} {reply_identity!r} instead of {agreed_identity!r}"
            self._note_index(replica, mismatch)
        elif self._agreed is not None and not replica.is_verified:
            state = await ask_health(self._http, replica.url)
            self._note_index(replica, index_difference(self._agreed, state))
        if replica.index_difference:
            raise Unreachable(f"it serves another index: {replica.index_difference}")
        replica.pause = CHECK_PAUSE

    def _note_index(self, replica: Replica, index_difference: str) -> None:
        if index_difference and index_difference != replica.index_difference:
            self._warn(
                f"retriever {replica.url} serves another index ({index_difference}) and is left out; serve"
                " the one that the run began with"
            )
        replica.index_difference = index_difference
        replica.is_verified = not index_difference
