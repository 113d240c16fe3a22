"""Waits for services: at the start of a program, and between the attempts of a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp

from calibadv_jax.core.errors import EnvironmentFailure
from calibadv_jax.services.http_client import Unreachable, open_session

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubles up to LAST_PAUSE
LAST_PAUSE = 5.0  # at the start of a program
LONGEST_PAUSE = 10.0  # between the attempts of a request
ONCE = 1e-3  # seconds of patience of who wants to know whether a service is there now
BAD_REPLIES = 3  # answers against the contract after which a request has failed

T = TypeVar("T")


@dataclass(frozen=True)
class Present(Generic[T]):
    """Which services are there; at least one is."""

    answers: dict[str, T]  # by URL
    missing: dict[str, str]  # URL: why it does not answer


def wait_for_any(
    what: str,
    urls: Sequence[str],
    ask: Callable[[aiohttp.ClientSession, str], Awaitable[T]],
    *,
    timeout: float,
    patience: float,
    advice: str,
    say: Callable[[str], object],
    token: str = "",
) -> Present[T]:
    """Asks the services together, again and again, until one of them answers.

    Args:
        what: how messages call a service.
        ask: asks one; raises Unreachable where it is to be waited for.
        timeout: seconds of one question.
        patience: seconds for which none needs to answer.
        advice: what a person can do when none does.
        say: told once what is waited for.

    Raises:
        EnvironmentFailure: none has answered in time. Other errors of `ask` pass at once.
    """

    async def wait() -> Present[T]:
        deadline, pause = time.monotonic() + patience, FIRST_PAUSE
        async with open_session(timeout, token) as http:
            while True:
                present = await _ask_all(urls, lambda url: ask(http, url))
                if present.answers:
                    return present
                names, reason = ", ".join(urls), next(iter(present.missing.values()))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EnvironmentFailure(f"{what} {names}: cannot be reached ({reason}); {advice}")
                if pause == FIRST_PAUSE:
                    say(f"waiting up to {patience:g} s for {what} {names} ({reason}); otherwise {advice}")
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, LAST_PAUSE)

    return run_to_its_end(wait)


def run_to_its_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What it returns; in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


async def _ask_all(urls: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> Present[T]:
    answers: dict[str, T] = {}
    missing: dict[str, str] = {}

    async def one(url: str) -> None:
        try:
            answers[url] = await ask(url)
        except Unreachable as error:
            missing[url] = str(error)

    outcomes = await asyncio.gather(*(one(url) for url in dict.fromkeys(urls)), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
    in_order = {url: answers[url] for url in urls if url in answers}  # not in that of the replies
    return Present(in_order, missing)


def no_answer(patience: float) -> str:
    """Say that a service has not answered, and for how long it was waited for, if it was."""
    return f"no answer for {patience:g} s" if patience > ONCE else "no answer"


class Waits:
    """Pauses between the attempts of a request, each twice as long as the last one.

    Args:
        patience: seconds for which services may all be away.
    """

    def __init__(self, patience: float):
        self._patience, self._pause = patience, FIRST_PAUSE
        self._deadline, self._bad_replies = 0.0, 0

    async def for_a_service(self, retry_after: float) -> bool:
        """Waits, as long as a service asks for at least; False if patience has ended."""
        self._deadline = self._deadline or time.monotonic() + self._patience
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        await self._wait(min(max(self._pause + random.uniform(0, FIRST_PAUSE), retry_after), left))
        return True

    async def for_a_good_reply(self) -> bool:
        """Waits after a reply against the contract; False if that was the last one to be borne."""
        self._bad_replies, self._deadline = self._bad_replies + 1, 0.0
        if self._bad_replies == BAD_REPLIES:
            return False
        await self._wait(self._pause)
        return True

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
