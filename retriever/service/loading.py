"""Replies while the index is loaded: what is being done, and when to try again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

from retriever.service.web.middleware import RequireToken

RETRY_SECONDS = 5  # what a client is told to wait


class Loading:
    """ASGI application that loads another one in a thread, and hands requests to it from then on.

    Args:
        load: makes the application; is given a function to call with what it does.
        token: if it is not empty, only who sends it learns what is loaded, but for /health.
    """

    def __init__(self, load: Callable[[Callable[[str], None]], Any], token: str = ""):
        self._load = load
        self._app: Any = RequireToken(self._say_stage, token) if token else self._say_stage
        self._stage, self._begun = "starting", time.monotonic()

    async def wait(self) -> None:
        """Loads the application; raises what its loading raises."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                outcome, error = self._load(self._report), None
            except BaseException as raised:
                outcome, error = None, raised
            loop.call_soon_threadsafe(_settle, loaded, outcome, error)

        # A daemon: a service that is told to stop does not wait until a large index is loaded.
        threading.Thread(target=work, name="load", daemon=True).start()
        self._app = await loaded

    def _report(self, stage: str) -> None:
        self._stage = stage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def _say_stage(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seconds = round(time.monotonic() - self._begun, 1)
            state = {"status": "loading", "stage": self._stage, "seconds": seconds}
            if scope["path"] != "/health":
                state = {"error": f"not ready yet: {self._stage}, {seconds:g} s since the start"}
            reply = JSONResponse(state, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)})
            await reply(scope, receive, send)


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
