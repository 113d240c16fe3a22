"""Waits at the start of a program for services that are started elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp

from calibadv_jax.core.errors import UserError
from calibadv_jax.services.http_client import Unreachable, open_session

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubles up to LAST_PAUSE
LAST_PAUSE = 5.0

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
        UserError: none has answered in time. Other errors of `ask` pass at once.
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
                    raise UserError(f"{what} {names}: cannot be reached ({reason}); {advice}")
                if pause == FIRST_PAUSE:
                    say(f"waiting up to {patience:g} s for {what} {names} ({reason}); otherwise {advice}")
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, LAST_PAUSE)

    return _run(wait)


def _run(wait: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What it returns; in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(wait())).result()


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
