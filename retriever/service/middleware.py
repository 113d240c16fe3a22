"""Around every request, from the outside in: measured, asked for the token, its body limited."""

from __future__ import annotations

import hmac
import time
from typing import Any

from retriever.service.contracts import error_reply
from retriever.service.metrics import Metrics

ROUTES = {"/retrieve", "/access", "/health", "/metrics"}  # a label each; the others share one
OPEN = "/health"  # answers without a token


class Measure:
    """ASGI middleware: counts requests by route and status, and times them."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        begun, status = time.monotonic(), 500  # where the application fails before it answers

        async def note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note)
        finally:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - begun)


class RequireToken:
    """ASGI middleware: without ``Authorization: Bearer <token>`` a request gets 401, its body unread."""

    def __init__(self, app: Any, token: str):
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN and not self._is_allowed(scope["headers"]):
            message = "send the header Authorization: Bearer <the service's token>"
            await error_reply(401, message, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        scheme, _, given = dict(headers).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token)


class BodyLimit:
    """ASGI middleware: a request body beyond `max_body` bytes is answered with 413, not read to its end."""

    def __init__(self, app: Any, max_body: int):
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        complete = more = declared.isdigit() and int(declared) <= self.max_body
        parts, size = [], 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            complete = size <= self.max_body
            more = complete and message.get("more_body", False)
        if not complete:
            message = f"the body is larger than {self.max_body} bytes; send fewer queries at once"
            await error_reply(413, message)(scope, receive, send)
            return
        body: bytes | None = b"".join(parts)

        async def replay() -> Any:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        await self.app(scope, replay, send)
