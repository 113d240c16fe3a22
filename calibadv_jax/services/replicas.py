"""Several services that answer alike: each gets its share, and those that fail are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from calibadv_jax.core.errors import UserError
from calibadv_jax.services.http_client import Reply, Unreachable
from calibadv_jax.services.retriever_health import IDENTITY, IDENTITY_HEADER, ask_health, difference
from calibadv_jax.services.retriever_replies import Away

FIRST_PAUSE = 0.5  # seconds before a service that failed is asked for its health; doubles up to LAST_PAUSE
LAST_PAUSE = 10.0


@dataclass
class Replica:
    """A service, and what is known of it."""

    url: str
    pause: float  # before its health is asked for
    is_busy: bool = False  # with a request of ours
    is_well: bool = True
    is_known: bool = False  # it has shown what it serves since it was last away
    other: str = ""  # what it serves instead of the index that was agreed on
    turn: int = 0  # of its last request
    check: asyncio.Task[None] | None = None


class Replicas:
    """Services of one index, each with one request under way at a time. For one event loop.

    A service that cannot be reached, or says that it cannot answer now, gets no further requests until its
    ``GET /health`` answers; the next one is asked instead. So it is with one that serves another index.

    Args:
        http: makes the requests.
        urls: base URLs.
        agreed: what their health said at the start; None: not asked, then nothing is compared.
        named: URLs of services that have named their index with a reply; added to. A reply without the name
            is then another service's.
        warn: told which service is left out, and why.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: Sequence[str],
        agreed: Mapping[str, Any] | None,
        named: set[str],
        warn: Callable[[str], object],
    ):
        self._http, self._agreed, self._named, self._warn = http, agreed, named, warn
        self._all = [Replica(url, FIRST_PAUSE) for url in urls]
        self._turns = 0
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Ends the checks of those that were left out."""
        checks = [replica.check for replica in self._all if replica.check is not None]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    async def take(self) -> Replica:
        """The service that has been free longest, for one request; if none is well, any that may be again.

        To be given back.

        Raises:
            UserError: all serve another index than at the start.
        """
        while True:
            usable = [replica for replica in self._all if not replica.other]
            if not usable:
                raise UserError(
                    f"retriever {self._all[0].url} serves another index than at the start of this run"
                    f" ({self._all[0].other}); serve the index that the run began with, or begin another run"
                )
            candidates = [replica for replica in usable if replica.is_well] or usable
            free = [replica for replica in candidates if not replica.is_busy]
            if free:
                replica = min(free, key=lambda one: one.turn)
                self._turns += 1
                replica.is_busy, replica.turn = True, self._turns
                return replica
            self._changed.clear()
            await self._changed.wait()

    def give_back(self, replica: Replica) -> None:
        """Another request may take the service."""
        replica.is_busy = False
        self._changed.set()

    def leave_out(self, replica: Replica, reason: Unreachable) -> bool:
        """The service gets no requests until its health is good; a single service is not left out.

        Returns:
            Whether to ask again at once: another one is well, or all serve another index.
        """
        replica.is_known = False
        if len(self._all) > 1:
            if replica.is_well and not replica.other and not isinstance(reason, Away):
                self._warn(f"retriever {replica.url} is left out until it answers: {reason}")
            replica.is_well = False
            if replica.check is None or replica.check.done():
                replica.check = asyncio.create_task(self._wait_for(replica, reason.retry_after))
        return any(one.is_well for one in self._all if one is not replica) or all(
            one.other for one in self._all
        )

    async def check(self, replica: Replica, reply: Reply) -> None:
        """Notes that the service is well, unless the reply is of another index.

        Raises:
            Unreachable: it is of another index than the agreed one, or the service does not say.
        """
        if self._agreed is not None:
            await self._check_index(replica, reply, self._agreed.get(IDENTITY))
        replica.is_well, replica.pause = True, FIRST_PAUSE

    async def _check_index(self, replica: Replica, reply: Reply, agreed: Any) -> None:
        said = reply.headers.get(IDENTITY_HEADER)
        if agreed is not None and said is not None:
            self._named.add(replica.url)
            self._compare(replica, f"{IDENTITY} {said!r} instead of {agreed!r}" if said != agreed else "")
        elif reply.status == 200 and replica.url in self._named:
            self._compare(replica, f"no {IDENTITY_HEADER} instead of {agreed!r}")
        elif not replica.is_known:
            self._compare(replica, self._differs(replica, await ask_health(self._http, replica.url)))
        if replica.other:
            raise Unreachable(f"it serves another index: {replica.other}")

    def _differs(self, replica: Replica, state: Mapping[str, Any]) -> str:
        """What a service's health says that it serves instead of the agreed index; empty: it serves that."""
        if self._agreed is None:
            return ""
        if replica.url in self._named and IDENTITY not in state:
            return f"no {IDENTITY} instead of {self._agreed[IDENTITY]!r}"
        return difference(self._agreed, state)

    def _compare(self, replica: Replica, other: str) -> None:
        """Notes what a service serves instead of the agreed index; empty: it serves that."""
        if other and other != replica.other:
            self._warn(
                f"retriever {replica.url} serves another index ({other}) and is left out; serve the one that"
                " the run began with"
            )
        replica.other, replica.is_known = other, not other

    async def _wait_for(self, replica: Replica, wait: float) -> None:
        """Until its health is good; a service without that route need only answer."""
        while not replica.is_well:
            await asyncio.sleep(min(max(replica.pause, wait), LAST_PAUSE))
            replica.pause = min(2 * replica.pause, LAST_PAUSE)
            try:
                state = await ask_health(self._http, replica.url)
            except Unreachable:
                continue
            self._compare(replica, self._differs(replica, state))
            replica.is_well = not replica.other
        self._changed.set()
