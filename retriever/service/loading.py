"""The application that answers while the service is loaded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.responses import JSONResponse

from retriever.service.middleware import OPEN_ROUTE, RequireToken

# Takes a line that says what is done, such as "reading the corpus".
ReportStage = Callable[[str], None]

# Seconds after which a client may come back while the index is loaded.
RETRY_SECONDS = 5


class Loading:
    """An ASGI application that loads another one in a thread, and then hands requests to it.

    Args:
        load: Returns the application; it gets a function to report its stage to.
        token: Token that requests need, but those of /health; empty for none.
    """

    def __init__(self, load: Callable[[ReportStage], Any], token: str = ""):
        self._load = load
        self._app: Any = self._reply_loading
        if token:
            self._app = RequireToken(self._reply_loading, token)
        self._stage = "starting"
        self._start = time.monotonic()

    async def wait(self) -> None:
        """Load the application and wait for it; raise what its loading raises."""
        loaded: Future[Any] = Future()
        loaded.set_running_or_notify_cancel()

        def work() -> None:
            try:
                loaded.set_result(self._load(self._report))
            except BaseException as error:
                loaded.set_exception(error)

        # A daemon: a service that is stopped does not wait until a large index is loaded.
        threading.Thread(target=work, name="load", daemon=True).start()
        self._app = await asyncio.wrap_future(loaded)

    def _report(self, stage: str) -> None:
        self._stage = stage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def _reply_loading(self, scope: Any, receive: Any, send: Any) -> None:
        """Reply 503 with the stage."""
        if scope["type"] != "http":
            return
        seconds = round(time.monotonic() - self._start, 1)
        content: dict[str, Any]
        if scope["path"] == OPEN_ROUTE:
            content = {"status": "loading", "stage": self._stage, "seconds": seconds}
        else:
            content = {"error": f"not ready yet: {self._stage}, {seconds:g} s since the start"}
        reply = JSONResponse(content, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)})
        await reply(scope, receive, send)
